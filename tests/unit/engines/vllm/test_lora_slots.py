from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lachesis.common.errors import EngineError
from lachesis.engines.serving.backend import LoraSpec, Refused
from lachesis.engines.vllm.lora_slots import ADAPTER_ID, LoraSlots, release_output_heads

IN, OUT, RANK = 6, 4, 3
SPEC = LoraSpec(r=2, alpha=4.0, target_modules=("q_proj", "o_proj"), name="tuned")


class FakeModule:
    """One layer's slots, of ``parts`` outputs side by side."""

    def __init__(self, parts: int = 1) -> None:
        self.lora_a_stacked = tuple(torch.zeros(1, 1, RANK, IN) for _ in range(parts))
        self.lora_b_stacked = tuple(torch.zeros(1, 1, OUT, RANK) for _ in range(parts))


class FakeManager:
    """vLLM's model manager: registers adapters by number, and copies the active one into the slots."""

    def __init__(self) -> None:
        self.modules = {"layer.qkv_proj": FakeModule(3), "layer.o_proj": FakeModule()}
        self.packed_modules = {"layer.qkv_proj": ["layer.q_proj", "layer.k_proj", "layer.v_proj"]}
        self.registered: dict[int, Any] = {}
        self.lora_index_to_id: list[int | None] = [None]
        self.fails_on: Any = None

    def get_dummy_lora_warmup_rank(self, rank: int) -> int:
        return rank

    def create_dummy_lora(self, number: int, rank: int, embeddings: Any) -> Any:
        return SimpleNamespace(id=number, tensors={}, scaling=1.0)

    def get_adapter(self, number: int) -> Any:
        return self.registered.get(number)

    def remove_adapter(self, number: int) -> None:
        self.deactivate_adapter(number)
        self.registered.pop(number, None)

    def add_adapter(self, adapter: Any) -> None:
        self.registered[adapter.id] = adapter

    def deactivate_adapter(self, number: int) -> None:
        self.lora_index_to_id = [None if held == number else held for held in self.lora_index_to_id]

    def activate_adapter(self, number: int) -> None:
        adapter = self.registered[number]
        if self.fails_on is not None and self.fails_on in adapter.tensors:
            raise RuntimeError("out of memory")
        self.lora_index_to_id[0] = number
        for name, module in self.modules.items():
            for slots in (*module.lora_a_stacked, *module.lora_b_stacked):
                slots.zero_()
            for i, part in enumerate(self.packed_modules.get(name, [name])):
                a = adapter.tensors.get(f"base_model.model.{part}.lora_A.weight")
                b = adapter.tensors.get(f"base_model.model.{part}.lora_B.weight")
                if a is not None:
                    module.lora_a_stacked[i][0, 0, : a.shape[0]] = a
                    module.lora_b_stacked[i][0, 0, :, : a.shape[0]] = b * adapter.scaling


class FakeModel:
    """Has one output head, whose logits processor was wrapped."""

    def __init__(self, manager: FakeManager) -> None:
        self.lora_manager = manager
        self.logits_processor = SimpleNamespace(base_layer="the plain one")
        manager.modules["lm_head"] = self.logits_processor

    def get_submodule(self, name: str) -> FakeModel:
        assert name == ""
        return self


class FakeLoraModel:
    @staticmethod
    def from_lora_tensors(*, lora_model_id: int, tensors: dict[str, torch.Tensor], peft_helper: Any, **_: Any) -> Any:
        return SimpleNamespace(id=lora_model_id, tensors=tensors, scaling=peft_helper["lora_alpha"] / peft_helper["r"])


def make(*, shards: int = 1) -> tuple[LoraSlots, FakeManager]:
    manager = FakeManager()
    slots = LoraSlots(
        worker_loras=SimpleNamespace(
            lora_config=SimpleNamespace(max_lora_rank=RANK, lora_dtype=torch.float32),
            embedding_modules={},
            vocab_size=9,
        ),
        model=FakeModel(manager),
        device=torch.device("cpu"),
        tensor_parallel_size=shards,
        lora_model=FakeLoraModel,
        peft_helper=SimpleNamespace(from_dict=dict),
        name_mapper=None,
    )
    slots.clear()
    return slots, manager


def adapter(*modules: str, seed: int = 0, r: int = 2, in_: int = IN, out: int = OUT) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.layer.{module}.lora_{part}.weight": torch.randn(shape, generator=generator)
        for module in modules
        for part, shape in (("A", (r, in_)), ("B", (out, r)))
    }


def test_the_number_that_requests_carry_is_always_registered():
    slots, manager = make()
    assert ADAPTER_ID in manager.registered and slots.spec is None
    slots.load(adapter("q_proj"), SPEC)
    assert ADAPTER_ID in manager.registered and manager.lora_index_to_id == [ADAPTER_ID]
    slots.clear()
    assert ADAPTER_ID in manager.registered and slots.spec is None
    assert not any(part.any() for module in manager.modules.values() for part in module.lora_a_stacked)


