"""Groups made here: prompts from a dataset, completions from an engine, rewards from Python functions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lachesis.common.deadline import Deadline
from lachesis.common.types import Prompt, SamplingParams
from lachesis.engines.base import Engine
from lachesis.rollouts.base import Done, Draw
from lachesis.rollouts.generation import TextDecoder, generate_groups
from lachesis.rollouts.judge import Judge
from lachesis.rollouts.prompt_source import PromptSource, fewest_rollouts, tell_all
from lachesis.rollouts.rewards.attempts import Item
from lachesis.rollouts.rewards.rewarder import Rewarder


@dataclass(kw_only=True, eq=False)
class LocalSource(PromptSource):
    """A source that samples completions of one turn and scores them.

    Args:
        engine: the engine that samples.
        rewarder: the reward functions.
        decode: converts token ids of many completions to texts.
        params: the sampling parameters.

    Raises:
        RewardError: a reward function needs a column that the dataset does not have.
    """

    engine: Engine
    rewarder: Rewarder
    decode: TextDecoder
    params: SamplingParams

    _counted: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._judge = Judge(self.rewarder, fewest=fewest_rollouts(self.num_generations), counts=self._counts)
        self.rewarder.check_columns(self.stream.columns)

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        """Generate all groups in one call, then score them in one call."""
        with self._generating.span():
            groups = generate_groups(
                self._prompts(draws),
                engine=self.engine,
                params=self.params,
                num_generations=self.num_generations,
                seeds=[self._request_seed(draw) for draw in draws],
                decode=self.decode,
                deadline=self._generation(draws, deadline),
            )
        generated = time.monotonic()
        items = [Item(group) for group in groups]
        outcomes = self._judge.score(items)
        self._note_pass_rates(items, outcomes)
        self._counts.add(reward_time=time.monotonic() - generated)
        tell_all(done, dict(enumerate(outcomes)))

    def _prompts(self, draws: Sequence[Draw]) -> list[Prompt]:
        return [self.stream.own(draw.prompt) for draw in draws]

    def report_version(self, version: int) -> None:
        """Tell reward functions, which may ask for the step."""
        super().report_version(version)
        self.rewarder.report_step(version)

    def counters(self) -> dict[str, float]:
        """Return the counts since the last call.

        These are ``generation_time`` (calls that overlap count once) and ``reward_time`` in seconds,
        ``tokens_generated`` (also those of dropped groups), ``dropped_groups``, ``reward_errors``; if samples could not
        be judged, ``rollout_failures`` and ``rollout_failures/CAUSE``; and ``reward_metrics/NAME``, the mean over
        groups of the values that reward functions logged.
        """
        names = ("reward_time", "tokens_generated", "dropped_groups", "reward_errors", *self._counted)
        seconds = {"generation_time": self._generating.take()}
        return seconds | self._counts.take(*names) | self._judge.take_means()
