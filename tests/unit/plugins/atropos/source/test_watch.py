"""The engine behind the environments is looked at from time to time."""

from __future__ import annotations

import threading
import time

import pytest

from lachesis.common.errors import EngineError
from lachesis.common.types import EngineHealth
from lachesis.plugins.atropos.source.source import EngineWatch
from tests.fakes import FakeEngine
from tests.waiting import until


class Engine(FakeEngine):
    looks = 0
    ready = True
    paused = False
    others_serve = False

    def health(self) -> EngineHealth:
        self.looks += 1
        detail = "it does not answer"
        return EngineHealth(self.ready, 0, "s", paused=self.paused, detail=detail, others_serve=self.others_serve)


def looked(watch: EngineWatch) -> None:
    """Call it until it has had a look."""
    since = watch._looked

    def has_looked() -> bool:
        watch()
        return watch._looked > since

    until(has_looked)


def test_an_engine_that_is_gone_is_said():
    engine = Engine()
    watch = EngineWatch(engine, every_s=0.0)
    looked(watch)
    engine.ready = False
    with pytest.raises(EngineError, match="cannot generate: it does not answer") as raised:
        looked(watch)
    assert "--resume" in raised.value.remedy


def test_of_several_servers_one_that_serves_is_enough_and_the_loss_is_said_once(caplog: pytest.LogCaptureFixture):
    engine = Engine()
    engine.ready, engine.others_serve = False, True
    watch = EngineWatch(engine, every_s=0.0)
    looked(watch)
    looked(watch)
    assert [record.getMessage() for record in caplog.records] == [
        "environments generate with the remaining engines: it does not answer"
    ]
    engine.others_serve = False
    with pytest.raises(EngineError, match="cannot generate"):
        looked(watch)


def test_a_paused_one_is_there():
    engine = Engine()
    engine.ready, engine.paused = False, True
    looked(EngineWatch(engine, every_s=0.0))
    assert engine.looks == 1


def test_it_is_not_looked_at_all_the_time():
    engine = Engine()
    watch = EngineWatch(engine, every_s=1000.0)
    for _ in range(10):
        watch()
    assert engine.looks == 0


def test_a_look_at_an_engine_that_hangs_is_not_waited_for():
    hanging = threading.Event()

    class Hanging(Engine):
        def health(self) -> EngineHealth:
            hanging.wait(60)
            return super().health()

    engine = Hanging()
    engine.ready = False
    watch = EngineWatch(engine, every_s=0.0)
    since = time.monotonic()
    for _ in range(3):
        watch()
    assert time.monotonic() - since < 5
    hanging.set()
    with pytest.raises(EngineError, match="cannot generate"):
        looked(watch)
    assert engine.looks == 1
