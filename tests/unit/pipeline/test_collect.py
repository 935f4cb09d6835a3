from __future__ import annotations

import json

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError
from lachesis.pipeline.collect import Collector, Reroll
from tests.unit.pipeline.sources import ScriptedSource
from tests.waiting import LONG_S


def collect(collector: Collector) -> list[str]:
    return [g.prompt.id for g in collector.collect(deadline=Deadline("test", LONG_S))]


def test_without_refills_the_order_is_the_sources():
    source = ScriptedSource(lambda name, _: (0.0, float(int(name) % 2)))
    assert collect(Collector(source, count=4)) == ["0", "1", "2", "3"]


def test_groups_without_signal_are_refilled():
    source = ScriptedSource(lambda name, _: (0.0, float(int(name) % 2)))
    collector = Collector(source, count=4, refill_rounds=5)
    assert collect(collector) == ["1", "3", "5", "7"]
    assert collector.counters()["refilled_groups"] == 4, "2 of 0 to 3, 1 of 4 and 5, and 6"


def test_refilling_ends_and_the_batch_is_filled_up():
    source = ScriptedSource(lambda name, _: (0.0, float(name == "1")))
    assert collect(Collector(source, count=3, refill_rounds=2)) == ["1", "0", "2"]
    assert len(source.taken) == 3 + 2 + 2


def rerolling(source: ScriptedSource, *, start_step: int = 2, max_groups: int = 1) -> Collector:
    return Collector(source, count=3, reroll=Reroll(start_step=start_step, max_groups=max_groups))


def test_prompts_that_failed_come_again_later_the_oldest_first():
    source = ScriptedSource(lambda name, attempt: (0.0, 1.0) if attempt else (0.0, float(name not in ("0", "2"))))
    collector = rerolling(source)
    assert collect(collector) == ["0", "1", "2"]
    collector.report_version(1)
    assert collect(collector) == ["3", "4", "5"], "not yet"
    collector.report_version(2)
    assert collect(collector) == ["0", "6", "7"]
    assert collect(collector) == ["2", "8", "9"]
    assert collect(collector) == ["10", "11", "12"], "both were solved"
    assert collector.counters()["rerolled_groups"] == 2


def test_a_prompt_that_fails_again_waits_again_once():
    source = ScriptedSource(lambda name, _: (0.0, 0.0) if name == "0" else (0.0, 1.0))
    collector = rerolling(source, start_step=0)
    assert [collect(collector) for _ in range(3)] == [["0", "1", "2"], ["0", "3", "4"], ["0", "5", "6"]]


def test_refilled_groups_that_failed_wait_too():
    source = ScriptedSource(lambda name, _: (0.0, 0.0) if name == "0" else (0.0, 1.0))
    collector = Collector(source, count=2, refill_rounds=1, reroll=Reroll(start_step=0, max_groups=1))
    assert collect(collector) == ["1", "2"]
    assert collect(collector)[:1] == ["3"] and source.attempts["0"] == 1


def test_a_source_that_takes_nothing_back_is_named():
    collector = rerolling(ScriptedSource(lambda *_: (0.0, 0.0), can_requeue=False), start_step=0)
    collect(collector)
    with pytest.raises(ConfigError, match="reroll_start_fraction"):
        collect(collector)


def test_the_waiting_prompts_are_part_of_the_state():
    def make() -> Collector:
        return rerolling(ScriptedSource(lambda name, _: (0.0, float(name not in ("0", "1")))), max_groups=2)

    first, second = make(), make()
    collect(first)
    first.report_version(2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert collect(second) == collect(first) == ["0", "1", "3"]
