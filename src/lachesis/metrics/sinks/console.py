"""Console output of a run: a live display in a terminal, plain lines elsewhere, completions to read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lachesis.common.group_codec import json_safe
from lachesis.common.types import EvalResult, Finding, Sample, StepRecord
from lachesis.metrics.hub import Sink
from lachesis.metrics.names import benchmark_words, format_number, format_seconds, format_share

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
LEVEL_STYLE = {"note": "cyan", "warning": "yellow", "problem": "bold red"}
SHOWN_FINDINGS = 3
REFRESH_HZ = 4.0


@dataclass(slots=True)
class _Course:
    """State of the run as far as the display knows it."""

    step: int = 0
    seen: int = 0
    reward: float | None = None
    generation_speed: float | None = None
    training_speed: float | None = None
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=400))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    first_evaluation: EvalResult | None = None
    evaluation: EvalResult | None = None
    findings: deque[tuple[int, Finding]] = field(default_factory=lambda: deque(maxlen=SHOWN_FINDINGS))

    def evaluated(self, result: EvalResult) -> None:
        self.first_evaluation = self.first_evaluation or result
        self.evaluation = result

    def advance(self, record: StepRecord, *, seconds: float) -> None:
        self.step = record.step
        self.seen += 1
        self.seconds.append(seconds)
        self.reward = record.values.get("reward", self.reward)
        self.generation_speed = record.values.get("generation_tokens_per_s", self.generation_speed)
        self.training_speed = record.values.get("train_tokens_per_s", self.training_speed)
        if "reward" in record.values:
            self.rewards.append(record.values["reward"])
        if record.evaluation is not None:
            self.evaluated(record.evaluation)
        self.findings.extend((record.step, finding) for finding in record.findings)

    def seconds_left(self, total_steps: int) -> float | None:
        """Return the seconds left by the mean of the last 20 steps; None before the first."""
        if not self.seconds:
            return None
        return max(0, total_steps - self.step) * sum(self.seconds) / len(self.seconds)


class ConsoleSink(Sink):
    """Sink that shows step, reward, accuracy, speeds, a reward sparkline, the time left and health findings.

    In a terminal a display that is redrawn four times a second, by a thread of rich's, whatever the number of
    steps; without a terminal a line every ``every_steps`` steps, and a line for each finding.

    Args:
        console: where to; handlers of the logger ``lachesis`` should write to the same one, so that their
            lines appear above the display.
        total_steps: the number of steps of the run.
        every_steps: how often to write a line where there is no terminal.
        title: shown at the top, usually the name of the run.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        *,
        every_steps: int = 1,
        title: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total = total_steps
        self._every = every_steps
        self._title = title
        self._clock = clock
        self._course = _Course()
        self._lock = threading.Lock()
        self._last = clock()
        self._live: Live | None = None

    def write(self, record: StepRecord) -> None:
        now = self._clock()
        with self._lock:
            self._course.advance(record, seconds=now - self._last)
        self._last = now
        if self._console.is_terminal:
            self._show()
            return
        if record.step % self._every == 0 or record.step == self._total or self._course.seen == 1:
            self._line(plain_line(self._course, self._total))
        for finding in record.findings:
            self._line(finding.line)

    def evaluation(self, result: EvalResult) -> None:
        with self._lock:
            self._course.evaluated(result)
        self._last = self._clock()
        if self._console.is_terminal:
            self._show()
        else:
            self._line(
                f"step {result.step}/{self._total}  held-out accuracy {format_share(result.accuracy)} "
                f"({result.problems} problems, {format_seconds(result.seconds)})"
            )
        for words in benchmark_words(result):
            self._line(f"step {result.step}/{self._total}  {words}")

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=REFRESH_HZ)
            self._live.start()

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            course = deepcopy(self._course)  # rich draws in a thread of its own
        return render(
            course,
            total_steps=self._total,
            title=self._title,
            width=self._console.width,
            ascii_only=self._console.options.ascii_only,
        )


