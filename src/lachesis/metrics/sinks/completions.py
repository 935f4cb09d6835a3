"""Completions of a step for people to read: in the console, and as rows for a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from lachesis.common.types import Sample, StepRecord
from lachesis.metrics.sinks.base import Sink


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A completion as it is read; ``rewards`` is by function, ``None`` where one abstained."""

    prompt: str
    completion: str
    reward: float | None
    rewards: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class CompletionPicker:
    """Which completions of a step are shown.

    Attributes:
        count: how many a step; ``None`` shows all.
        reward_names: names of the reward functions, in the order of ``Sample.rewards``.
        decode: token ids to text, for samples that came without one.
        every_steps: shows those of every N-th step.
    """

    count: int | None
    reward_names: Sequence[str]
    decode: Callable[[Sequence[int]], str]
    every_steps: int = 1

    def pick(self, record: StepRecord) -> list[ShownCompletion]:
        """Those that were generated for a step.

        The first of each group comes before the second of any, so that a few are of many prompts.
        """
        if record.step % self.every_steps:
            return []
        groups = [group.generated for group in record.groups]
        places = [(place, group) for group in groups for place in range(len(group.samples))]
        places.sort(key=lambda one: one[0])
        return [self._shown(group.prompt.text, group.samples[place]) for place, group in places[: self.count]]

    def _shown(self, prompt: str, sample: Sample) -> ShownCompletion:
        named = len(sample.rewards) == len(self.reward_names)
        return ShownCompletion(
            prompt=prompt or self.decode(sample.prompt_ids),
            completion=sample.text or self.decode(sample.completion_ids),
            reward=sample.reward,
            rewards=dict(zip(self.reward_names, sample.rewards, strict=True)) if named else {},
        )


class CompletionsSink(Sink):
    """Prints completions with their prompts and rewards, above the live display where there is one."""

    def __init__(self, console: Console, picker: CompletionPicker) -> None:
        self._console = console
        self._picker = picker

    def write(self, record: StepRecord) -> None:
        for number, shown in enumerate(self._picker.pick(record), 1):
            lines = (
                f"step {record.step}, completion {number}: {rewards_in_words(shown)}",
                f"  prompt      {shown.prompt!r}",
                f"  completion  {shown.completion!r}",
            )
            self._console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def rewards_in_words(shown: ShownCompletion) -> str:
    """The total reward, and where there are several functions, what each gave."""
    total = "no reward" if shown.reward is None else f"reward {shown.reward:g}"
    parts = [f"{name} {'none' if value is None else f'{value:g}'}" for name, value in shown.rewards.items()]
    return f"{total} ({', '.join(parts)})" if len(parts) > 1 else total
