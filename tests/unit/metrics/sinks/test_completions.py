"""Completions that people are shown."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lachesis.common.types import Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.completions import CompletionPicker, CompletionsSink


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
    asked = group("a [bold]", sample("on\ntwo lines, and longer than the console is wide", 1.0, None))
    for step in (1, 2):
        sink.write(StepRecord(step, {}, [asked]))
    assert file.getvalue().splitlines() == [
        "step 2, completion 1: reward 1 (right 1, short none)",
        "  prompt      'ask a [bold]'",
        "  completion  'on\\ntwo lines, and longer than the console is wide'",
    ]