def sparkline(values: Sequence[float], *, width: int, bars: str = BARS) -> str:
    """Draw ``values`` in at most ``width`` characters; each shows the mean of its stretch."""
    finite = [value for value in values if value == value]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span <= 0:
        return bars[0] * count
    return "".join(bars[min(len(bars) - 1, int((mean - low) / span * len(bars)))] for mean in means)


def plain_line(course: _Course, total_steps: int) -> str:
    """Return one step in one line, for logs."""
    parts = [f"step {course.step}/{total_steps}"]
    if course.reward is not None:
        parts.append(f"reward {course.reward:.3f}")
    if course.evaluation is not None:
        parts.append(f"accuracy {format_share(course.evaluation.accuracy)} (step {course.evaluation.step})")
    parts.extend(f"{name} {speed} tok/s" for name, speed in _speeds(course))
    left = course.seconds_left(total_steps)
    if left is not None and course.step < total_steps:
        parts.append(f"{format_seconds(left)} left")
    return "  ".join(parts)


def render(course: _Course, *, total_steps: int, title: str, width: int, ascii_only: bool = False) -> RenderableType:
    """Return the live display: a line of progress, the facts, the last findings."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", min_width=10)
    facts.add_column(justify="right", min_width=7)
    facts.add_column(overflow="ellipsis", no_wrap=True)
    if course.reward is not None:
        line = sparkline(course.rewards, width=max(8, min(60, width - 30)), bars=ASCII_BARS if ascii_only else BARS)
        facts.add_row("reward", Text(f"{course.reward:.3f}", style="bold"), Text(line, style="green"))
    if course.evaluation is not None and course.first_evaluation is not None:
        facts.add_row("accuracy", Text(format_share(course.evaluation.accuracy), style="bold"), _since(course))
    for name, speed in _speeds(course):
        facts.add_row(name, speed, Text("tokens/s", style="dim"))
    findings = [
        Text.assemble(
            _heading(finding),
            (f"step {step}  ", "dim"),
            finding.message,
            no_wrap=False,  # also on a console that leaves wrapping to the terminal: the display counts its lines
            overflow="fold",
        )
        for step, finding in course.findings
    ]
    return Group(_progress(course, total_steps=total_steps, title=title, width=width), facts, *findings)


def _heading(finding: Finding) -> tuple[str, str]:
    return ("resolved ", "dim") if finding.resolved is not None else (f"{finding.level} ", LEVEL_STYLE[finding.level])


def _progress(course: _Course, *, total_steps: int, title: str, width: int) -> RenderableType:
    left = course.seconds_left(total_steps)
    done = course.step >= total_steps
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(title, style="bold"),
        Text(f"step {course.step}/{total_steps}"),
        ProgressBar(total=total_steps, completed=course.step, width=max(10, min(40, width - 50))),
        Text("" if left is None or done else f"{format_seconds(left)} left", style="dim"),
    )
    return head


def _since(course: _Course) -> Text:
    """Return the initial accuracy, as dim text."""
    assert course.evaluation is not None and course.first_evaluation is not None
    words = f"held-out, step {course.evaluation.step}"
    if course.first_evaluation.step != course.evaluation.step:
        words += f" (began at {format_share(course.first_evaluation.accuracy)})"
    return Text(words, style="dim")


def _speeds(course: _Course) -> list[tuple[str, str]]:
    speeds = (("generation", course.generation_speed), ("training", course.training_speed))
    return [(name, format_number(speed)) for name, speed in speeds if speed is not None]


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """Completion to be read; ``rewards`` is by function, ``None`` where one abstained, ``logged`` by column."""

    prompt: str
    completion: str
    reward: float | None
    rewards: Mapping[str, float | None]
    logged: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionPicker:
    """Choice of the completions of a step that are shown.

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
        """Return the chosen completions of those that were generated for a step.

        The first of each group comes before the second of any, so that a few are of many prompts.
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
    """Sink that prints completions with their prompts and rewards, above the live display if there is one."""

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
