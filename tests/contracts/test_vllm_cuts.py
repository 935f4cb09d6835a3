"""Digests of what vLLM's workers hold: layers are vLLM's own, cut, loaded and put in order by vLLM's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lachesis.bridges.names import map_parameters
from lachesis.engines.serving.backend import DigestSlice
from lachesis.engines.vllm.cuts import add_workers
from lachesis.engines.vllm.in_place import InPlaceLoader
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


def offered(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that a checkpoint has."""
    return {name if "." in name else f"{name}.weight": tensor for name, tensor in whole.items()}


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def parameters(held: WorkerWeights) -> dict[str, Tensor]:
    return {name: one.data for name, one in held._runner.get_model().named_parameters()}


PACKED = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}


def model_of(monkeypatch: pytest.MonkeyPatch, whole: dict[str, Tensor], rank: int, size: int) -> Any:
    model = worker(monkeypatch, whole, rank, size)._runner.get_model()
    model.packed_modules_mapping = PACKED
    return model


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (2, 1), (4, 2)])
def test_what_is_copied_to_its_places_is_where_vllms_loader_puts_it(
    monkeypatch: pytest.MonkeyPatch, size: int, kv_heads: int
):
    whole = checkpoint(kv_heads)
    new = {name: tensor + 1 for name, tensor in whole.items()}
    for rank in range(size):
        model = model_of(monkeypatch, whole, rank, size)
        loader = InPlaceLoader.find(model, shapes_of(offered(whole)))
        assert loader is not None and loader.matches(offered(whole))
        assert not loader.matches(offered(new)) and not loader.matches({})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)  # as after the engine has slept
        loader.load(offered(new))
        assert loader.matches(offered(new))
        expected = parameters(worker(monkeypatch, new, rank, size))
        found = {name: one.data for name, one in model.named_parameters()}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():  # rows that vLLM pads the vocabulary with are 0
            assert torch.equal(found[name], tensor), name


def test_a_value_that_vllm_put_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch):
    whole = checkpoint(2)
    model = model_of(monkeypatch, whole, 0, 1)
    loader = InPlaceLoader.find(model, shapes_of(offered(whole)))
    assert loader is not None
    for name, parameter in model.named_parameters():
        kept = parameter.data.clone()
        parameter.data[0] += 1
        assert not loader.matches(offered(whole)), name
        parameter.data.copy_(kept)
    assert loader.matches(offered(whole))


def test_there_are_no_places_where_something_has_none(monkeypatch: pytest.MonkeyPatch):
    whole = checkpoint(2)
    shapes = shapes_of(offered(whole))
    model = model_of(monkeypatch, whole, 0, 1)
    assert InPlaceLoader.find(model, shapes) is not None
    assert InPlaceLoader.find(model, {name: shape for name, shape in shapes.items() if name != "k.weight"}) is None
    assert InPlaceLoader.find(model, shapes | {"down.weight": (24, HIDDEN)}) is None
    assert InPlaceLoader.find(model, shapes | {"other.weight": (4,)}) is None
    model.packed_modules_mapping = {}
    assert InPlaceLoader.find(model, shapes) is None

    class MLAAttention(nn.Module):
        def process_weights_after_loading(self, dtype: torch.dtype) -> None: ...

    class Attention(MLAAttention): ...

    model = model_of(monkeypatch, whole, 0, 1)
    model.attention = Attention()
    assert InPlaceLoader.find(model, shapes) is not None
    model.attention = MLAAttention()
    assert InPlaceLoader.find(model, shapes) is None, "it keeps products of weights"


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


