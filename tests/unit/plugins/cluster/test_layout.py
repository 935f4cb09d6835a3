"""What each node does, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.cluster.layout import Layout, Machines, NodeServers, derive_layout, engine_ports

BASE = {"run": {"steps": 2}, "model": {"path": "m"}, "data": {"path": "d"}, "rewards": {"functions": ["r.r"]}}
CPU = {"model": {"path": "m", "device": "cpu"}}
BROADCAST = {"bridge": {"kind": "broadcast"}}
APART = {"engine": {"kind": "vllm", "data_parallel_size": 3, "tensor_parallel_size": 4}} | BROADCAST
SHARED = {"engine": {"kind": "vllm"}, "bridge": {"kind": "shared_vllm"}}
ATROPOS = {"source": {"kind": "atropos"}}


def config(**sections: Any) -> LachesisConfig:
    return LachesisConfig.model_validate(BASE | sections)


@pytest.mark.parametrize(
    ("sections", "machines", "expected"),
    [
        ({}, Machines(2, 8), Layout("train", 2, 8, 8, None)),
        (CPU, Machines(2, 0, ranks=3), Layout("train", 2, 3, 0, None)),
        (APART, Machines(4, 8), Layout("train", 2, 8, 8, NodeServers(3, 2, 2, 4, 9001))),
        (APART | CPU, Machines(2), Layout("train", 1, 1, 0, NodeServers(3, 1, 3, 0, 9001))),
        (
            {"engine": {"kind": "vllm", "devices": "6,7"}} | BROADCAST,
            Machines(1, 8),
            Layout("train", 1, 6, 8, None),
        ),
        (
            CPU | BROADCAST | {"engine": {"kind": "embedded_server"}},
            Machines(2),
            Layout("train", 1, 1, 0, NodeServers(1, 1, 1, 0, 9001)),
        ),
        (SHARED, Machines(1, 1), Layout("train", 1, 1, 1, None)),
        (
            {"engine": {"kind": "http", "urls": ["http://other:9001"]}} | BROADCAST,
            Machines(2, 4),
            Layout("train", 2, 4, 4, None),
        ),
        (APART | ATROPOS, Machines(3, 8), Layout("run", 1, 8, 8, NodeServers(3, 2, 2, 4, 9001))),
    ],
)  # fmt: skip
def test_which_nodes_train_and_which_generate(sections: dict[str, Any], machines: Machines, expected: Layout):
    found = derive_layout(config(**sections), machines)
    assert found == expected
    assert found.nodes == machines.nodes


@pytest.mark.parametrize(
    ("sections", "machines", "message"),
    [
        ({}, Machines(2), "the number of GPUs of a node is not given"),
        (CPU, Machines(2, 8), "model.device is cpu"),
        ({}, Machines(1, 8, ranks=2), "--ranks-per-node is for model.device cpu"),
        (APART, Machines(2, 8), "none of 2 is left to train"),
        (APART, Machines(4, 2), "tensor_parallel_size 4 is more than the 2"),
        (
            {"engine": {"kind": "vllm", "devices": "0,1"}} | BROADCAST,
            Machines(2, 8),
            "names GPUs of one machine",
        ),
        (
            {"engine": {"kind": "vllm", "devices": "0,1"}} | BROADCAST,
            Machines(1, 8),
            "ranks take those from 0 on",
        ),
        (SHARED, Machines(2, 1), "shared_vllm needs engine and"),
        (
            SHARED,
            Machines(1, 2),
            "on one GPU, but a node of 2",
        ),
        ({"engine": {"kind": "vllm"}, "bridge": {"kind": "none"}}, Machines(2, 1), "bridge.kind none needs engine and"),
        ({"engine": {"kind": "http"}} | BROADCAST, Machines(1, 1), "this job starts no server"),
        (APART | {"source": {"kind": "atropos", "url": "http://far:8002"}}, Machines(3, 8), "source.url is at far"),
        (APART | ATROPOS | {"services": {"api": None}}, Machines(3, 8), "this job starts no rollout API"),
        ({"distributed": {"shard_size": 3}}, Machines(2, 4), "which is not a multiple"),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], machines: Machines, message: str):
    with pytest.raises(ConfigError, match=message):
        derive_layout(config(**sections), machines)


def test_the_ports_of_a_nodes_servers():
    assert engine_ports(config(**APART), servers=2) == [9001, 9002]
    assert engine_ports(config(), servers=0) == []
    with pytest.raises(ConfigError, match=r"--servers is 2, but a job does not start servers of engine.kind embedded"):
        engine_ports(config(), servers=2)
