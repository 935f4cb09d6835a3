"""Groups made here: prompts from a dataset, completions from an engine, rewards from Python functions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import RewardError
from lachesis.common.types import Group, Prompt, SamplingParams
from lachesis.engines.base import Engine
from lachesis.rollouts.base import RolloutSource
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.generation import TextDecoder, generate_groups, nested_deadline, request_seed
from lachesis.rollouts.rewards.attempts import Item
from lachesis.rollouts.rewards.rewarder import Rewarder, Scored

# A batch without a single usable group may be bad luck; this many in a row are a broken reward function.
_MOST_EMPTY_BATCHES = 10


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Scored groups in the order of their prompts, and what they took; ``tokens`` are those of dropped groups too."""

    scored: Scored
    tokens: int
    generation_s: float
    reward_s: float


@dataclass(kw_only=True, eq=False)
class LocalSource(RolloutSource):
    """Samples ``num_generations`` completions a prompt and scores them.

    The completions of a prompt depend on the weights, the run's seed and the number of requests before it, so
    a resumed run samples what the uninterrupted one would have. A call that raises leaves the source as it
    was before: its prompts and request numbers come again.

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
        self._logged: dict[str, list[float]] = {}
        self._check_columns()

    def _check_columns(self) -> None:
        self.rewarder.check_columns(self.stream.columns)

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Scored groups of the next ``count`` prompts, less those whose reward failed under ``drop_group``.

        Where all of them failed, the prompts after them are taken, a limited number of times.
        """
        first_request, taken, errors = self._requests, [], []
        try:
            for _ in range(_MOST_EMPTY_BATCHES):
                prompts = self.stream.take(count)
                taken += prompts
                groups, errors = self._attempt(prompts, deadline)
                if groups:
                    return groups
                deadline.check("every group so far was dropped because its reward failed")
            raise RewardError(
                f"the rewards of {len(taken)} groups in a row failed; the last: {errors[-1].message}",
                remedy=errors[-1].remedy,
            )
        except BaseException:
            self.stream.put_back(taken)
            self._requests = first_request
            raise

    def _attempt(self, prompts: list[Prompt], deadline: Deadline) -> tuple[list[Group], list[RewardError]]:
        seeds = [request_seed(self.seed, self._requests + i) for i in range(len(prompts))]
        self._requests += len(prompts)
        name = f"generation of {len(prompts)} prompts x {self.num_generations} completions"
        generation = nested_deadline(name, deadline, self.generation_s, "deadlines.generation_s")
        rollouts = self._roll_out(prompts, seeds, generation=generation, deadline=deadline)
        scored = rollouts.scored
        self._count("generation_time", rollouts.generation_s)
        self._count("reward_time", rollouts.reward_s)
        self._count("tokens_generated", rollouts.tokens)
        self._count("dropped_groups", scored.dropped)
        self._count("reward_errors", len(scored.errors))
        for metric, value in scored.metrics.items():
            self._logged.setdefault(metric, []).append(value)
        return scored.groups, scored.errors

    def _roll_out(
        self, prompts: list[Prompt], seeds: list[int], *, generation: Deadline, deadline: Deadline
    ) -> Rollouts:
        """Generate, then score. ``generation`` is for the first of these, within ``deadline``."""
        started = time.monotonic()
        items = self._sample(prompts, seeds, generation)
        generated = time.monotonic()
        groups = [item.group for item in items]
        scored = self.rewarder.score(groups, extras=[item.extras for item in items])
        return Rollouts(
            scored=scored,
            tokens=tokens_in(groups),
            generation_s=generated - started,
            reward_s=time.monotonic() - generated,
        )

    def _sample(self, prompts: list[Prompt], seeds: list[int], deadline: Deadline) -> list[Item]:
        """Unscored groups, one per prompt, each with a seed of its own."""
        groups = generate_groups(
            prompts,
            engine=self.engine,
            params=self.params,
            num_generations=self.num_generations,
            seeds=seeds,
            decode=self.decode,
            deadline=deadline,
        )
        return [Item(group) for group in groups]

    def _count(self, name: str, amount: float) -> None:
        self._counts[name] += amount  # type: ignore[assignment]

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        """Make these prompts the next ones. Raises DataError for a prompt that is not of this dataset."""
        self.stream.put_back(prompts)
        return True

    def report_version(self, version: int) -> None:
        """Reward functions may ask for the step. Nothing is throttled: the engine samples when it is asked to."""
        self._step = version
        self.rewarder.report_step(version)

    def counters(self) -> dict[str, float]:
        """Since the last call: ``generation_time`` and ``reward_time`` in seconds, ``tokens_generated`` (also
        those of dropped groups), ``dropped_groups``, ``reward_errors``; and ``reward_metrics/NAME``, the mean of what
        reward functions logged."""
        counts, self._counts = self._counts, Counter()
        logged, self._logged = self._logged, {}
        names = ("generation_time", "reward_time", "tokens_generated", "dropped_groups", "reward_errors")
        means = {f"reward_metrics/{name}": sum(values) / len(values) for name, values in logged.items()}
        return {name: float(counts[name]) for name in names} | means

    def state_dict(self) -> dict[str, Any]:
        """The place in the dataset, prompts put back, the number of requests so far, and the step."""
        return {"stream": self.stream.state_dict(), "requests": self._requests, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError where the dataset is another one."""
        self.stream.load_state_dict(state["stream"])
        self._requests = int(state["requests"])
        self.report_version(int(state["step"]))


def tokens_in(groups: Sequence[Group]) -> int:
    """Tokens of all completions."""
    return sum(len(sample.completion_ids) for group in groups for sample in group.samples)
