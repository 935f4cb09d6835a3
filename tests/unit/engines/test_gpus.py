"""The GPUs that the engine of a run gets."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.config.schema import LachesisConfig
from lachesis.engines.gpus import server_environment, with_devices


def configured(engine: dict[str, Any]) -> LachesisConfig:
    data: dict[str, Any] = {"run": {"steps": 1}, "model": {"path": "m"}, "data": {"path": "a.jsonl"}}
    data |= {"rewards": {"functions": ["r.f"]}, "engine": {"kind": "vllm", **engine}, "bridge": {"kind": "broadcast"}}
    return LachesisConfig.model_validate(data)


@pytest.mark.parametrize(
    ("engine", "environment", "devices"),
    [
        ({"tensor_parallel_size": 2}, {"WORLD_SIZE": "2"}, "0,1"),
        ({"data_parallel_size": 2}, {"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4, 6,7"}, "4,6"),
        ({}, {"WORLD_SIZE": "2"}, None),
        ({"tensor_parallel_size": 2}, {}, None),
        ({"tensor_parallel_size": 2, "devices": "3,4"}, {"WORLD_SIZE": "2"}, "3,4"),
    ],
    ids=["of all ranks", "as they are visible", "beside the first", "one process", "elsewhere"],
)
def test_an_engine_on_the_ranks_gpus_is_told_which_they_are(engine: dict, environment: dict, devices: str | None):
    placed = with_devices(configured(engine), environment=environment).engine
    assert placed.kind == "vllm" and placed.devices == devices


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [
        ({}, [None]),
        ({"devices": "4,5", "tensor_parallel_size": 2}, ["4,5"]),
        ({"devices": "4,5,6,7", "tensor_parallel_size": 2, "data_parallel_size": 2}, ["4,5", "6,7"]),
    ],
    ids=["those that the run sees", "one server", "a server's own"],
)
def test_a_server_sees_its_own_gpus(engine: dict, gpus: list[str | None]):
    found = [server_environment(configured(engine), number=number) for number in range(len(gpus))]
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in found] == gpus
