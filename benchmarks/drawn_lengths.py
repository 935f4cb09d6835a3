"""Optimizer steps over lengths drawn anew each time: whether one of them stalls, and whether memory creeps.

The mode ``--drawn`` of train_step.py. Lengths are log-normal, one of a hundred completions ten times as long as the
median one, and the number of groups differs too, so hardly two micro-batches of a run have the same size. What is
compiled or tuned for a size shows as a step that takes longer than its tokens explain.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters

P99_OVER_P50 = 10.0
SIGMA = math.log(P99_OVER_P50) / 2.326
# Steps in which compiling is no stall.
WARM_UP = 3


@dataclass(frozen=True)
class Drawing:
    """What lengths are drawn from: groups from ``fewest`` to ``most``, tokens with this median, cut at ``longest``."""

    fewest: int
    most: int
    completions: int
    median: int
    longest: int

    def lengths(self, *, seed: int) -> list[list[int]]:
        """Of the completions of each group."""
        draws = random.Random(seed)
        return [
            [self._length(draws) for _ in range(self.completions)] for _ in range(draws.randint(self.fewest, self.most))
        ]

    def _length(self, draws: random.Random) -> int:
        return min(max(1, round(self.median * draws.lognormvariate(0.0, SIGMA))), self.longest)


LARGE = Drawing(fewest=12, most=20, completions=8, median=200, longest=4096)
SMALL = Drawing(fewest=2, most=4, completions=4, median=12, longest=64)


@dataclass(frozen=True)
class Work:
    """What a step has done: tokens that went forward, in so many micro-batches."""

    forward_tokens: int
    micro_batches: int


@dataclass(frozen=True)
class DrawnStep:
    """One step. Compilations are all until its end; memory is in GB, 0 without a GPU."""

    number: int
    groups: int
    seconds: float
    forward_tokens: int
    micro_batches: int
    compilations: int
    allocated_gb: float
    reserved_gb: float
    peak_gb: float

    @property
    def per_thousand(self) -> float:
        """Seconds for 1,000 tokens."""
        return 1000 * self.seconds / self.forward_tokens


@dataclass(frozen=True)
class Summary:
    """Of the steps after the third: the slowest over the median, by seconds and by seconds a token, and what grew."""

    slowest: float
    slowest_per_token: float
    compilations: int
    allocated_gb: tuple[float, float]
    reserved_gb: tuple[float, float]

    def lines(self) -> Iterator[str]:
        """For a reader."""
        yield f"after step {WARM_UP}: {self.compilations} compilations"
        yield f"slowest step over the median: {self.slowest:.3f}; by seconds a token: {self.slowest_per_token:.3f}"
        for name, (first, last) in (("allocated", self.allocated_gb), ("reserved", self.reserved_gb)):
            yield f"{name} at the end of step {WARM_UP + 1} and of the last: {first:.2f} and {last:.2f} GB"


def measure_drawn(
    count: int,
    *,
    drawing: Drawing,
    build: Callable[[int, list[list[int]]], Callable[[], Work]],
    device: torch.device,
) -> Iterator[DrawnStep]:
    """Take so many steps. ``build`` makes one, which is not timed, of its number and its lengths."""
    gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    for number in range(1, count + 1):
        lengths = drawing.lengths(seed=number)
        step = build(number, lengths)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        work = step()
        synchronize()
        seconds = time.perf_counter() - started
        yield DrawnStep(
            number=number,
            groups=len(lengths),
            seconds=seconds,
            forward_tokens=work.forward_tokens,
            micro_batches=work.micro_batches,
            compilations=counters["stats"]["unique_graphs"],
            allocated_gb=torch.cuda.memory_allocated() / 1e9 if gpu else 0.0,
            reserved_gb=torch.cuda.memory_reserved() / 1e9 if gpu else 0.0,
            peak_gb=torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0,
        )


def summarize(steps: Sequence[DrawnStep]) -> Summary:
    """Of more steps than those that warm up."""
    first, last, later = steps[WARM_UP], steps[-1], steps[WARM_UP:]
    return Summary(
        slowest=_slowest(step.seconds for step in later),
        slowest_per_token=_slowest(step.per_thousand for step in later),
        compilations=last.compilations - steps[WARM_UP - 1].compilations,
        allocated_gb=(first.allocated_gb, last.allocated_gb),
        reserved_gb=(first.reserved_gb, last.reserved_gb),
    )


def _slowest(values: Iterator[float]) -> float:
    every = [*values]
    return max(every) / statistics.median(every)


HEADING = "step groups   seconds  tokens passes  s/1,000 tokens  compilations  allocated  reserved    peak GB"


def line(step: DrawnStep) -> str:
    """A step, below the heading."""
    return (
        f"{step.number:4d} {step.groups:6d} {step.seconds:9.3f} {step.forward_tokens:7d} {step.micro_batches:6d} "
        f"{step.per_thousand:15.4f} {step.compilations:13d} {step.allocated_gb:10.2f} {step.reserved_gb:9.2f} "
        f"{step.peak_gb:10.2f}"
    )
