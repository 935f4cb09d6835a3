"""Digests of what tensor-parallel workers hold: layers are vLLM's own, cut and loaded by vLLM's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lachesis.engines.serving.served import DigestSlice
from lachesis.engines.vllm.cuts import add_workers
from lachesis.engines.vllm.worker import WorkerWeights
from lachesis.transport.digest import digests
from tests.contracts.vllm_server import needs_vllm

pytestmark = needs_vllm
HIDDEN, HEAD, VOCABULARY = 16, 4, 100


def checkpoint(kv_heads: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "q": (4 * HEAD, HIDDEN), "k": (kv_heads * HEAD, HIDDEN), "v": (kv_heads * HEAD, HIDDEN), "gate": (24, HIDDEN),
        "up": (24, HIDDEN), "down.weight": (HIDDEN, 24), "down.bias": (HIDDEN,), "norm.weight": (HIDDEN,),
        "embed.weight": (VOCABULARY, HIDDEN), "one.weight": (24, HIDDEN), "one.bias": (24,),
        "router.weight": (8, HIDDEN),
    }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def worker(monkeypatch: pytest.MonkeyPatch, whole: dict[str, Tensor], rank: int, size: int) -> WorkerWeights:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=size))
    model: Any = nn.Module()
    with set_current_vllm_config(VllmConfig()):
        kv_heads = whole["k"].shape[0] // HEAD
        model.qkv = linear.QKVParallelLinear(HIDDEN, HEAD, 4, kv_heads, bias=False)
        model.gate_up = linear.MergedColumnParallelLinear(HIDDEN, [24, 24], bias=False)
        model.down = linear.RowParallelLinear(24, HIDDEN, bias=True)
        model.one = linear.ColumnParallelLinear(HIDDEN, 24, bias=True)
        model.router = linear.ReplicatedLinear(HIDDEN, 8, bias=False)
        model.embed = VocabParallelEmbedding(VOCABULARY, HIDDEN)
    model.norm = nn.LayerNorm(HIDDEN, bias=False)
    for name in ("q", "k", "v"):
        model.qkv.weight.weight_loader(model.qkv.weight, whole[name], name)
    for number, name in enumerate(("gate", "up")):
        model.gate_up.weight.weight_loader(model.gate_up.weight, whole[name], number)
    model.norm.weight.data.copy_(whole["norm.weight"])
    for name in ("down.weight", "down.bias", "embed.weight", "one.weight", "one.bias", "router.weight"):
        parameter = model.get_parameter(name)
        parameter.weight_loader(parameter, whole[name])
    config = SimpleNamespace(lora_config=None, parallel_config=SimpleNamespace(tensor_parallel_size=size))
    runner = SimpleNamespace(get_model=lambda: model)
    return WorkerWeights(SimpleNamespace(model_runner=runner, vllm_config=config, device="cpu", rank=rank))


def slices(whole: dict[str, Tensor]) -> dict[str, DigestSlice]:
    found = {name: DigestSlice(name) for name in whole if "." in name}
    for fused, names in {"qkv.weight": ("q", "k", "v"), "gate_up.weight": ("gate", "up")}.items():
        start = 0
        for name in names:
            found[name] = DigestSlice(fused, start, whole[name].shape[0])
            start += whole[name].shape[0]
    return found


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (2, 1), (4, 2)])
def test_parts_of_workers_add_up_to_the_checkpoint(monkeypatch: pytest.MonkeyPatch, size: int, kv_heads: int):
    whole = checkpoint(kv_heads)
    workers = [worker(monkeypatch, whole, rank, size) for rank in range(size)]
    asked = {"slices": slices(whole)}

    def found() -> dict[str, int]:
        return add_workers([one.digest_parts(asked) for one in workers])

    expected = digests(whole)
    assert found() == expected
    rows = (4 + 2 * kv_heads) * HEAD
    assert workers[1].state_dict_info()["qkv.weight"]["shape"] == [rows, HIDDEN]
    for name in ("embed.weight", "down.weight", "norm.weight"):  # the last is a copy that each worker has
        held = workers[-1]._runner.get_model().get_parameter(name).data
        kept = held.clone()
        held[0] = 0
        assert {other for other in expected if found().get(other) != expected[other]} == {name}
        held.copy_(kept)
