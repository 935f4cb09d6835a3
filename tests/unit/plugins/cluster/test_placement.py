"""What runs where on a Ray cluster, and what follows from how it ends; without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DataError, EngineError, LachesisError
from lachesis.common.world import World, find_world
from lachesis.config.load import LoadedConfig
from lachesis.config.schema import HttpEngineConfig
from lachesis.engines.serving.session import TOKEN_VARIABLE as SESSION_VARIABLE
from lachesis.plugins.cluster import placement
from lachesis.plugins.cluster.layout import Machines, derive_layout
from lachesis.plugins.cluster.placement import Ended, Lost, NodeRoom, Place, RayJob
from lachesis.plugins.cluster.preflight import NODE_VARIABLE, find_place
from lachesis.run.train import train
from lachesis.train.distributed.job import TOKEN_VARIABLE as JOB_VARIABLE
from tests.unit.plugins.cluster.test_layout import APART, ATROPOS, CPU, config

GPUS = [NodeRoom("10.0.0.1", 64, 8), NodeRoom("10.0.0.2", 64, 8)]
HEAD = NodeRoom("10.0.0.9", 4, 0)
PLACES = [Place("n1", "10.0.0.1", 29501), Place("n2", "10.0.0.2", 29502)]
SECRETS = {JOB_VARIABLE: "j", SESSION_VARIABLE: "s"}


def job(tmp_path: Path, machines: Machines, **sections: Any) -> RayJob:
    found = config(**sections)
    return RayJob(found, derive_layout(found, machines), tmp_path / "it-ray", SECRETS)


@pytest.mark.parametrize(
    ("sections", "nodes", "expected"),
    [
        ({}, [HEAD, *GPUS], Machines(2, 8)),
        ({"cluster": {"nodes": 4, "gpus_per_node": 4}}, GPUS, Machines(4, 4)),
        (CPU, [HEAD, *GPUS], Machines(3)),
        (CPU | {"cluster": {"nodes": 2, "ranks_per_node": 3}}, [HEAD], Machines(2, 0, ranks=3)),
    ],
)
def test_a_run_takes_the_nodes_that_there_are(sections: dict[str, Any], nodes: list[NodeRoom], expected: Machines):
    assert placement.machines_of(nodes, config(**sections)) == expected


@pytest.mark.parametrize(
    ("sections", "nodes", "message"),
    [
        ({}, [HEAD], "none of the 1 node.* has a GPU"),
        ({}, [*GPUS, NodeRoom("10.0.0.3", 64, 4)], "different numbers of GPUs: 10.0.0.1 8, 10.0.0.2 8, 10.0.0.3 4"),
        (CPU | {"cluster": {"gpus_per_node": 2}}, [HEAD], "model.device is cpu"),
    ],
)
def test_what_the_nodes_do_not_have_is_said(sections: dict[str, Any], nodes: list[NodeRoom], message: str):
    with pytest.raises(ConfigError, match=message):
        placement.machines_of(nodes, config(**sections))


def test_ray_is_taken_where_it_is_asked_for():
    address = {"RAY_ADDRESS": "10.0.0.9:6379"}
    asked = [config(cluster={"kind": kind}) for kind in ("auto", "local", "ray")]
    assert [placement.takes_ray(one, {}) for one in asked] == [False, False, True]
    assert [placement.takes_ray(one, address) for one in asked] == [True, False, True]


def test_ranks_have_a_bundle_a_node_and_each_engine_its_own(tmp_path: Path):
    found = job(tmp_path, Machines(4, 8), **APART)
    assert placement.rank_bundles(found.layout) == [{"CPU": 8.0, "GPU": 8.0}] * 2
    assert placement.engine_bundle(found.layout) == {"CPU": 1.0, "GPU": 4.0}
    beside = job(tmp_path, Machines(1, 8), engine={"kind": "vllm", "devices": "6,7"}, bridge={"kind": "broadcast"})
    assert placement.rank_bundles(beside.layout) == [{"CPU": 6.0, "GPU": 8.0}], "its engine's GPUs are of the node"


def test_engines_wish_for_nodes_with_as_little_as_can_be():
    nodes, hosts = ["a", "b", "c"], ["a"]
    for number in range(5):
        hosts += [placement.spread(number, hosts, nodes) or "none"]
    assert placement.spread(0, hosts, []) is None
    assert sorted(hosts) == ["a", "a", "b", "b", "c", "c"]


def test_each_rank_gets_the_environment_of_torchrun(tmp_path: Path):
    found = job(tmp_path, Machines(2, 3))
    tasks = [task for node in placement.rank_tasks(found, PLACES, options=["--resume"]) for task in node]
    assert [find_world(task.environment) for task in tasks] == [World(rank, 6, rank % 3, 3) for rank in range(6)]
    assert {(task.environment["MASTER_ADDR"], task.environment["MASTER_PORT"]) for task in tasks} == {
        ("10.0.0.1", "29501")
    }
    assert {task.words for task in tasks} == {("train", str(found.ranks_config), "--resume")}
    assert all(SECRETS.items() <= task.environment.items() for task in tasks)
    assert len({task.log for task in tasks}) == 6


def test_the_preflight_has_a_process_for_each_rank_and_engine_and_names_their_nodes(tmp_path: Path):
    found = job(tmp_path, Machines(3), **CPU, **{name: APART[name] for name in ("engine", "bridge")})
    engines = [PLACES[0], Place("n3", "10.0.0.3", 1), PLACES[1]]
    tasks = placement.preflight_tasks(found, PLACES, engines, within_s=30)
    assert [find_world(task.environment) for task in tasks] == [World(rank, 5, 0, 1) for rank in range(5)]
    assert [task.environment[NODE_VARIABLE].rpartition(".")[2] for task in tasks] == ["1", "2", "1", "3", "2"]
    assert [task.words[-1] for task in tasks[2:]] == ["engine.port=9001", "engine.port=9002", "engine.port=9003"]
    names = tasks[0].words[tasks[0].words.index("--node-names") + 1].split(",")
    places = [
        find_place(task.environment, ranks=2, engine_ports=[port], nodes=names)
        for task, port in zip(tasks, range(9000, 9005), strict=True)
    ]
    assert [place.names([]) for place in places] == [names] * 5
    assert [list(place.engine_ports) for place in places] == [[], [], [9002], [9003], [9004]]


def test_engines_count_their_ports_through_and_answer_as_their_node(tmp_path: Path):
    found = job(tmp_path, Machines(3), **CPU, **{name: APART[name] for name in ("engine", "bridge")})
    task = placement.engine_task(found, PLACES[1], number=2)
    assert task.words == ("vllm-serve", str(found.engine_config), "--port", "9003")
    assert task.environment == SECRETS | {"LACHESIS_ALLOWED_HOSTS": "10.0.0.2"}
    assert placement.engine_url(found, PLACES[1], number=2) == "http://10.0.0.2:9003"
    assert placement.engine_url(found, Place("n", "fd00::1", 1), number=0) == "http://[fd00::1]:9001"


def test_ranks_find_what_is_apart_from_them_and_start_nothing(tmp_path: Path):
    with_api = job(tmp_path, Machines(3, 8), **APART, **ATROPOS, services={"restarts": 7})
    ranks = placement.config_of_ranks(with_api, api=placement.api_url_at(with_api, PLACES[0]))
    assert isinstance(ranks.engine, HttpEngineConfig) and ranks.engine.urls == [f"file:{with_api.engines_file}"]
    assert ranks.source.url == "http://10.0.0.1:8002"  # type: ignore[union-attr]
    assert (ranks.services.api, ranks.services.environment, ranks.services.restarts) == (None, None, 7)
    assert not placement.takes_ray(ranks, {"RAY_ADDRESS": "there"}), "a rank is not placed again"
    assert placement.rank_tasks(with_api, PLACES[:1], options=[])[0][0].words[0] == "train"
    one = job(tmp_path, Machines(1, 1), engine={"kind": "vllm"}, bridge={"kind": "shared_vllm"}, **ATROPOS)
    assert placement.rank_tasks(one, PLACES[:1], options=[])[0][0].words[0] == "run", "which starts them beside it"
    assert placement.config_of_ranks(one, api=None).services == one.config.services


def test_a_run_goes_on_once_it_has_begun():
    first = ("--overwrite",)
    assert placement.start_options(first, begun=False, has_checkpoint=True) == first
    assert placement.start_options((), begun=True, has_checkpoint=True) == ("--resume",)
    assert placement.start_options(("--resume",), begun=True, has_checkpoint=False) == ("--overwrite",)


LEFT_BEHIND = Ended(10, "error: the leader has ended")


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ({0: Ended(3, "error: no data"), 1: Ended(3, "")}, 0),
        ({0: Ended(10, "error: rank 1 is gone"), 1: Ended(-9, "")}, 1),
        ({0: Ended(10, "error: rank 1 is gone"), 1: Lost("its node is gone", node_lost=True)}, 1),
        ({0: Lost("its node is gone", node_lost=True), 1: LEFT_BEHIND}, 0),
        ({0: Ended(6, "error: no engine"), 1: LEFT_BEHIND}, 0),
        ({0: Ended(0, "done"), 1: Ended(70, "")}, 1),
    ],
)
def test_which_rank_says_why_they_have_failed(ends: dict[int, Ended | Lost], rank: int):
    assert placement.cause(ends) == (rank, ends[rank])


def test_a_failure_is_an_error_of_its_kind():
    assert [placement.is_final(end) for end in (Ended(3, ""), Ended(6, ""), Ended(-9, ""), Ended(None, ""))] == [
        True, False, False, False,
    ]  # fmt: skip
    assert not placement.is_final(Lost("", node_lost=False))
    wrong = placement.failure("rank 0", Ended(3, "error: no problems -> write some"))
    assert type(wrong) is DataError and str(wrong) == "rank 0: no problems -> write some"
    assert type(placement.failure("engine 1", Ended(6, "error: no"))) is EngineError
    killed = placement.failure("rank 1", Ended(-9, ""))
    assert type(killed) is LachesisError and "rank 1 was ended by signal 9" in killed.message
    assert "engine 0 is lost: its node 10.0.0.1 is gone" in str(
        placement.failure("engine 0", Lost("its node 10.0.0.1 is gone", node_lost=True))
    )


def test_only_variables_that_are_named_are_passed_on():
    named = config(cluster={"environment": ["HF_TOKEN"]})
    assert placement.passed_on(named, {"HF_TOKEN": "t", "HOME": "/root"}) == {"HF_TOKEN": "t"}
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        placement.passed_on(named, {})


def test_a_run_that_is_placed_by_ray_is_not_started_here(tmp_path: Path):
    asked = config(cluster={"kind": "ray"}, run={"steps": 1, "dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="use `lachesis run CONFIG`"):
        train(LoadedConfig(asked, tmp_path))
    assert not list(tmp_path.iterdir())
