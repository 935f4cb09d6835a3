"""What becomes of a process beside the ranks that ends or is lost, on hosts whose calls end when a test says so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, EngineError, LachesisError
from lachesis.plugins.cluster import ray_services
from lachesis.plugins.cluster.placement import Ended, Lost, Place
from lachesis.plugins.cluster.ray_services import Service, Watch
from tests.unit.plugins.cluster.hosts import Cluster, Host
from tests.waiting import LONG_S

FAILED, WRONG = Ended(6, "error: no memory"), Ended(2, "error: no such key")
NODE_LOST, HOST_LOST = Lost("its node is gone", node_lost=True), Lost("its actor died", node_lost=False)


class Stage:
    """A service on a node, at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, news_s: float = 0.0, **options: Any) -> None:
        monkeypatch.setattr(ray_services, "_LOOK_S", 0.0)
        monkeypatch.setattr(ray_services, "_AGAIN_S", 0.0)
        monkeypatch.setattr(ray_services, "NEWS_S", news_s)
        self.cluster: Any = Cluster()
        self.watch = Watch(self.cluster)
        self.moves: list[Place | None] = []
        self.service = Service(
            "engine 1",
            self.watch,
            new_host=self.cluster.host,
            task=lambda place: place,  # type: ignore[arg-type, return-value]
            moved=partial(self._note),
            **{"restarts": 2} | options,
        )
        self.service.settle()
        self.settled("a")

    def _note(self) -> None:
        self.moves.append(self.service.place)

    @property
    def host(self) -> Host:
        return self.cluster.hosts[-1]

    def settled(self, node: str) -> None:
        self.host.place.calls[-1].outcome = Place(node, node, 1)
        self.look()

    def ends(self, outcome: Ended | Lost) -> None:
        self.host.run.calls[-1].outcome = outcome
        self.look()

    def look(self) -> None:
        for _ in range(3):
            self.watch.look()


def test_a_process_that_fails_is_started_again_where_it_is_so_many_times(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(monkeypatch)
    stage.ends(FAILED)
    stage.ends(FAILED)
    assert len(stage.host.run.calls) == 3
    with pytest.raises(EngineError, match="engine 1: no memory"):
        stage.ends(FAILED)
    assert len(stage.cluster.hosts) == 1 and stage.moves == [Place("a", "a", 1)]


def test_what_would_come_again_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="no such key"):
        Stage(monkeypatch).ends(WRONG)


def test_a_lost_node_is_no_failure_and_its_process_gets_another_place(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(monkeypatch)
    for node in "bcd":
        stage.ends(NODE_LOST)
        assert stage.moves[-1] is None
        stage.settled(node)
        assert stage.moves[-1] == Place(node, node, 1) and len(stage.host.run.calls) == 1
    assert len(stage.cluster.hosts) == 4


def test_a_node_of_whose_loss_the_news_come_later_is_no_failure_either(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(monkeypatch, news_s=LONG_S, restarts=0)
    stage.ends(HOST_LOST)
    assert len(stage.cluster.hosts) == 1, "it would come to the same node"
    stage.cluster.gone.add("a")
    stage.look()
    assert len(stage.cluster.hosts) == 2


def test_a_host_that_ends_on_a_node_that_lives_is_one(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(monkeypatch, restarts=1)
    stage.ends(HOST_LOST)
    stage.settled("a")
    assert len(stage.cluster.hosts) == 2
    with pytest.raises(LachesisError, match="its actor died"):
        stage.ends(HOST_LOST)


def test_a_host_that_gets_no_place_is_one_too(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(monkeypatch, restarts=1)
    stage.ends(NODE_LOST)
    stage.host.place.calls[-1].outcome = HOST_LOST
    stage.look()
    assert len(stage.cluster.hosts) == 3
    stage.host.place.calls[-1].outcome = HOST_LOST
    with pytest.raises(LachesisError, match="its actor died"):
        stage.look()


def test_an_end_in_peace_is_none_where_it_may_be(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(monkeypatch, may_end=True)
    stage.ends(Ended(0, ""))
    assert len(stage.host.run.calls) == 1


def test_a_host_that_is_replaced_is_not_heard_any_more(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(monkeypatch)
    old = stage.host
    stage.service.replace()
    assert old.ended
    old.run.calls[-1].outcome = HOST_LOST
    stage.settled("b")
    assert len(stage.cluster.hosts) == 2 and len(stage.host.run.calls) == 1
