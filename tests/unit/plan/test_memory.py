"""Bytes that plan counts, held against what torch keeps; measured steps of GPUs are in benchmarks/memory*.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from lachesis.engines import receiver
from lachesis.plan import cards, memory
from lachesis.plan.memory import layer_activations, memory_parts
from lachesis.plan.plan import plan
from lachesis.plan.shapes import read_shape
from lachesis.plugins.planning.plan_text import card_lines, plan_lines
from lachesis.train.model import head
from lachesis.train.optim import weight_update
from lachesis.transport import layout
from tests.paths import BENCHMARKS

TOKENS = 64
FIELDS: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 352,
    "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip


def test_sizes_are_those_of_the_rooms_that_they_are_about():
    assert head._CHUNK_ELEMENTS == memory.CHUNK_ELEMENTS
    assert head._KEPT_ELEMENTS == memory.KEPT_ELEMENTS
    assert weight_update.BUCKET_ELEMENTS == memory.BUCKET_ELEMENTS
    assert (layout.BUCKET_BYTES, layout.WINDOW) == (memory.TRANSFER_BYTES, memory.TRANSFER_WINDOW)
    assert receiver.ROOM == cards.ROOM_ASIDE


def plain_pass(model: Any) -> Any:
    """Of all tokens, as transformers runs it."""
    return model.model(input_ids=torch.arange(TOKENS)[None], use_cache=False)


def kept_bytes(
    directory: Path,
    *,
    model_type: str,
    layers: int,
    lora: bool,
    dtype: torch.dtype,
    prepare: Callable[[Any], None] = lambda model: None,
    run: Callable[[Any], Any] = plain_pass,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """What autograd keeps of the layers' forward pass, parameters left out."""
    shape = FIELDS | {"model_type": model_type, "num_hidden_layers": layers} | dict(fields)
    (directory / "config.json").write_text(json.dumps(shape))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
    model.train()
    if lora:
        get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"), autocast_adapter_dtype=False)
    prepare(model)
    own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    parameters = {p.untyped_storage().data_ptr() for p in own}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = run(model)
    assert held.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_layer_keeps_what_is_counted(tmp_path: Path, build, model_type: str, lora: bool, dtype: torch.dtype):
    """Uncompiled; the difference of four layers and two, so that what is around them does not count."""
    more, less = (
        kept_bytes(tmp_path, model_type=model_type, layers=layers, lora=lora, dtype=dtype) for layers in (4, 2)
    )
    shape = read_shape(str(tmp_path))
    assert shape is not None
    config = build(model={"compile": "off"}, adapter={"kind": "lora", "r": 4} if lora else {"kind": "none"})
    counted = layer_activations(config, shape, keys=1.0, width=dtype.itemsize, device="cpu")
    assert counted == pytest.approx((more - less) / 2 / TOKENS, rel=0.03)


def test_an_embedded_engine_and_its_trainer_are_one_process(build, tmp_path: Path):
    """The cache is there while it generates, the activations while it trains: not both."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "qwen2", "num_hidden_layers": 2}))
    config = build(model={"path": str(tmp_path)})
    planned = plan(config, device="cuda")
    use = cards.card_use(config, planned, card_gb=24)
    assert use.engine == 0 and use.fits
    apart = planned.peak("trainer") + planned.peak("engine")
    assert planned.peak("trainer", "engine") < apart


def test_a_sleeping_engine_holds_nothing_while_the_trainer_computes(build, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "qwen2", "num_hidden_layers": 2}))
    sections = {"model": {"path": str(tmp_path)}, "adapter": {"kind": "lora"}, "bridge": {"kind": "lora_only"}}
    awake, asleep = (build(engine={"kind": "vllm", "enable_sleep_mode": mode}, **sections) for mode in (False, True))
    uses = [cards.card_use(config, plan(config, device="cuda"), card_gb=24) for config in (awake, asleep)]
    assert uses[1].total < uses[0].total
    parts = memory_parts(
        asleep, plan(asleep).shape or pytest.fail("no shape"), lengths=plan(asleep).lengths, device="cuda"
    )
    assert all(part.phases == ("generation",) for part in parts if part.place == "engine")


def test_tensor_parallel_engines_hold_a_part_each(build, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "qwen2", "num_hidden_layers": 2}))
    sections = {"model": {"path": str(tmp_path)}, "bridge": {"kind": "broadcast"}}
    one, two = (
        plan(build(engine={"kind": "vllm", "tensor_parallel_size": size, "devices": "1,2"}, **sections), device="cuda")
        for size in (1, 2)
    )
    assert two.peak("engine") == one.peak("engine") // 2


def test_an_engine_on_the_gpus_of_two_ranks_is_counted_on_each(build, tmp_path: Path):
    """Its copies share out what is in flight, and what a rank packs for the worker beside it stays."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "qwen2", "num_hidden_layers": 2}))
    sections = {"bridge": {"kind": "broadcast"}, "model": {"path": str(tmp_path)}}
    sizes: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}]
    one, whole, copies = (
        plan(build(engine={"kind": "vllm", "enable_sleep_mode": True, **size}, **sections), device="cuda", devices=2)
        for size in sizes
    )
    named = [{part.name: part for part in planned.memory if part.place == "engine"} for planned in (one, whole, copies)]
    assert [held["KV cache"].bytes * 2 // named[0]["KV cache"].bytes for held in named] == [2, 1, 1]
    assert [held["weights"].bytes * 2 // named[0]["weights"].bytes for held in named] == [2, 1, 2]
    rings = [[part for part in planned.memory if part.name == "packed buckets"] for planned in (one, whole, copies)]
    assert [len(ring) for ring in rings] == [0, 1, 1], "with one GPU it is beside rank 0 alone, as it was"
    assert one.shape is not None and rings[1][0].bytes == one.shape.parameters * 2, "less than a whole ring"
    assert "packed buckets      517.7 kB  from one transfer to the next" in "\n".join(plan_lines(whole))


def test_an_engine_in_8_bits_holds_half_of_its_linear_layers_and_cache(build, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "qwen2", "num_hidden_layers": 2}))
    sections = {"model": {"path": str(tmp_path), "dtype": "bfloat16"}, "bridge": {"kind": "broadcast"}}
    small = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    wide, narrow = (
        {part.name: part.bytes for part in plan(build(engine={"kind": "vllm", **engine}, **sections)).memory
         if part.place == "engine"} for engine in ({}, small)
    )  # fmt: skip
    linear, rows = 2 * (2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 352), 2 * (96 + 32 + 32 + 96 + 352 + 352 + 96)
    assert wide["weights"] - narrow["weights"] == linear - 4 * rows
    assert narrow["KV cache"] == wide["KV cache"] // 2


