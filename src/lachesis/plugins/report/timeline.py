"""Timeline of a run's steps for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each part of a step has its seconds recorded, and each step its end. The loop runs its parts one after the other, so
that determines where each of them lies. Of generation and rewards beside the loop only the seconds are known: they are
drawn to end when the loop has their batch, and to begin no earlier than those before them ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lachesis.metrics.names import GENERATION_OF, RECEIVING_OF, SENDING_OF, SENT_BY, TRAINING_OF
from lachesis.metrics.sinks.jsonl import MetricsLog, StepLine

Event = dict[str, Any]

LOOP, GENERATION, REWARDS = 1, 2, 3


class Row(NamedTuple):
    """Row of the picture: its label, and the engine or rank that it belongs to, if any."""

    title: str
    engine: str | None = None
    rank: str | None = None


Rows = Mapping[int, Row]
THREADS: Rows = {LOOP: Row("training loop"), GENERATION: Row("generation"), REWARDS: Row("rewards")}
# In the order in which the loop does them; a checkpoint's seconds are recorded with the step after it.
PARTS = (
    ("checkpoint_time", "checkpoint"),
    ("data_fetch_time", "wait for a batch"),
    ("train_time", "forward, backward"),
    ("sync_time", "optimizer and transfer"),
    ("eval_time", "evaluation"),
)
COUNTERS = ("reward", "tokens_generated", "staleness/mean", "gpu_memory_gb")


def timeline(log: MetricsLog, *, name: str) -> dict[str, Any]:
    """Return trace events, in microseconds since the first step began; ``name`` is the run's."""
    timed = [line for line in log.steps if line.values.get("step_time", 0.0) > 0]
    origin = min((line.time - line.values["step_time"] for line in timed), default=0.0)
    rows = timeline_rows(timed)
    events: list[Event] = [_named("process_name", name, LOOP)]
    events += [_named("thread_name", words, thread) for thread, (words, _, _) in rows.items()]
    ends: dict[int, float] = {}
    for line in timed:
        events += step_events(line, origin=origin, ends=ends, rows=rows)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def timeline_rows(timed: Sequence[StepLine]) -> Rows:
    """Return the threads' rows, followed by one for each of several engines and ranks."""
    found = dict.fromkeys(name for line in timed for name in line.values)
    engines = dict.fromkeys(_of(name, (GENERATION_OF, RECEIVING_OF)) for name in found)
    ranks = dict.fromkeys(_of(name, (TRAINING_OF, SENDING_OF)) for name in found)
    own = [Row(f"engine {engine}", engine=engine) for engine in engines if engine is not None]
    own += [Row(f"rank {rank}", rank=rank) for rank in ranks if rank is not None]
    return {**THREADS, **dict(enumerate(own, start=len(THREADS) + 1))}


def _of(name: str, prefixes: Sequence[str]) -> str | None:
    """Return the engine or rank of a metric that has one of these prefixes, or None."""
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)


def step_events(line: StepLine, *, origin: float, ends: dict[int, float], rows: Rows) -> Iterator[Event]:
    """Yield the events of a step, itself first, and advance ``ends``, the end of the last event in each row.

    ``ends``, where the last ones of each row ended, is moved on.
    """
    for event in _step_events(line, origin=origin, ends=ends, rows=rows):
        yield event if event["ph"] == "C" else event | {"cat": rows[event["tid"]].title}


def _step_events(line: StepLine, *, origin: float, ends: dict[int, float], rows: Rows) -> Iterator[Event]:
    values = {name: value for name, value in line.values.items() if math.isfinite(value)}
    begin = line.time - values["step_time"] - origin
    numbers = {name: values[name] for name in ("reward", "loss", "grad_norm", "weight_version") if name in values}
    yield _slice(f"step {line.step}", LOOP, begin, values["step_time"], **numbers)
    at = begin
    for part, words in PARTS:
        seconds = values.get(part, 0.0)
        if seconds > 0:
            yield _slice(words, LOOP, at, seconds, step=line.step)
        if part == "data_fetch_time":
            yield from _rollouts(values, step=line.step, begin=at, end=at + seconds, ends=ends, rows=rows)
        if part == "train_time":
            for thread, row in rows.items():
                if (name := f"{TRAINING_OF}{row.rank}") in values:
                    yield _slice("forward, backward", thread, at, values[name], step=line.step)
        if part == "sync_time":
            yield from _sync(values, step=line.step, begin=at, seconds=seconds, rows=rows)
        at += seconds
    for counter in COUNTERS:
        if counter in values:
            yield {"name": counter, "ph": "C", "ts": _micro(at), "pid": 1, "args": {counter: values[counter]}}


def _rollouts(
    values: Mapping[str, float], *, step: int, begin: float, end: float, ends: dict[int, float], rows: Rows
) -> Iterator[Event]:
    """Yield generation, that of each engine, then rewards: in the loop's wait if they fit, else up to its end."""
    generation, rewards = values.get("generation_time", 0.0), values.get("reward_time", 0.0)
    rewards -= values.get("hidden_reward_time", 0.0)
    beside = generation + rewards > 1.05 * (end - begin)
    start = end - generation - rewards if beside else begin
    of_engines = [
        (thread, "generation", start, values[name])
        for thread, row in rows.items()
        if (name := f"{GENERATION_OF}{row.engine}") in values
    ]
    for thread, words, starts, seconds in (
        (GENERATION, "generation", start, generation),
        *of_engines,
        (REWARDS, "rewards", start + generation, rewards),
    ):
        if seconds <= 0:
            continue
        placed = max(starts, ends.get(thread, 0.0))
        shown = max(0.0, starts + seconds - placed)
        yield _slice(words, thread, placed, shown, step=step, seconds=seconds, place="assumed" if beside else "known")
        ends[thread] = placed + shown


def _sync(values: Mapping[str, float], *, step: int, begin: float, seconds: float, rows: Rows) -> Iterator[Event]:
    """Yield the parts of the sync: before the transfer, the transfer (also by engine and rank), and its proof."""
    proof = min(values.get("proof_time", 0.0), seconds)
    transfer = min(values.get("transfer_time", 0.0), seconds - proof)
    at = begin
    for words, part in (("optimizer step", seconds - transfer - proof), ("transfer", transfer), ("proof", proof)):
        if part > 0:
            yield _slice(words, LOOP, at, part, step=step)
        if words == "transfer":
            yield from _transfer(values, step=step, begin=at, rows=rows)
        at += part


def _transfer(values: Mapping[str, float], *, step: int, begin: float, rows: Rows) -> Iterator[Event]:
    """Yield the transfers that each engine received and each rank sent, which all begin together."""
    for thread, row in rows.items():
        sending, receiving = f"{SENDING_OF}{row.rank}", f"{RECEIVING_OF}{row.engine}"
        if sending in values:
            sent = {"gb": values[f"{SENT_BY}{row.rank}"]} if f"{SENT_BY}{row.rank}" in values else {}
            yield _slice("sends weights", thread, begin, values[sending], step=step, **sent)
        if receiving in values:
            yield _slice("receives weights", thread, begin, values[receiving], step=step)


def _slice(name: str, thread: int, begin: float, length: float, /, **args: Any) -> Event:
    whole = {"name": name, "ph": "X", "ts": _micro(begin), "dur": _micro(length), "pid": 1, "tid": thread}
    return {**whole, "args": args}


def _named(kind: str, words: str, thread: int) -> Event:
    return {"name": kind, "ph": "M", "pid": 1, "tid": thread, "args": {"name": words}}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
