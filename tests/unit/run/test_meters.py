"""Which GPUs a run measures, on a machine whose torch says that it has some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lachesis.config.schema import LachesisConfig
from lachesis.run.parts import rank_meter, run_meter

VISIBLE = ("a", "b", "c")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """The GPUs that meters are opened for."""
    seen: list[tuple[list[str], str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(VISIBLE))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=VISIBLE[number]))
    monkeypatch.setattr(
        "lachesis.metrics.gpu_meter.open_meter", lambda names, *, machine: seen.append(([*names], machine))
    )
    return seen


@pytest.mark.parametrize(
    ("engine", "bridge", "measured"),
    [
        ({"kind": "embedded"}, "in_process", ["GPU-b"]),
        ({"kind": "http", "urls": ["http://127.0.0.1:1"]}, "reload", ["GPU-b"]),
        ({"kind": "embedded_server"}, "reload", ["GPU-b", "GPU-a"]),
        ({"kind": "vllm", "devices": "2, GPU-x"}, "broadcast", ["GPU-b", "2", "GPU-x"]),
        ({"kind": "vllm", "tensor_parallel_size": 2}, "broadcast", ["GPU-b", "GPU-a", "GPU-b"]),
    ],
)
def test_those_of_the_trainer_and_of_the_engine_that_it_starts(
    asked: list[tuple[list[str], str]], engine: dict[str, Any], bridge: str, measured: list[str]
):
    sections = {"model": {"path": "m"}, "run": {"steps": 1}, "data": {"path": "d"}, "rewards": {"functions": ["a.b"]}}
    config = LachesisConfig.model_validate(sections | {"engine": engine, "bridge": {"kind": bridge}})
    run_meter(config, torch.device("cuda", 1))
    assert asked == [(measured, "")]


def test_a_rank_of_another_machine_says_which(asked: list[tuple[list[str], str]]):
    rank_meter(torch.device("cuda", 2), machine="node-b:")
    assert asked == [(["GPU-c"], "node-b:")]


def test_without_a_gpu_nothing_is_asked(asked: list[tuple[list[str], str]]):
    sections = {"model": {"path": "m"}, "run": {"steps": 1}, "data": {"path": "d"}, "rewards": {"functions": ["a.b"]}}
    assert run_meter(LachesisConfig.model_validate(sections), torch.device("cpu")) is None
    assert rank_meter(torch.device("cpu"), machine="") is None
    assert asked == []
