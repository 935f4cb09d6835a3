"""The engine behind the environments is looked at from time to time."""

from __future__ import annotations

import threading

import pytest

from lachesis.common.errors import EngineError, StopRequested
from lachesis.common.types import EngineHealth
from lachesis.plugins.atropos.source.source import EngineWatch
from tests.fakes import FakeEngine


class Engine(FakeEngine):
    looks = 0
    ready = True
    paused = False
    others_serve = False

    def health(self) -> EngineHealth:
        self.looks += 1
        detail = "it does not answer"
        return EngineHealth(self.ready, 0, "s", paused=self.paused, detail=detail, others_serve=self.others_serve)


def test_an_engine_that_is_gone_is_said():
    engine = Engine()
    watch = EngineWatch(engine, every_s=0.0)
    watch()
    engine.ready = False
    with pytest.raises(EngineError, match="cannot generate: it does not answer") as raised:
        watch()
    assert "--resume" in raised.value.remedy


def test_of_several_servers_one_that_serves_is_enough_and_the_loss_is_said_once(caplog: pytest.LogCaptureFixture):
    engine = Engine()
    engine.ready, engine.others_serve = False, True
    watch = EngineWatch(engine, every_s=0.0)
    watch()
    watch()
    assert [record.getMessage() for record in caplog.records] == [
        "environments generate with the engines that are left: it does not answer"
    ]
    engine.others_serve = False
    with pytest.raises(EngineError, match="cannot generate"):
        watch()


def test_a_paused_one_is_there():
    engine = Engine()
    engine.ready, engine.paused = False, True
    EngineWatch(engine, every_s=0.0)()
    assert engine.looks == 1


def test_it_is_not_looked_at_all_the_time():
    engine = Engine()
    watch = EngineWatch(engine, every_s=1000.0)
    for _ in range(10):
        watch()
    assert engine.looks == 0


def test_a_look_at_an_engine_that_hangs_can_be_given_up():
    hanging = threading.Event()

    class Hanging(Engine):
        def health(self) -> EngineHealth:
            hanging.wait(60)
            return super().health()

    def stop() -> None:
        raise StopRequested("enough")

    with pytest.raises(StopRequested):
        EngineWatch(Hanging(), watch=stop, every_s=0.0)()
    hanging.set()
