"""Groups made here: prompts from a dataset, completions from an engine, rewards from Python functions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lachesis.common.deadline import Deadline
from lachesis.common.errors import RewardError
from lachesis.common.types import Group, Prompt, SamplingParams
from lachesis.engines.base import Engine
from lachesis.metrics.meters import BusyTime
from lachesis.rollouts.base import Done, Draw, GroupwiseSource
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.failures import note_excluded, note_failure
from lachesis.rollouts.generation import TextDecoder, generate_groups, nested_deadline, request_seed
from lachesis.rollouts.partial_rollouts import KeptGroup, KeptRollout, KeptRollouts
from lachesis.rollouts.rewards.attempts import Item
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.rewards.rewarder import Rewarder, Scored

# A batch without a single usable group may be bad luck; this many in a row are a broken reward function.
MOST_EMPTY_BATCHES = 10
# A group needs two rollouts: one has nothing to be measured against.
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class RolloutPart:
    """Groups of a call that were scored together; ``places`` are those of their draws, dropped ones included."""

    places: Sequence[int]
    tokens: int
    scored: Scored

    def groups(self) -> list[tuple[int, Group]]:
        """The groups that are left, with their places."""
        return [(self.places[index], group) for index, group in zip(self.scored.kept, self.scored.groups, strict=True)]

    def dropped(self) -> list[int]:
        """The places of those that are not."""
        return [place for index, place in enumerate(self.places) if index not in set(self.scored.kept)]


@dataclass(kw_only=True, eq=False)
class LocalSource(GroupwiseSource):
    """Samples ``num_generations`` completions a prompt and scores them.

    The completions of a prompt depend on the weights, the run's seed and the number of requests before it, so
    a resumed run samples what the uninterrupted one would have. A call of :meth:`next_groups` that raises leaves the
    source as it was before: its prompts and request numbers come again.

    Args:
        decode: token ids of many completions to their texts.
        seed: the run's; the seeds of requests derive from it.
        generation_s: limit of one generation, in seconds, within the deadline of the caller.

    Raises:
        RewardError: a reward function needs a column that the dataset does not have.
    """

    stream: PromptStream
    engine: Engine
    rewarder: Rewarder
    decode: TextDecoder
    params: SamplingParams
    num_generations: int
    seed: int
    generation_s: float | None = None

    def __post_init__(self) -> None:
        self._requests = 0
        self._step = 0
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, list[tuple[float, int]]] = {}
        self._counting = threading.Lock()
        self._generating = BusyTime()
        self._check_columns()

    def _check_columns(self) -> None:
        self.rewarder.check_columns(self.stream.columns)

    def draw(self, count: int) -> list[Draw]:
        first = self._requests
        self._requests += count
        return [Draw(prompt, first + i) for i, prompt in enumerate(self.stream.take(count))]

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Scored groups of the next ``count`` prompts, less those whose reward failed under ``drop_group``.

        Where all of them failed, the prompts after them are taken, a limited number of times.
        """
        first_request, taken, errors = self._requests, [], []
        try:
            for _ in range(MOST_EMPTY_BATCHES):
                draws = self.draw(count)
                taken += [draw.prompt for draw in draws]
                parts: list[RolloutPart] = []
                self._roll_out(draws, deadline=deadline, done=parts.append)
                placed = sorted((entry for part in parts for entry in part.groups()), key=lambda entry: entry[0])
                if placed:
                    return [group for _, group in placed]
                errors = [error for part in parts for error in part.scored.errors]
                deadline.check("every group so far was dropped because its reward failed")
            raise all_failed(len(taken), errors[-1])
        except BaseException:
            self.stream.put_back(taken)
            self._requests = first_request
            raise

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        def tell(part: RolloutPart) -> None:
            dropped = [(place, part.scored.errors[-1]) for place in part.dropped()]
            with ExitStack() as telling:  # of all, also where one is answered that the run has ended
                for place, outcome in reversed([*part.groups(), *dropped]):
                    telling.callback(done, place, outcome)

        self._roll_out(draws, deadline=deadline, done=tell)

    def _roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Callable[[RolloutPart], None]) -> None:
        """Generate, then score; ``done`` is told of all in one part, or of several as they are done."""
        with self._generating.span():
            owned = [replace(draw, prompt=self.stream.own(draw.prompt)) for draw in draws]
            items = self._sample(owned, self._generation(draws, deadline))
        generated = time.monotonic()
        part = self._scored(items, range(len(items)))
        self._count(reward_time=time.monotonic() - generated)
        self._count_part(part)
        done(part)

    def _scored(self, items: Sequence[Item], places: Sequence[int]) -> RolloutPart:
        """The rewards of all groups, without what could not be judged.

        Groups of which too few rollouts are left, before or after that, count as dropped. ``places`` are the items'.
        """
        fewest = min(_FEWEST, self.num_generations)
        whole = [index for index, item in enumerate(items) if len(item.group.samples) >= fewest]
        groups = [items[index].group for index in whole]
        scored = self.rewarder.score(groups, extras=[items[index].extras for index in whole])
        judged = [self._judged(group, scored.excluded[index]) for index, group in enumerate(scored.groups)]
        kept = [index for index, group in enumerate(judged) if len(group.samples) >= fewest]
        small = [item.group for item in items if len(item.group.samples) < fewest]
        small += [group for group in judged if len(group.samples) < fewest]
        left = Scored(
            groups=[judged[index] for index in kept],
            dropped=scored.dropped + len(small),
            errors=[*scored.errors, *map(_too_few, small)],
            kept=[whole[scored.kept[index]] for index in kept],
            extras=[judged[index].logged for index in kept],
            metrics=scored.metrics,
        )
        return RolloutPart(places, tokens_in(groups), left)

    def _judged(self, group: Group, excluded: Mapping[int, Excluded]) -> Group:
        """The group without the samples that could not be judged, which are counted by their causes."""
        if not excluded:
            return group
        note_excluded(group, excluded)
        for reason in excluded.values():
            self._count(**{"rollout_failures": 1, f"rollout_failures/{reason.counted}": 1})
        return group.without(excluded)

    def _generation(self, draws: Sequence[Draw], deadline: Deadline) -> Deadline:
        name = f"generation of {len(draws)} prompts x {self.num_generations} completions"
        return nested_deadline(name, deadline, self.generation_s, "deadlines.generation_s")

    def _seeds(self, draws: Sequence[Draw]) -> list[int]:
        return [request_seed(self.seed, draw.request) for draw in draws]

    def _sample(self, draws: Sequence[Draw], deadline: Deadline) -> list[Item]:
        """Unscored groups, one for each draw, each with a seed of its own."""
        groups = generate_groups(
            [draw.prompt for draw in draws],
            engine=self.engine,
            params=self.params,
            num_generations=self.num_generations,
            seeds=self._seeds(draws),
            decode=self.decode,
            deadline=deadline,
        )
        return [Item(group) for group in groups]

    def _count(self, **amounts: float) -> None:
        with self._counting:
            self._counts.update(amounts)  # type: ignore[arg-type]

    def _count_part(self, part: RolloutPart) -> None:
        scored = part.scored
        for error in scored.errors:
            note_failure(error.message, cause="reward")
        self._count_curriculum(part)
        self._count(tokens_generated=part.tokens, dropped_groups=scored.dropped, reward_errors=len(scored.errors))
        with self._counting:
            for metric, value in scored.metrics.items():
                self._logged.setdefault(metric, []).append((value, len(part.places)))

    def _count_curriculum(self, part: RolloutPart) -> None:
        """Note pass rates; count problems that were skipped, and the tokens that as many of these groups would have."""
        if self.stream.adapts:
            for _, group in part.groups():
                self.stream.note(group)
            skipped, self.stream.skipped = self.stream.skipped, 0
            saved = skipped * part.tokens / max(1, len(part.places))
            self._count(curriculum_skipped=skipped, curriculum_tokens_saved=saved)

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        """Make these prompts the next ones. Raises DataError for a prompt that is not of this dataset."""
        self.stream.put_back(prompts)
        return True

    def report_version(self, version: int) -> None:
        """Reward functions may ask for the step. Nothing is throttled: the engine samples when it is asked to."""
        self._step = version
        self.rewarder.report_step(version)

    def counters(self) -> dict[str, float]:
        """Since the last call: ``generation_time`` (calls that overlap count once) and ``reward_time`` in seconds,
        ``tokens_generated`` (also those of dropped groups), ``dropped_groups``, ``reward_errors``; where samples could
        not be judged, ``rollout_failures`` and ``rollout_failures/CAUSE``; and ``reward_metrics/NAME``, the mean over
        groups of what reward functions logged."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
            logged, self._logged = self._logged, {}
        counts["generation_time"] = self._generating.take()  # type: ignore[assignment]
        means = {f"reward_metrics/{name}": _mean(values) for name, values in logged.items()}
        failures = [name for name in counts if name.startswith(("rollout_failures", "curriculum_"))]
        return {name: float(counts[name]) for name in (*self._counted, *failures)} | means

    @property
    def _counted(self) -> tuple[str, ...]:
        return ("generation_time", "reward_time", "tokens_generated", "dropped_groups", "reward_errors")

    def state_dict(self) -> dict[str, Any]:
        """The place in the dataset, prompts put back, the number of requests so far, and the step."""
        return {"stream": self.stream.state_dict(), "requests": self._requests, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError where the dataset is another one."""
        self.stream.load_state_dict(state["stream"])
        self._requests = int(state["requests"])
        self.report_version(int(state["step"]))


