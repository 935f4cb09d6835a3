"""What overlap.py measures, what follows from it, and its table. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

ALIKE = 0.8  # "of similar length": the shorter is at least this share of the longer

T = TypeVar("T")


@dataclass(frozen=True)
class Alone:
    """Seconds a step of ``prompts``, generation and training each with nothing beside it."""

    prompts: int
    generation: float
    training: float

    @property
    def longer(self) -> float:
        return max(self.generation, self.training)

    @property
    def balance(self) -> float:
        """The shorter over the longer: 1 where they take as long."""
        return min(self.generation, self.training) / self.longer


@dataclass(frozen=True)
class Split:
    """Mean seconds a step of a run, and where the trainer spent them.

    ``waiting`` for a batch has ``generation`` and ``rewards`` in it where the run is synchronous, and stands beside
    them where it is not. ``optimizer`` has the pause of the engine in it. ``rest`` is metrics, rollouts, report.
    """

    step: float
    waiting: float
    generation: float
    rewards: float
    training: float
    optimizer: float
    transfer: float
    proof: float
    rest: float
    staleness: float

    @property
    def longer(self) -> float:
        """Of its generation and its training with the optimizer, whatever else slowed them."""
        return max(self.generation, self.training + self.optimizer)


@dataclass(frozen=True)
class Round:
    """What was measured one after the other. ``both`` is generation and training at once, nothing exchanged."""

    alone: Alone
    both: Alone
    synchronous: Split
    asynchronous: Split
    load: float

    @property
    def ratio(self) -> float:
        """The asynchronous step over the longer of generation and training."""
        return self.asynchronous.step / self.alone.longer


def split(steps: Sequence[Mapping[str, float]]) -> Split:
    """The mean of the steps' metrics."""

    def mean(name: str) -> float:
        return statistics.fmean(values.get(name, 0.0) for values in steps)

    sync, transfer, proof = mean("sync_time"), mean("transfer_time"), mean("proof_time")
    step, waiting, training = mean("step_time"), mean("data_fetch_time"), mean("train_time")
    return Split(
        step=step,
        waiting=waiting,
        generation=mean("generation_time"),
        rewards=mean("reward_time"),
        training=training,
        optimizer=sync - transfer - proof,
        transfer=transfer,
        proof=proof,
        rest=step - waiting - training - sync,
        staleness=mean("staleness"),
    )


def next_prompts(points: Sequence[Alone], *, most: int) -> int:
    """How many prompts to try next, so that generation and training take as long.

    What does not grow with the batch (a decoding step has a cost of its own) weighs on generation, so that more
    prompts favour it. From two measurements on: where a straight line through the last two differences is 0.
    """
    last = points[-1]
    gap = last.generation - last.training
    wanted = 2.0 * last.prompts if gap > 0 else last.prompts / 2
    if len(points) > 1 and points[-2].prompts != last.prompts:
        before = points[-2]
        slope = (gap - (before.generation - before.training)) / (last.prompts - before.prompts)
        if slope < 0:
            wanted = last.prompts - gap / slope
    return min(most, max(1, round(min(max(wanted, last.prompts / 4), last.prompts * 4))))


def median_of(rounds: Sequence[T]) -> T:
    """A record of the medians of each field."""
    return type(rounds[0])(
        **{field.name: statistics.median(getattr(one, field.name) for one in rounds) for field in fields(rounds[0])}  # type: ignore[arg-type]
    )


def table(rounds: Sequence[Round], *, what: str) -> str:
    """Markdown."""
    alone, both = median_of([one.alone for one in rounds]), median_of([one.both for one in rounds])
    sync, ahead = median_of([one.synchronous for one in rounds]), median_of([one.asynchronous for one in rounds])
    ratios = sorted(one.ratio for one in rounds)
    middle = statistics.median(ratios)
    rows: list[tuple[str, str, str]] = [
        ("alone: generation, training", f"{alone.generation:.3f}, {alone.training:.3f}", ""),
        ("both at once, nothing exchanged", f"{both.generation:.3f}, {both.training:.3f}", ""),
    ]
    rows.append(("a step", f"{sync.step:.3f}", f"**{ahead.step:.3f}**"))
    for name, title in (
        ("waiting", "- waiting for a batch"),
        ("training", "- forward and backward"),
        ("optimizer", "- optimizer (and pause)"),
        ("transfer", "- transfer"),
        ("proof", "- proof of sync"),
        ("rest", "- metrics, rollouts, report"),
        ("generation", "its generation"),
        ("rewards", "its rewards"),
    ):
        rows.append((title, f"{getattr(sync, name):.3f}", f"{getattr(ahead, name):.3f}"))
    rows.append(("versions behind, mean of the oldest sample", f"{sync.staleness:.2f}", f"{ahead.staleness:.2f}"))
    over = f"{middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    rows.append(("a step over the longer of generation and training", f"{sync.step / alone.longer:.3f}", over))
    own = f"{ahead.step / ahead.longer:.3f}"
    rows.append(("a step over the longer of its own two", f"{sync.step / sync.longer:.3f}", own))
    lines = [what, "", "| seconds | synchronous | asynchronous |", "|---|---|---|"]
    lines += [f"| {title} | {first} | {second} |" for title, first, second in rows]
    if alone.balance < ALIKE:
        lines += ["", f"Generation and training are not alike: the shorter is {alone.balance:.2f} of the longer."]
    loads = ", ".join(f"{one.load:.1f}" for one in rounds)
    limit = max(both.longer / alone.longer, 1.0)
    lines += ["", f"The machine itself allows {limit:.3f} (both at once over alone). Load average by round: {loads}."]
    return "\n".join(lines) + "\n"
