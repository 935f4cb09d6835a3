"""Recorded runs (`benchmarks/health.py`), and what the health rules say of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.common.types import EvalResult, Finding, Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.health.monitor import HealthMonitor
from lachesis.metrics.health.types import HealthLimits

RECORDINGS = Path(__file__).parent / "data" / "health"


@dataclass(frozen=True, slots=True)
class Said:
    """A finding of the health rules and the step at which it came."""

    step: int
    finding: Finding


def read(name: str) -> Mapping[str, Any]:
    """Return a recording."""
    return json.loads((RECORDINGS / f"{name}.json").read_text())


def play(recording: Mapping[str, Any], *, steps: int | None = None) -> Sequence[Said]:
    """Return what is said of a run's first ``steps``, in order."""
    marks = frozenset(recording["special_tokens"])
    monitor = HealthMonitor(limits=HealthLimits(template_marks=marks, **recording["limits"]))
    evaluations = {result["step"]: _evaluation(result) for result in recording["evaluations"]}
    if 0 in evaluations:
        monitor.evaluation(evaluations[0])
    return [
        Said(step["step"], finding)
        for step in recording["steps"][:steps]
        for finding in monitor.examine(
            StepRecord(
                step=step["step"],
                values=step["values"],
                groups=tuple(_groups(recording, step)),
                evaluation=evaluations.get(step["step"]),
            )
        )
    ]


def _groups(recording: Mapping[str, Any], step: Mapping[str, Any]) -> Iterator[Group]:
    for group in step["groups"]:
        text = recording["before"] + group["prompt"] + recording["after"]
        prompt = Prompt(group["prompt"], tuple(text.encode()), text, columns={"answer": group["answer"]})
        yield Group(prompt, tuple(_sample(prompt, *sample) for sample in group["samples"]))


def _sample(prompt: Prompt, reward: float | None, text: int, length: int, cut_off: int, nats: float = 1.0) -> Sample:
    return Sample(
        prompt_ids=prompt.token_ids,
        completion_ids=(text,) * length,
        logprobs=(-nats,) * length,
        finish_reason="length" if cut_off else "stop",
        versions=VersionSpan(0, 0),
        text=f"text {text}" if text else "",
        rewards=(reward,),
        reward=reward,
    )


def _evaluation(result: Mapping[str, Any]) -> EvalResult:
    known = EvalResult.__dataclass_fields__
    return EvalResult(**{name: value for name, value in result.items() if name in known})
