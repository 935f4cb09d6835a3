"""What becomes of ranks of which one has failed, on hosts whose calls end when a test says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import DataError, DeadlineExceeded, LachesisError
from lachesis.plugins.cluster import ray_ranks, ray_services
from lachesis.plugins.cluster.layout import Machines, derive_layout
from lachesis.plugins.cluster.placement import Ended, Lost, Place, RayJob, Task
from lachesis.plugins.cluster.ray_ranks import Ranks
from lachesis.plugins.cluster.ray_services import Watch
from tests.unit.plugins.cluster.hosts import Cluster, Host
from tests.unit.plugins.cluster.test_layout import CPU, config

KILLED, LEFT_BEHIND = Ended(-9, ""), Ended(10, "error: the leader has ended")
NODE_LOST = Lost("its node is gone", node_lost=True)


class PlacingCluster(Cluster):
    """Each host gets a place at once, and stops at once."""

    def host(self, group: Any = None, *, bundle: int = 0, needs: Any = None) -> Host:
        host = super().host(group, bundle=bundle, needs=needs)
        name = f"10.0.0.{len(self.hosts)}"
        host.place.answer, host.stop.answer = Place(name, name, 29000 + len(self.hosts)), True
        return host


class Stage:
    """Two ranks on a node each, at work."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restarts: int = 1) -> None:
        for module, name in ((ray_services, "_LOOK_S"), (ray_ranks, "_LOOK_S"), (ray_ranks, "_LOST_S")):
            monkeypatch.setattr(module, name, 0.0)
        cluster = {"restarts": restarts, "wait_s": 0.2}
        found = config(**CPU, cluster=cluster, run={"steps": 2, "name": "it", "dir": str(tmp_path)})
        self.job = RayJob(found, derive_layout(found, Machines(2)), tmp_path / "it-ray", {})
        self.cluster: Any = PlacingCluster()
        self.watch = Watch(self.cluster)
        self.ranks = Ranks(self.job, self.watch, options=["--overwrite"])
        self.start()

    def start(self) -> None:
        self.ranks.settle()
        self.ranks.start()

    def task(self, rank: int) -> Task:
        return self.ranks.hosts[rank].run.calls[-1].arguments[0]

    def ends(self, *outcomes: Ended | Lost) -> bool:
        """Both ranks end so; whether they are to be started again."""
        for host, outcome in zip(self.ranks.hosts, outcomes, strict=True):
            host.run.calls[-1].outcome = outcome
        self.watch.look()
        return self.ranks.look()

    def begins(self) -> None:
        """What rank 0 writes before its first checkpoint."""
        (self.job.run_dir / "checkpoints").mkdir(parents=True)
        (self.job.run_dir / "state.json").touch()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_all_are_started_again_where_they_are_and_meet_anew(stage: Stage):
    first = list(stage.ranks.hosts)
    assert stage.ends(LEFT_BEHIND, KILLED)
    assert [len(host.stop.calls) for host in first] == [1, 1]
    stage.start()
    assert stage.ranks.hosts == first
    assert [task.words[-1] for task in (stage.task(0), stage.task(1))] == ["--overwrite"] * 2, "as it had not begun"


def test_a_run_that_had_begun_without_a_checkpoint_begins_again(stage: Stage):
    stage.begins()
    assert stage.ends(LEFT_BEHIND, KILLED)
    stage.start()
    assert stage.task(0).words[-1] == "--overwrite"


def test_failures_are_counted_and_lost_nodes_are_not(stage: Stage):
    for _ in range(3):
        stage.ranks.hosts[1].stop.answer = NODE_LOST
        gone = stage.ranks.hosts[1]
        assert stage.ends(LEFT_BEHIND, NODE_LOST)
        stage.start()
        assert gone.ended and stage.ranks.hosts[1].bundle == 1
        assert stage.task(1).environment["LACHESIS_NODE"] == stage.ranks.places[1].address
    assert stage.ends(LEFT_BEHIND, KILLED)
    stage.start()
    with pytest.raises(LachesisError, match="rank 1 was ended by signal 9"):
        stage.ends(LEFT_BEHIND, KILLED)


def test_what_would_come_again_ends_them_at_once(stage: Stage):
    with pytest.raises(DataError, match="rank 0: no problems"):
        stage.ends(Ended(3, "error: no problems"), Ended(3, ""))


def test_they_are_done_when_rank_0_is(stage: Stage):
    assert not stage.ends(Ended(0, ""), Ended(0, ""))
    assert stage.ranks.finished


def test_a_host_that_is_lost_before_it_has_a_place_is_replaced(stage: Stage):
    assert stage.ends(LEFT_BEHIND, KILLED)
    stage.ranks.hosts[0].place.answer = NODE_LOST
    stage.start()
    assert len(stage.cluster.hosts) == 3 and stage.ranks.places[0].address == "10.0.0.3"


def test_no_room_is_said_with_what_there_is(stage: Stage):
    assert stage.ends(LEFT_BEHIND, KILLED)
    stage.ranks.hosts[0].place.answer = None
    with pytest.raises(DeadlineExceeded, match=r"no room for 2 node.* 1 CPU each within 0.2 s .*10.0.0.7 4 CPU"):
        stage.ranks.settle()