class Player(Protocol):
    """Plays rollouts of several turns, each of which ends before its group is whole."""

    @property
    def columns(self) -> Sequence[str]:
        """What reward functions get of its rollouts, besides the dataset's columns."""
        ...

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        params: SamplingParams,
        num_generations: int,
        seeds: Sequence[int],
        deadline: Deadline,
        kept: Sequence[KeptGroup] | None = None,
    ) -> list[Item]:
        """``num_generations`` rollouts of each prompt, unscored; fewer where some failed, even none.

        Args:
            kept: of each prompt, the rollouts that are there already, and who is told of each other that is finished.
        """
        ...

    def take_counts(self) -> dict[str, float]:
        """Since the last call."""
        ...

    def close(self) -> None:
        """End what it has started. Idempotent."""
        ...


@dataclass(kw_only=True, eq=False)
class PlayedSource(LocalSource):
    """A source whose samples are rollouts that a player plays: conversations with tools, or what agents say.

    Reward functions get all messages of a rollout as its completion, those of tools included, and the player's columns.
    A rollout may be several samples, each with its reward; a group that is left with fewer than two is dropped.
    """

    player: Player
    _kept: KeptRollouts | None = field(default=None, init=False)

    def keep(self, kept: KeptRollouts) -> None:
        self._kept = kept

    def counters(self) -> dict[str, float]:
        """Those of :class:`LocalSource`, and those of its player: what both have lost counts together."""
        own, played = super().counters(), self.player.take_counts()
        return own | played | {name: own[name] + played[name] for name in own.keys() & played.keys()}

    def close(self) -> None:
        """Close the player. Idempotent."""
        self.player.close()

    def _check_columns(self) -> None:
        self.rewarder.check_columns({*self.stream.columns, *self.player.columns})

    def _sample(self, draws: Sequence[Draw], deadline: Deadline) -> list[Item]:
        return self.player.sample(
            [draw.prompt for draw in draws],
            params=self.params,
            num_generations=self.num_generations,
            seeds=self._seeds(draws),
            deadline=deadline,
            kept=[KeptGroup() if self._kept is None else self._kept.of(draw.request) for draw in draws],
        )


