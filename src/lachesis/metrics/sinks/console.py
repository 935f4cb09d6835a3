"""Console output of a run: a line for each step, and completions to read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from lachesis.common.group_codec import json_safe
from lachesis.common.types import EvalResult, Sample, StepRecord
from lachesis.metrics.hub import Sink
from lachesis.metrics.names import benchmark_words, format_number, format_seconds, format_share

# Number of steps whose mean gives the expected remaining time.
_RECENT_STEPS = 20


class ConsoleSink(Sink):
    """Sink that prints step, reward, accuracy, speeds and the time left, and health findings.

    Args:
        console: the output; handlers of the logger ``lachesis`` should write to the same one.
        total_steps: the number of steps of the run.
        every_steps: how often to write a line; findings and evaluations always have one.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        *,
        every_steps: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total = total_steps
        self._every = every_steps
        self._clock = clock
        self._first = True
        self._evaluation: EvalResult | None = None
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last = clock()

    def write(self, record: StepRecord) -> None:
        now = self._clock()
        self._seconds.append(now - self._last)
        self._last = now
        self._evaluation = record.evaluation or self._evaluation
        if record.step % self._every == 0 or record.step == self._total or self._first:
            self._print(self._line(record))
        self._first = False
        for finding in record.findings:
            self._print(finding.line)

    def evaluation(self, result: EvalResult) -> None:
        self._evaluation = result
        self._last = self._clock()
        self._print(
            f"step {result.step}/{self._total}  held-out accuracy {format_share(result.accuracy)} "
            f"({result.problems} problems, {format_seconds(result.seconds)})"
        )
        for words in benchmark_words(result):
            self._print(f"step {result.step}/{self._total}  {words}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self, record: StepRecord) -> str:
        """Return one step in one line."""
        parts = [f"step {record.step}/{self._total}"]
        if "reward" in record.values:
            parts.append(f"reward {record.values['reward']:.3f}")
        if self._evaluation is not None:
            parts.append(f"accuracy {format_share(self._evaluation.accuracy)} (step {self._evaluation.step})")
        for name, metric in (("generation", "generation_tokens_per_s"), ("training", "train_tokens_per_s")):
            if metric in record.values:
                parts.append(f"{name} {format_number(record.values[metric])} tok/s")
        if record.step < self._total:
            left = (self._total - record.step) * sum(self._seconds) / len(self._seconds)
            parts.append(f"{format_seconds(left)} left")
        return "  ".join(parts)


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """Completion to show; ``rewards`` is by function, ``None`` if one abstained, ``logged`` by column."""

    prompt: str
    completion: str
    reward: float | None
    rewards: Mapping[str, float | None]
    logged: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionPicker:
    """Choice of the completions of a step that are shown.

    Attributes:
        count: number for each step; ``None`` shows all.
        reward_names: names of the reward functions, in the order of ``Sample.rewards``.
        decode: token ids to text, for samples that came without one.
        every_steps: shows those of every N-th step.
    """

    count: int | None
    reward_names: Sequence[str]
    decode: Callable[[Sequence[int]], str]
    every_steps: int = 1

    def pick(self, record: StepRecord) -> list[ShownCompletion]:
        """Return the completions to show of those generated for a step.

        The first of each group comes before the second of any, so that a few come from many prompts.
        """
        if record.step % self.every_steps:
            return []
        groups = [group.generated for group in record.groups]
        places = [(place, group) for group in groups for place in range(len(group.samples))]
        places.sort(key=lambda one: one[0])
        return [
            self._shown(group.prompt.text, group.samples[place], {name: v[place] for name, v in group.logged.items()})
            for place, group in places[: self.count]
        ]

    def table(self, record: StepRecord) -> tuple[list[str], list[list[Any]]] | None:
        """Return the choice as columns and rows, for sinks that show tables; ``None`` if a step has none."""
        shown = self.pick(record)
        if not shown:
            return None
        names = list(self.reward_names)
        logged = sorted({name for one in shown for name in one.logged}.difference(names))
        rows = [
            [
                *(record.step, one.prompt, one.completion, one.reward),
                *map(one.rewards.get, names),
                *(json_safe(one.logged.get(name)) for name in logged),
            ]
            for one in shown
        ]
        return ["step", "prompt", "completion", "reward", *names, *logged], rows

    def _shown(self, prompt: str, sample: Sample, logged: Mapping[str, Any]) -> ShownCompletion:
        named = len(sample.rewards) == len(self.reward_names)
        return ShownCompletion(
            prompt=prompt or self.decode(sample.prompt_ids),
            completion=sample.text or self.decode(sample.completion_ids),
            reward=sample.reward,
            rewards=dict(zip(self.reward_names, sample.rewards, strict=True)) if named else {},
            logged=logged,
        )


class CompletionsSink(Sink):
    """Sink that prints completions with their prompts and rewards."""

    def __init__(self, console: Console, picker: CompletionPicker) -> None:
        self._console = console
        self._picker = picker

    def write(self, record: StepRecord) -> None:
        for number, shown in enumerate(self._picker.pick(record), 1):
            lines = (
                f"step {record.step}, completion {number}: {rewards_in_words(shown)}",
                f"  prompt      {shown.prompt!r}",
                f"  completion  {shown.completion!r}",
                *(f"  {name:<10}  {value!r}" for name, value in shown.logged.items()),
            )
            self._console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def rewards_in_words(shown: ShownCompletion) -> str:
    """Return the total reward and, with several functions, the value of each."""
    total = "no reward" if shown.reward is None else f"reward {shown.reward:g}"
    parts = [f"{name} {'none' if value is None else f'{value:g}'}" for name, value in shown.rewards.items()]
    return f"{total} ({', '.join(parts)})" if len(parts) > 1 else total
