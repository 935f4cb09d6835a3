"""The timeline of a run: everything has its place, nothing lies over its neighbour."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from lachesis.metrics.sinks.jsonl import MetricsLog, StepLine
from lachesis.plugins.report.timeline import GENERATION, LOOP, REWARDS, timeline

STEP = {
    "step_time": 10.0,
    "data_fetch_time": 5.0,
    "generation_time": 4.0,
    "reward_time": 1.0,
    "train_time": 3.0,
    "sync_time": 1.5,
    "transfer_time": 0.5,
    "proof_time": 0.25,
    "eval_time": 0.5,
    "reward": 0.5,
}


def events_of(*steps: dict[str, float], gap: float = 0.0) -> list[dict[str, Any]]:
    lines, now = [], 100.0
    for number, values in enumerate(steps, start=1):
        now += values["step_time"] + gap
        lines.append(StepLine(step=number, time=now, values=values))
    trace = timeline(MetricsLog(tuple(lines), ()), name="a run")
    return json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]


def spans(events: list[dict[str, Any]], thread: int) -> list[tuple[str, float, float]]:
    """Name, begin and end in seconds."""
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
    return [(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in slices]


def test_the_parts_of_a_step_follow_one_another():
    assert spans(events_of(STEP), LOOP) == [
        ("step 1", 0.0, 10.0),
        ("wait for a batch", 0.0, 5.0),
        ("forward, backward", 5.0, 8.0),
        ("optimizer and transfer", 8.0, 9.5),
        ("optimizer step", 8.0, 8.75),
        ("transfer", 8.75, 9.25),
        ("proof", 9.25, 9.5),
        ("evaluation", 9.5, 10.0),
    ]


def test_what_the_loop_waits_for_is_within_its_wait():
    events = events_of(STEP)
    assert spans(events, GENERATION) == [("generation", 0.0, 4.0)]
    assert spans(events, REWARDS) == [("rewards", 4.0, 5.0)]
    assert {
        event["args"]["place"] for event in events if event.get("tid") in (GENERATION, REWARDS) and event["ph"] == "X"
    } == {"known"}


def test_what_goes_on_beside_the_loop_ends_with_its_wait_and_overlaps_nothing():
    ahead = STEP | {"data_fetch_time": 1.0, "generation_time": 8.0, "reward_time": 0.5}
    events = events_of(STEP, ahead, ahead)
    generation = spans(events, GENERATION)
    assert [round(end, 6) for _, _, end in generation[1:]] == [10.5, 20.5]
    assert all(one[2] <= two[1] for one, two in pairwise(generation))
    placed = [event for event in events if event["name"] == "generation"]
    assert [event["args"]["place"] for event in placed] == ["known", "assumed", "assumed"]
    assert placed[1]["args"]["seconds"] == 8.0, "as measured, also where there was no room for it"


def test_a_checkpoint_comes_before_what_follows_it():
    second = STEP | {"checkpoint_time": 2.0, "step_time": 12.0}
    loop = spans(events_of(STEP, second), LOOP)
    assert ("checkpoint", 10.0, 12.0) in loop
    assert ("wait for a batch", 12.0, 17.0) in loop


def test_counters_and_names():
    events = events_of(STEP)
    assert {"reward": 0.5} in [event["args"] for event in events if event["ph"] == "C"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        *("a run", "training loop", "generation", "rewards")
    }


@pytest.mark.parametrize("values", [{}, {"step_time": float("nan")}, {"step_time": 0.0}])
def test_a_step_without_times_has_no_place(values: dict[str, float]):
    log = MetricsLog((StepLine(step=1, time=1.0, values=values),), ())
    assert not [event for event in timeline(log, name="r")["traceEvents"] if event["ph"] == "X"]


def test_each_of_several_engines_and_ranks_has_a_row():
    engines = {"generation_time/10.0.0.1:9001": 3.5, "generation_time/10.0.0.2:9001": 2.0}
    values = STEP | engines | {"train_time/0": 3.0, "train_time/1": 2.5}
    events = events_of(values, values)
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(rows)[3:] == ["engine 10.0.0.1:9001", "engine 10.0.0.2:9001", "rank 0", "rank 1"]
    assert spans(events, rows["engine 10.0.0.1:9001"]) == [("generation", 0.0, 3.5), ("generation", 10.0, 13.5)]
    assert spans(events, rows["engine 10.0.0.2:9001"]) == [("generation", 0.0, 2.0), ("generation", 10.0, 12.0)]
    assert spans(events, rows["rank 1"]) == [("forward, backward", 5.0, 7.5), ("forward, backward", 15.0, 17.5)]
    assert spans(events, REWARDS)[0] == ("rewards", 4.0, 5.0), "as without them"


def test_a_transfer_is_shown_by_engine_and_rank():
    engines = {
        "receive_time/10.0.0.1:9001": 0.4,
        "receive_time/10.0.0.2:9001": 0.5,
        "generation_time/10.0.0.1:9001": 4.0,
    }
    ranks = {"send_time/0": 0.3, "sent_gb/0": 8.0, "send_time/1": 0.2, "sent_gb/1": 7.5, "train_time/1": 3.0}
    events = events_of(STEP | engines | ranks)
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(rows)[3:] == ["engine 10.0.0.1:9001", "engine 10.0.0.2:9001", "rank 0", "rank 1"]
    begin = 8.75  # of the transfer in the loop's own row
    assert ("transfer", begin, 9.25) in spans(events, LOOP)
    of_first, of_second = spans(events, rows["engine 10.0.0.1:9001"]), spans(events, rows["engine 10.0.0.2:9001"])
    assert of_first == [("generation", 0.0, 4.0), ("receives weights", begin, 9.15)]
    assert of_second == [("receives weights", begin, 9.25)]
    assert spans(events, rows["rank 0"]) == [("sends weights", begin, 9.05)]
    assert spans(events, rows["rank 1"]) == [("forward, backward", 5.0, 8.0), ("sends weights", begin, 8.95)]
    sent = [event["args"]["gb"] for event in events if event["name"] == "sends weights"]
    assert sent == [8.0, 7.5]