def tokens_in(groups: Sequence[Group]) -> int:
    """Tokens of all completions."""
    return sum(len(sample.completion_ids) for group in groups for sample in group.samples)


def item_of(prompt: Prompt, rollouts: Sequence[KeptRollout], *, columns: Sequence[str]) -> Item:
    """The unscored group of some rollouts, in their order, with the columns that each has, a value per sample."""
    ordered = sorted(rollouts, key=lambda rollout: rollout.number)
    samples = tuple(sample for rollout in ordered for sample in rollout.samples)
    extras = {name: [value for rollout in ordered for value in rollout.extras[name]] for name in columns}
    return Item(Group(prompt, samples), extras)


def all_failed(count: int, last: RewardError) -> RewardError:
    """The error where no reward of many groups could be computed."""
    return RewardError(f"the rewards of {count} groups in a row failed; the last: {last.message}", remedy=last.remedy)


def _too_few(group: Group) -> RewardError:
    return RewardError(
        f"all but {len(group.samples)} rollouts of prompt {group.prompt.id!r} failed",
        remedy="see failures.jsonl or the log for their causes; mend what they use, or give them more time",
    )


def _mean(values: Sequence[tuple[float, int]]) -> float:
    """Of values, each with the number of groups that it is of."""
    return sum(value * groups for value, groups in values) / sum(groups for _, groups in values)
