"""Common base of sources whose groups are rollouts of prompts that are drawn in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import RewardError
from lachesis.common.types import Group, Prompt
from lachesis.metrics.meters import BusyTime, Tally
from lachesis.rollouts.base import Done, Draw, GroupwiseSource
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.generation import nested_deadline, request_seed
from lachesis.rollouts.rewards.attempts import Item

# A batch without a single usable group may be bad luck; this many in a row are a broken reward or environment.
MOST_EMPTY_BATCHES = 10


class DrawingSource(GroupwiseSource):
    """Source that numbers its requests and makes whole batches of its draws.

    A call of :meth:`next_groups` that raises leaves the source as it was before: its prompts and request numbers come
    again.
    """

    _requests = 0

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Return the groups of the next ``count`` prompts, without the dropped ones.

        Where all of them were dropped, the prompts after them are taken, a limited number of times.

        Raises:
            RewardError: all groups of several calls in a row were dropped.
        """
        first_request, taken, errors = self._requests, list[Prompt](), list[RewardError]()
        try:
            for _ in range(MOST_EMPTY_BATCHES):
                draws = self.draw(count)
                taken += [draw.prompt for draw in draws]
                outcomes: dict[int, Group | RewardError] = {}
                self.roll_out(draws, deadline=deadline, done=outcomes.__setitem__)
                ordered = [outcomes[place] for place in sorted(outcomes)]
                if groups := [one for one in ordered if isinstance(one, Group)]:
                    return groups
                errors = [one for one in ordered if isinstance(one, RewardError)]
                deadline.check("every group so far was dropped")
            raise self._all_failed(len(taken), errors[-1])
        except BaseException:
            self.requeue(taken)
            self._requests = first_request
            raise

    def _all_failed(self, count: int, last: RewardError) -> RewardError:
        return all_failed(count, last)


@dataclass(kw_only=True, eq=False)
class PromptSource(DrawingSource):
    """A source that draws prompts from a stream and makes ``num_generations`` rollouts of each.

    The rollouts of a prompt depend on the weights, the run's seed and the number of requests before it, so a resumed
    run samples what the uninterrupted one would have.

    Args:
        stream: the prompts, in the order of training.
        num_generations: rollouts of each prompt.
        seed: the run's; the seeds of requests derive from it.
        generation_s: limit of generating the rollouts of one call, in seconds, within the deadline of the caller.
    """

    stream: PromptStream
    num_generations: int
    seed: int
    generation_s: float | None = None

    def __post_init__(self) -> None:
        self._requests = self._step = 0
        self._counts = Tally()
        self._generating = BusyTime()

    def measure(self, generating: BusyTime) -> None:
        """Count the time of generation in that measure, together with that of other sources."""
        self._generating = generating

    def draw(self, count: int) -> list[Draw]:
        first = self._requests
        self._requests += count
        return [Draw(prompt, first + i) for i, prompt in enumerate(self.stream.take(count))]

    def _note_pass_rates(self, items: Sequence[Item], outcomes: Sequence[Group | RewardError]) -> None:
        """Note pass rates; count problems that were skipped, and the tokens that as many of these groups would have."""
        if self.stream.adapts:
            for outcome in outcomes:
                if isinstance(outcome, Group):
                    self.stream.note(outcome)
            skipped, self.stream.skipped = self.stream.skipped, 0
            tokens = sum(len(sample.completion_ids) for item in items for sample in item.group.samples)
            saved = skipped * tokens / max(1, len(items))
            self._counts.add(curriculum_skipped=skipped, curriculum_tokens_saved=saved)

    def _request_seed(self, draw: Draw) -> int:
        return request_seed(self.seed, draw.request)

    def _generation(self, draws: Sequence[Draw], deadline: Deadline) -> Deadline:
        name = f"generation of {len(draws)} prompts x {self.num_generations} completions"
        return nested_deadline(name, deadline, self.generation_s, "deadlines.generation_s")

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        """Make these prompts the next ones. Raises DataError for a prompt that is not of this dataset."""
        self.stream.put_back(prompts)
        return True

    def report_version(self, version: int) -> None:
        """Note the step. Nothing is throttled: rollouts begin when they are asked for."""
        self._step = version

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream, prompts put back, the number of requests so far, and the step."""
        return {"stream": self.stream.state_dict(), "requests": self._requests, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises CheckpointError if the dataset differs."""
        self.stream.load_state_dict(state["stream"])
        self._requests = int(state["requests"])
        self.report_version(int(state.get("step", 0)))


def tell_all(done: Done, outcomes: Mapping[int, Group | RewardError]) -> None:
    """Call ``done`` for each outcome, by its place; if one call raises, the others are still made."""
    with ExitStack() as telling:
        for place in sorted(outcomes, reverse=True):
            telling.callback(done, place, outcomes[place])


def all_failed(count: int, last: RewardError) -> RewardError:
    """Return the error for ``count`` groups in a row that were all dropped."""
    return RewardError(f"the rewards of {count} groups in a row failed; the last: {last.message}", remedy=last.remedy)


def too_few(prompt: Prompt, left: int) -> RewardError:
    """Return the error for a group with too few remaining rollouts."""
    return RewardError(
        f"all but {left} rollouts of prompt {prompt.id!r} failed",
        remedy="see failures.jsonl or the log for the causes; fix them, or give rollouts more time",
    )


def fewest_rollouts(num_generations: int) -> int:
    """Return how many rollouts a group needs: two, as one has nothing to be measured against, unless one is all."""
    return min(2, num_generations)