def test_a_teacher_is_counted_with_what_it_says(build, tmp_path: Path):
    """1.2 GB for 1,024 tokens of a vocabulary of 151,936."""
    for name, layers in (("small", 2), ("large", 4)):
        (tmp_path / name).mkdir()
        fields = FIELDS | {"model_type": "qwen2", "num_hidden_layers": layers, "vocab_size": 151_936}
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    teacher = {"model": str(tmp_path / "large"), "top_k": None}

    def parts(**options: Any) -> dict[str, int]:
        sections = {"model": {"path": str(tmp_path / "small")}, "batch": {"max_tokens_per_microbatch": 1024}}
        planned = plan(build(algorithm={"teacher": teacher | options}, **sections), device="cuda")
        assert planned.lengths.microbatch == 1024
        assert any("teacher" in note for note in planned.notes) == ("model" in options)
        return {part.name: part.bytes for part in planned.memory}

    large = read_shape(str(tmp_path / "large"))
    assert large is not None and parts()["teacher"] == 2 * large.parameters
    assert parts()["teacher's logprobs"] == pytest.approx(1.2e9, rel=0.05)
    assert parts(top_k=64)["teacher's logprobs"] == 1024 * 64 * 24
    assert "teacher's logprobs" not in parts(estimate="sampled")
    assert "teacher" not in parts(model="org/other")
    assert parts(kind="url", url="http://a:1", top_k=20)["teacher's logprobs"] == 1024 * 20 * 24


def test_keys_of_a_shared_prompt_count_for_each_of_its_completions(build, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "qwen2", "num_hidden_layers": 2}))
    sections = {"data": {"max_prompt_length": 512}, "sampling": {"max_completion_length": 64, "num_generations": 16}}
    planned = plan(build(model={"path": str(tmp_path)}, **sections), device="cuda")
    assert planned.lengths.keys == pytest.approx((512 + 16 * 576) / (512 + 16 * 64))
    alone = plan(build(model={"path": str(tmp_path), "packing": "padded"}, **sections), device="cuda")
    assert alone.lengths.keys == 1.0 and alone.peak("trainer") < planned.peak("trainer")


def test_the_lines_of_the_cards(build, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "qwen2", "num_hidden_layers": 2}))
    config = build(model={"path": str(tmp_path)}, engine={"kind": "vllm"}, bridge={"kind": "shared_vllm"})
    lines = list(card_lines(config, plan(config, device="cuda")))
    assert lines[0] == "on one card" and [line.split()[0] for line in lines[1:]] == [str(size) for size in cards.CARDS]
    assert "fits" in lines[-1] and "engine 64.5 GB" in lines[-1]  # 0.45 of 141, and the graphs


MEASURED = {path.name: json.loads(path.read_text()) for path in sorted((BENCHMARKS / "raw").glob("memory*.json"))}
ROWS = [
    pytest.param(row, record["context_bytes"], id=f"{file}: {row['name']}")
    for file, record in MEASURED.items()
    for row in record["rows"]
]


@pytest.mark.parametrize(("row", "context_bytes"), ROWS)
def test_what_was_measured_on_a_gpu_is_planned(tmp_path: Path, build, row: dict[str, Any], context_bytes: int):
    """Tensors of a whole step, and the process with its context: each within a tenth of what was measured."""
    (tmp_path / "config.json").write_text(json.dumps(row["architecture"]))
    sections = row["sections"]
    config = build(**{**sections, "model": {**sections["model"], "path": str(tmp_path)}})
    planned = plan(config, device="cuda", devices=row["devices"])
    assert planned.peak("trainer") == pytest.approx(row["measured"]["peak"], rel=0.1)
    reserved = row["measured"]["reserved"]  # null where the benchmark, then, read it too late
    if reserved is not None:
        assert cards.process_bytes(planned, "trainer") == pytest.approx(reserved + context_bytes, rel=0.1)