EXPERTS, INNER = 4, 24
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def mixture(
    monkeypatch: pytest.MonkeyPatch, stacked: dict[str, Tensor], kernels: str, *, rank: int = 0, size: int = 1
) -> WorkerWeights:
    """A worker with a layer of experts, loaded from each expert's tensors and made ready for these kernels."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    for group in ("_DP", "_PCP", "_EP"):
        monkeypatch.setattr(parallel_state, group, alone)
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=size))
    chosen = (UnquantizedMoeBackend[kernels], None)
    monkeypatch.setattr(unquantized_fused_moe_method, "select_unquantized_moe_backend", lambda **_: chosen)

    def without_a_gpu(method: Any, layer: nn.Module) -> None:
        method.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=lambda _: None))

    monkeypatch.setattr(unquantized_fused_moe_method.UnquantizedFusedMoEMethod, "_init_moe_kernel", without_a_gpu)
    model: Any = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    model.model.layers[0].mlp = mlp = nn.Module()
    with set_current_vllm_config(VllmConfig()):
        mlp.experts = FusedMoEFactory(
            num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, intermediate_size=INNER, params_dtype=torch.float32,
            prefix="model.layers.0.mlp.experts",
        )  # fmt: skip
        layer: Any = mlp.experts.routed_experts
        for expert in range(EXPERTS):
            gate, up = stacked[GATE_UP][expert].chunk(2)
            layer.weight_loader(layer.w13_weight, gate, "weight", "w1", expert)
            layer.weight_loader(layer.w13_weight, up, "weight", "w3", expert)
            layer.weight_loader(layer.w2_weight, stacked[DOWN][expert], "weight", "w2", expert)
        layer.quant_method.process_weights_after_loading(layer)
    config = SimpleNamespace(lora_config=None, parallel_config=SimpleNamespace(tensor_parallel_size=size))
    runner = SimpleNamespace(get_model=lambda: model)
    return WorkerWeights(SimpleNamespace(model_runner=runner, vllm_config=config, device="cpu", rank=rank))


def stacked_experts() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {GATE_UP: torch.randn(EXPERTS, 2 * INNER, HIDDEN), DOWN: torch.randn(EXPERTS, HIDDEN, INNER)}


def held_shapes(held: WorkerWeights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(info["shape"]) for name, info in held.state_dict_info().items()}


def test_every_expert_of_a_mixture_is_proved_where_kernels_leave_the_order(monkeypatch: pytest.MonkeyPatch):
    stacked = stacked_experts()
    held = mixture(monkeypatch, stacked, "TRITON")
    ours = {name: tuple(tensor.shape) for name, tensor in stacked.items()}
    found = map_parameters(ours, held_shapes(held), model_type="qwen3_moe", engine_kind="vllm 0.32.0", mixtures=True)
    expected = digests(stacked)
    assert held.digests({"slices": found}) == expected
    for name, part in found.items():
        parameter = held._runner.get_model().get_parameter(part.name).data
        parameter[[0, 1]] = parameter[[1, 0]]
        assert held.digests({"slices": found})[name] != expected[name], "two experts have changed places"
        parameter[[0, 1]] = parameter[[1, 0]]


@pytest.mark.parametrize("size", [2, 4])
def test_experts_that_workers_share_out_are_proved(monkeypatch: pytest.MonkeyPatch, size: int):
    stacked = stacked_experts()
    workers = [mixture(monkeypatch, stacked, "TRITON", rank=rank, size=size) for rank in range(size)]
    ours = {name: tuple(tensor.shape) for name, tensor in stacked.items()}
    assert sorted(held_shapes(workers[-1]).values()) == sorted(ours.values())
    slices = map_parameters(
        ours, held_shapes(workers[0]), model_type="qwen3_moe", engine_kind="vllm 0.32.0", mixtures=True
    )

    def found() -> dict[str, int]:
        return add_workers([one.digest_parts({"slices": slices}) for one in workers])

    expected = digests(stacked)
    assert found() == expected
    for name, part in slices.items():
        held = workers[-1]._runner.get_model().get_parameter(part.name).data
        assert held.numel() * size == stacked[name].numel(), "each has a share"
        kept = held.clone()
        for lost in (torch.zeros_like(kept[:2]), kept[[1, 0]]):
            held[:2] = lost
            assert {other for other in expected if found()[other] != expected[other]} == {name}
            held.copy_(kept)


@pytest.mark.parametrize("kernels", ["FLASHINFER_CUTLASS", "XPU", "CPU"])
def test_experts_that_kernels_may_have_reordered_are_left_out(monkeypatch: pytest.MonkeyPatch, kernels: str):
    stacked = stacked_experts()
    held = mixture(monkeypatch, stacked, kernels)
    assert set(held_shapes(held).values()) == {(0,)}
    swapped = held._runner.get_model().get_parameter(f"{GATE_UP.removesuffix('gate_up_proj')}routed_experts.w13_weight")
    assert torch.equal(swapped, stacked[GATE_UP]) == (kernels == "CPU"), "which packs a copy"
