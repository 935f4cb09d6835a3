"""Ragged lengths: how long the trainer waits where groups are trained on as they finish, and where whole batches are.

    PYTHONPATH=src python benchmarks/asynchrony.py [--tiny] [--steps 60] [--train 3.0] [--median-ms 40]

Real feeds, threads and scoring over an engine that sleeps: every group takes a log-normal time of its own, one of a
hundred ten times as long as the median one, and any number of groups is generated at once. The trainer sleeps too. A
row is a way to feed it; `whole batches` asks for a batch, all of it scored at its end, while others are trained on, as
earlier versions did.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from lachesis.common.deadline import Deadline
from lachesis.common.types import (
    CanaryReading,
    Completion,
    EngineHealth,
    GenerationRequest,
    Group,
    Prompt,
    SamplingParams,
    VersionSpan,
)
from lachesis.engines.base import Engine, Finished, PauseMode
from lachesis.pipeline.collect import Collector
from lachesis.pipeline.feed import Feed, Finisher, SynchronousFeed
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.streaming import StreamingSource

P99_OVER_P50 = 10.0
SIGMA = math.log(P99_OVER_P50) / 2.326
LIMIT_S = 600.0


class SleepingEngine(Engine):
    """Finishes each request after a time that depends on its seed alone. Calls overlap."""

    def __init__(self, *, median_s: float) -> None:
        self._median_s = median_s
        self.version = 0

    def seconds(self, request: GenerationRequest) -> float:
        """How long a request takes."""
        return self._median_s * random.Random(request.seed).lognormvariate(0.0, SIGMA)

    def generate(
        self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Finished | None = None
    ) -> list[list[Completion]]:
        began, first = time.monotonic(), self.version
        answers: dict[int, list[Completion]] = {}
        for seconds, index in sorted((self.seconds(request), index) for index, request in enumerate(requests)):
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            one = Completion((1, 2), (-0.5, -0.5), "stop", VersionSpan(first, self.version))
            answers[index] = [one] * requests[index].n
            if finished is not None:
                finished(index, answers[index])
        return [answers[index] for index in range(len(requests))]

    def canary(self, token_ids: Sequence[int]) -> CanaryReading:
        return CanaryReading((-1.0,) * (len(token_ids) - 1), self.version, "sleeping")

    def set_version(self, version: int) -> None:
        self.version = version

    def health(self) -> EngineHealth:
        return EngineHealth(True, self.version, "sleeping")

    def pause(self, *, mode: PauseMode = "keep") -> None:
        return None

    def resume(self) -> None:
        return None

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Case:
    """A way to feed the trainer: ``ahead`` batches, by the group or whole."""

    name: str
    ahead: int
    whole: bool = False


CASES = (
    Case("synchronous", 0),
    *(Case(f"whole batches, {n} ahead", n, whole=True) for n in (1, 4)),
    *(Case(f"groups, {n} ahead", n) for n in (1, 2, 4)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a case: steps a second, the trainer's wait as a share of all time, ages in versions, idle slots."""

    steps_per_s: float
    waited: float
    oldest: int
    mean_age: float
    idle_slots: float


def build_feed(case: Case, *, engine: Engine, size: int) -> Feed[list[Group]]:
    """The feed of a case, of ``size`` groups a batch."""
    prompts = [Prompt(id=str(n), token_ids=(1, n), text=str(n)) for n in range(1000)]
    options = {
        "stream": PromptStream(prompts, seed=0),
        "engine": engine,
        "rewarder": Rewarder([NamedReward("one", lambda completions: [1.0] * len(completions))]),
        "decode": lambda ids: [""] * len(ids),
        "params": SamplingParams(max_tokens=2),
        "num_generations": 2,
        "seed": 0,
    }
    one_by_one = case.ahead > 0 and not case.whole
    source = StreamingSource(min_groups=1, **options) if one_by_one else LocalSource(**options)
    collector = Collector(source, count=size)
    finisher = Finisher[list[Group]](advantages=list, pack=list)
    if not case.ahead:
        return SynchronousFeed(collector=collector, finisher=finisher, batch_deadline_s=LIMIT_S)
    return AsynchronousFeed(
        source=source,
        collector=collector,
        finisher=finisher,
        ahead=case.ahead,
        batch_deadline_s=LIMIT_S,
        at_once=1 if case.whole else None,
        whole_batches=case.whole,
    )


def measure(case: Case, *, steps: int, size: int, median_s: float, train_s: float) -> Measured:
    """Train so many steps."""
    engine = SleepingEngine(median_s=median_s)
    feed = build_feed(case, engine=engine, size=size)
    waited, idle, ages = 0.0, 0.0, list[int]()
    began = time.monotonic()
    for step in range(1, steps + 1):
        asked = time.monotonic()
        groups = feed.next()
        waited += time.monotonic() - asked
        ages += [step - 1 - group.samples[0].versions.first for group in groups]
        time.sleep(train_s)
        engine.set_version(step)
        feed.advance(step)
        idle += feed.counters().get("idle_slots", 0.0)
    seconds = time.monotonic() - began
    threading.Thread(target=feed.close, daemon=True).start()  # what is under way may take longer than a step
    return Measured(steps / seconds, waited / seconds, max(ages), sum(ages) / len(ages), idle / steps)


def table(found: Sequence[tuple[Case, Measured]]) -> Iterator[str]:
    """Markdown."""
    yield "| the trainer gets | steps a second | it waits | versions behind: most, mean | idle slots |"
    yield "|---|---|---|---|---|"
    for case, one in found:
        ages = f"{one.oldest}, {one.mean_age:.2f}"
        idle = "" if case.ahead == 0 else f"{one.idle_slots:.1f}"
        yield f"| {case.name} | {one.steps_per_s:.2f} | {one.waited:.0%} | {ages} | {idle} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long the trainer waits where lengths are ragged.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=16, help="of a batch")
    parser.add_argument("--median-ms", type=float, default=40.0, help="a group takes at the median")
    parser.add_argument("--train", type=float, default=3.0, help="a step's training, in medians of a group")
    parser.add_argument("--tiny", action="store_true", help="three steps of milliseconds: that it runs")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.groups, options.median_ms = 3, 2, 1.0
    median_s = options.median_ms / 1000
    sizes = {"steps": options.steps, "size": options.groups, "median_s": median_s}
    found = [(case, measure(case, train_s=options.train * median_s, **sizes)) for case in CASES]
    load = f"load average {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    lines = [
        f"{options.steps} steps of {options.groups} groups; a group takes {options.median_ms:g} ms at the median, one "
        f"of a hundred ten times as long; training takes {options.train:g} medians. {len(os.sched_getaffinity(0))} "
        f"cores, {load}, {datetime.now(UTC):%d %B %Y}.",
        "",
        *table(found),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