def test_the_tensors_in_the_slots_are_read_back_under_pefts_names():
    slots, _ = make()
    tensors = adapter("q_proj", "v_proj", "o_proj")
    slots.load(tensors, SPEC)
    held = slots.tensors()
    assert set(held) == {name.removeprefix("base_model.model.") for name in tensors}
    for name, tensor in tensors.items():
        expected = tensor * 2.0 if "lora_B" in name else tensor
        assert held[name.removeprefix("base_model.model.")].equal(expected)


def test_names_may_come_without_the_prefix_of_peft():
    slots, _ = make()
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in adapter("o_proj").items()}
    slots.load(tensors, SPEC)
    assert set(slots.tensors()) == set(tensors)


def test_an_old_adapter_that_stayed_in_the_slots_is_seen():
    slots, manager = make()
    slots.load(adapter("o_proj"), SPEC)
    manager.modules["layer.o_proj"].lora_b_stacked[0][0, 0, 1, 1] += 1
    assert not slots.tensors()["layer.o_proj.lora_B.weight"].equal(2 * adapter("o_proj").popitem()[1])


@pytest.mark.parametrize(
    ("tensors", "spec", "problem"),
    [
        (adapter("z_proj"), SPEC, "'layer.z_proj', which this server's model lacks"),
        (adapter("q_proj", in_=IN + 1), SPEC, r"\[2, 7\].*maps 6 to 4 features"),
        (adapter("q_proj", out=OUT - 1), SPEC, r"\[3, 2\].*maps 6 to 4 features"),
        (adapter("q_proj", r=1), SPEC, "not .2, in. and .out, 2."),
        (dict([adapter("q_proj").popitem()]), SPEC, "A and B|not .2, in."),
        ({"layer.q_proj.weight": torch.zeros(1)}, SPEC, "'layer.q_proj.weight' is not a LoRA matrix A or B"),
    ],
    ids=["unknown", "in", "out", "rank", "half", "other"],
)
def test_what_does_not_fit_is_refused_and_the_old_one_stays(tensors, spec, problem):
    slots, _ = make()
    slots.load(adapter("o_proj", seed=1), SPEC)
    before = {name: tensor.clone() for name, tensor in slots.tensors().items()}
    with pytest.raises(Refused, match=problem) as caught:
        slots.load(tensors, spec)
    assert caught.value.status == 422 and caught.value.remedy
    after = slots.tensors()
    assert slots.spec == SPEC and all(after[name].equal(tensor) for name, tensor in before.items())


def test_when_vllm_fails_the_old_one_is_put_back():
    slots, manager = make()
    slots.load(adapter("o_proj", seed=1), SPEC)
    before = {name: tensor.clone() for name, tensor in slots.tensors().items()}
    manager.fails_on = "base_model.model.layer.q_proj.lora_A.weight"
    with pytest.raises(EngineError, match="out of memory"):
        slots.load(adapter("q_proj"), SPEC)
    assert all(slots.tensors()[name].equal(tensor) for name, tensor in before.items())


def test_slots_whose_memory_was_dropped_are_written_again():
    slots, manager = make()
    slots.load(adapter("o_proj"), SPEC)
    before = {name: tensor.clone() for name, tensor in slots.tensors().items()}
    manager.modules["layer.o_proj"].lora_a_stacked[0].fill_(7.0)
    slots.refresh()
    assert all(slots.tensors()[name].equal(tensor) for name, tensor in before.items())


def test_there_is_no_digest_of_no_adapter_or_of_a_part():
    with pytest.raises(Refused, match="no adapter"):
        make()[0].tensors()
    slots, _ = make(shards=2)
    slots.load(adapter("o_proj"), SPEC)
    with pytest.raises(Refused, match="canary") as caught:
        slots.tensors()
    assert caught.value.status == 409


def test_tensor_parallel_slots_take_whole_tensors():
    slots, _ = make(shards=2)
    whole = {name: tuple(tensor.shape) for name, tensor in adapter("o_proj", in_=2 * IN, out=2 * OUT).items()}
    slots.check(whole, SPEC)
    with pytest.raises(Refused):
        slots.check({name: (shape[0], 5) if "_A" in name else shape for name, shape in whole.items()}, SPEC)


def test_output_heads_have_no_slots():
    manager = FakeManager()
    model = FakeModel(manager)
    wrapped = model.logits_processor
    assert release_output_heads(model) == [wrapped]
    assert model.logits_processor == "the plain one" and "lm_head" not in manager.modules
    with pytest.raises(Refused, match="'lm_head'"):
        make()[0].check({f"lm_head.lora_{part}.weight": shape for part, shape in (("A", (2, 6)), ("B", (4, 2)))}, SPEC)
