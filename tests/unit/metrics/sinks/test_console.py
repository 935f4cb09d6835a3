from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from lachesis.common.types import EvalResult, Finding, Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.console import CompletionPicker, CompletionsSink, ConsoleSink

FINDING = Finding("warning", "kl_high", "mean_kl is [bold]0.3[/bold]: lower optimizer.learning_rate")


def record(step: int, **options: object) -> StepRecord:
    values = {"reward": 0.25 + step / 100, "generation_tokens_per_s": 28_123.0, "train_tokens_per_s": 3100.0}
    return StepRecord(step=step, values=values, **options)  # type: ignore[arg-type]


def evaluation(step: int, accuracy: float) -> EvalResult:
    return EvalResult(step, accuracy, accuracy, problems=512, mean_length=3.0, seconds=0.4)


class Screen:
    """A console that writes to memory, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, width=100, color_system=None)
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sink(self, total_steps: int, **options: object) -> ConsoleSink:
        return ConsoleSink(self.console, total_steps, clock=self.clock, **options)  # type: ignore[arg-type]

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


@pytest.fixture
def logfile() -> Screen:
    return Screen()


def test_plain_line_has_all_facts(logfile: Screen) -> None:
    sink = logfile.sink(10)
    sink.evaluation(evaluation(0, 0.44))
    logfile.now += 2.0
    sink.write(record(1))
    assert logfile.lines == [
        "step 0/10  held-out accuracy 44 % (512 problems, 0.4 s)",
        "step 1/10  reward 0.260  accuracy 44 % (step 0)  generation 28.1k tok/s  training 3100 tok/s  18 s left",
    ]


def test_plain_lines_come_every_n_steps_and_findings_always(logfile: Screen) -> None:
    sink = logfile.sink(7, every_steps=5)
    for step in range(1, 8):
        sink.write(record(step, findings=[FINDING] if step == 3 else ()))
    assert [line.split()[1] for line in logfile.lines if line.startswith("step")] == ["1/7", "5/7", "7/7"]
    assert f"warning: {FINDING.message}" in logfile.lines
    assert "\x1b" not in logfile.file.getvalue()


def test_a_step_without_values_has_a_line(logfile: Screen) -> None:
    logfile.sink(3).write(StepRecord(step=1, values={}))
    assert logfile.lines == ["step 1/3  0.0 s left"]


def test_a_step_costs_less_than_a_millisecond(logfile: Screen) -> None:
    sink = logfile.sink(10_000)
    sink.write(record(1))
    start = time.process_time()
    for step in range(2, 502):
        sink.write(record(step))
    assert (time.process_time() - start) / 500 < 1e-3


def sample(text: str, *rewards: float | None) -> Sample:
    total = sum(reward or 0.0 for reward in rewards) if rewards else None
    return Sample((1,), (2,), (0.0,), "stop", VersionSpan(0, 0), text=text, rewards=rewards, reward=total)


def group(name: str, *samples: Sample) -> Group:
    return Group(Prompt(name, (1,), f"ask {name}"), samples)


GROUPS = [group("a", sample("a1", 1.0), sample("a2", 0.0)), group("b", sample("b1", 0.5), sample("b2", 0.0))]


def picker(count: int | None, *names: str, every: int = 1) -> CompletionPicker:
    return CompletionPicker(
        count=count, reward_names=names, decode=lambda ids: f"tokens {list(ids)}", every_steps=every
    )


@pytest.mark.parametrize(
    ("count", "expected"), [(1, ["a1"]), (3, ["a1", "b1", "a2"]), (None, ["a1", "b1", "a2", "b2"]), (9, None)]
)
def test_a_few_are_of_many_prompts(count: int | None, expected: list[str] | None):
    shown = picker(count, "r").pick(StepRecord(1, {}, GROUPS))
    assert [one.completion for one in shown] == (expected or ["a1", "b1", "a2", "b2"])
    assert all(one.prompt == f"ask {one.completion[0]}" for one in shown)


def test_what_was_generated_is_shown_and_not_what_was_replayed():
    replayed = replace(GROUPS[1], replaces=GROUPS[0])
    assert [one.completion for one in picker(None, "r").pick(StepRecord(1, {}, [replayed]))] == ["a1", "a2"]


def test_samples_without_texts_are_decoded():
    silent = Group(Prompt("1", (1,), ""), (sample(""),))
    (shown,) = picker(1).pick(StepRecord(1, {}, [silent]))
    assert (shown.prompt, shown.completion, shown.reward) == ("tokens [1]", "tokens [2]", None)


def test_each_is_printed_with_its_rewards_at_every_nth_step():
    file = io.StringIO()
    sink = CompletionsSink(Console(file=file, width=40), picker(1, "right", "short", every=2))
    asked = replace(
        group("a [bold]", sample("on\ntwo lines, and longer than the console is wide", 1.0, None)),
        logged={"extracted": ["two"]},
    )
    for step in (1, 2):
        sink.write(StepRecord(step, {}, [asked]))
    assert file.getvalue().splitlines() == [
        "step 2, completion 1: reward 1 (right 1, short none)",
        "  prompt      'ask a [bold]'",
        "  completion  'on\\ntwo lines, and longer than the console is wide'",
        "  extracted   'two'",
    ]
