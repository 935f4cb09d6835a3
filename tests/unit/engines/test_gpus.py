"""The GPUs that each server of a run gets."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.config.schema import LachesisConfig
from lachesis.engines.gpus import server_environment


def configured(engine: dict[str, Any]) -> LachesisConfig:
    data: dict[str, Any] = {"run": {"steps": 1}, "model": {"path": "m"}, "data": {"path": "a.jsonl"}}
    data |= {"rewards": {"functions": ["r.f"]}, "engine": {"kind": "vllm", **engine}, "bridge": {"kind": "broadcast"}}
    return LachesisConfig.model_validate(data)


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
