from __future__ import annotations

import errno
import logging

import pytest

from lachesis.common.types import EvalResult, Finding, StepRecord
from lachesis.metrics.health.monitor import HealthMonitor
from lachesis.metrics.hub import MetricsHub, Sink


class Recorder(Sink):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.evaluations: list[EvalResult] = []
        self.closed = 0

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluation(self, result: EvalResult) -> None:
        self.evaluations.append(result)

    def close(self) -> None:
        self.closed += 1


class Broken(Recorder):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.calls = 0

    def write(self, record: StepRecord) -> None:
        self.calls += 1
        raise self.error


class BrokenMonitor(HealthMonitor):
    def examine(self, record: StepRecord) -> tuple[Finding, ...]:
        raise ZeroDivisionError("division by zero")


EVALUATION = EvalResult(0, 0.4, 0.4, 512, 3.0, 0.5)


def test_every_sink_gets_everything_in_order() -> None:
    sinks = [Recorder(), Recorder()]
    hub = MetricsHub(sinks)
    hub.evaluation(EVALUATION)
    for step in (1, 2):
        hub.emit(StepRecord(step=step, values={}))
    hub.close()
    for sink in sinks:
        assert [record.step for record in sink.records] == [1, 2]
        assert sink.evaluations == [EVALUATION]
        assert sink.closed == 1


def test_broken_sink_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Broken(ValueError("no\nsuch series")), Recorder()
    hub = MetricsHub([broken, good])
    with caplog.at_level(logging.WARNING, logger="lachesis"):
        for step in (1, 2, 3):
            hub.emit(StepRecord(step=step, values={}))
        hub.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    message = caplog.messages[0]
    assert "Broken failed at step 1" in message and "ValueError: no such series" in message and "\n" not in message
    assert (broken.calls, broken.closed) == (1, 1)
    assert len(good.records) == 3 and hub.sinks == ()


def test_full_disk_is_said_plainly(caplog: pytest.LogCaptureFixture) -> None:
    hub = MetricsHub([Broken(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"))])
    hub.emit(StepRecord(step=7, values={}))
    assert caplog.messages[0].startswith("the disk is full while writing metrics.jsonl: Broken failed at step 7")
    assert "free some space" in caplog.messages[0]


def test_what_stops_the_run_is_not_swallowed() -> None:
    class Interrupting(Recorder):
        def write(self, record: StepRecord) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MetricsHub([Interrupting()]).emit(StepRecord(step=1, values={}))


def test_findings_of_the_monitor_reach_the_sinks() -> None:
    sink = Recorder()
    hub = MetricsHub([sink], monitor=HealthMonitor())
    own = Finding("note", "own", "said by the loop")
    returned = hub.emit(StepRecord(step=1, values={"mean_kl": 0.9}, findings=(own,)))
    assert [finding.rule for finding in sink.records[0].findings] == ["own", "kl_high"]
    assert returned == sink.records[0]


def test_broken_monitor_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    sink = Recorder()
    hub = MetricsHub([sink], monitor=BrokenMonitor())
    for step in (1, 2):
        hub.emit(StepRecord(step=step, values={}))
    assert len(caplog.messages) == 1 and "the health rules failed at step 1" in caplog.messages[0]
    assert len(sink.records) == 2
