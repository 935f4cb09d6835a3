from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic_core import from_json, to_json
from torch import nn

from lachesis.common.errors import DeadlineExceeded, EngineError, StaleWeights
from lachesis.engines.serving.backend import DigestRequest, DigestSlice, LoraSpec, ReceiverSpec, Refused
from lachesis.engines.vllm.cuts import named_parameters
from lachesis.engines.vllm.worker import (
    WorkerWeights,
    answer,
    read_answer,
    repack_tied,
)
from lachesis.transport.float8 import by_rows
from lachesis.transport.layout import ReceivedTensor
from tests.unit.transport.sharing import digest


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Module()
        self.proj.base_layer = nn.Linear(3, 4, bias=False)
        self.norm = nn.Parameter(torch.arange(5.0))
        self.tied = self.norm
        self.repacked = nn.Parameter(torch.empty(0))


def weights(device: str = "cpu", size: int = 1) -> WorkerWeights:
    """Those of one of ``size`` workers."""
    config = SimpleNamespace(lora_config=None, parallel_config=SimpleNamespace(tensor_parallel_size=size))
    runner = SimpleNamespace(get_model=Model)
    return WorkerWeights(SimpleNamespace(model_runner=runner, vllm_config=config, device=device, rank=0))


def test_names_are_those_without_lora_and_ties_count_once():
    model = Model()
    assert set(named_parameters(model)) == {"proj.weight", "norm", "repacked"}
    assert weights().state_dict_info()["proj.weight"] == {"shape": [4, 3], "dtype": "float32", "device": "cpu"}


def test_matrices_of_8_bits_are_shown_by_outputs_and_not_shared():
    held = weights("cuda")
    model = Model()
    rounded, scales = by_rows(torch.randn(4, 3).bfloat16())
    model.proj.base_layer.weight = nn.Parameter(rounded.t(), requires_grad=False)
    model.proj.base_layer.weight_scale = nn.Parameter(scales, requires_grad=False)
    held._runner.get_model = lambda: model
    info = held.state_dict_info()
    assert (info["proj.weight"]["shape"], info["proj.weight"]["dtype"]) == ([4, 3], "float8_e4m3fn")
    asked = {"w": DigestSlice("proj.weight", 1, 2), "s": DigestSlice("proj.weight_scale", 1, 2)}
    assert held.digests({"slices": asked}) == {"w": digest(rounded[1:3]), "s": digest(scales[1:3])}
    with pytest.raises(Refused, match="quantized to 8 bits"):
        held.export()


def test_digests_are_of_rows():
    held = weights()
    model = Model()
    held._runner.get_model = lambda: model
    weight = model.proj.base_layer.weight.detach()
    asked = {"a": DigestSlice("proj.weight", 1, 2), "b": DigestSlice("proj.weight", 1), "c": DigestSlice("norm", 0, 5)}
    assert held.digests({"slices": asked}) == {
        "a": digest(weight[1:3]), "b": digest(weight[1:]), "c": digest(torch.arange(5.0)),
    }  # fmt: skip


def test_all_digests_leave_out_what_vllm_emptied():
    assert set(weights().digests({})) == {"proj.weight", "norm"}


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (DigestSlice("nothing"), 404),
        (DigestSlice("norm", 4, 2), 422),
        (DigestSlice("norm", 6), 422),
        (DigestSlice("repacked"), 409),
    ],
)
def test_what_cannot_be_digested_is_refused(part, status):
    with pytest.raises(Refused) as caught:
        weights().digests({"slices": {"x": part}})
    assert caught.value.status == status and caught.value.remedy


@pytest.mark.parametrize(("device", "size", "reason"), [("cpu", 1, "repacks"), ("cuda", 2, "only that GPU's part")])
def test_sharing_that_cannot_be_is_refused_with_the_reason(device, size, reason):
    with pytest.raises(Refused, match=reason) as caught:
        weights(device, size).export()
    assert caught.value.status == 409 and caught.value.remedy


class FakeReceiver:
    """Gives one tensor, and is told how loading it went."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(lora=None)
        self.status = SimpleNamespace(state="connected", detail="", updates=0)
        self.failed: Exception | None = None
        self.given = torch.ones(3)

    def take(self, wait_s: float):
        return iter([("w", self.given)])

    @contextmanager
    def loading(self):
        try:
            yield
        except Exception as error:
            self.failed = error
            raise


def loaded_by_vllm(monkeypatch: pytest.MonkeyPatch, *, puts: str = "as they are"):
    """A worker whose parameter is loaded by ``reload_weights``; how often that was, and a receiver of more updates."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(3))
    held, calls = weights(), list[str]()
    held._runner.get_model = lambda: model

    def reload(weights_iterator) -> None:
        calls.append(puts)
        for _, tensor in weights_iterator:
            model.w.data.copy_(tensor if puts == "as they are" else tensor.flip(0))

    held._worker.reload_weights = reload
    receiver = FakeReceiver()
    held._receiver = receiver  # type: ignore[assignment]
    return held, model, calls, receiver


@pytest.mark.parametrize(
    ("puts", "by_vllm"),
    [("as they are", 1), ("in another order", 3)],
)
def test_updates_are_copied_once_vllms_loader_has_shown_where(puts, by_vllm, monkeypatch):
    held, model, calls, receiver = loaded_by_vllm(monkeypatch, puts=puts)
    for update in range(3):
        receiver.given = torch.arange(3.0) + update
        answer = held.receive(0.0, load=True)
        assert answer["loaded"] and answer["copied"] == update * (by_vllm == 1)
        expected = receiver.given if puts == "as they are" else receiver.given.flip(0)
        assert torch.equal(model.w.data, expected)
    assert len(calls) == by_vllm


def test_a_copy_that_fails_leaves_stale_weights(monkeypatch):
    held, _, _, receiver = loaded_by_vllm(monkeypatch)
    held.receive(0.0, load=True)
    receiver.given = torch.ones(2)
    with pytest.raises(StaleWeights, match="restart"):
        held.receive(0.0, load=True)
    assert isinstance(receiver.failed, StaleWeights)


def test_an_update_that_breaks_off_while_it_is_loaded_leaves_stale_weights():
    def reload(weights_iterator) -> None:
        raise RuntimeError("half of it")

    held, receiver = weights(), FakeReceiver()
    held._worker.reload_weights, held._receiver = reload, receiver  # type: ignore[assignment]
    with pytest.raises(StaleWeights, match="half of it"):
        held.receive(0.0, load=True)
    assert isinstance(receiver.failed, StaleWeights), "the trainer has heard of it by then"


class Packer:
    def __init__(self) -> None:
        self.packed: list[nn.Module] = []

    def process_weights_after_loading(self, module: nn.Module) -> None:
        self.packed.append(module)


def test_only_what_shares_anothers_weight_is_packed_again():
    model, packer = nn.Module(), Packer()
    model.embed, model.norm, model.head, model.other = (
        nn.Embedding(4, 3),
        nn.LayerNorm(3),
        nn.Linear(3, 4),
        nn.Linear(3, 4),
    )
    model.head.weight = model.embed.weight
    for module in (model.embed, model.head, model.other):
        module.quant_method = packer
    repack_tied(model)
    assert packer.packed == [model.head]


def raising(error: Exception):
    def call():
        raise error

    return call


def test_a_result_comes_back():
    assert read_answer(answer(lambda: {"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    "error", [StaleWeights("half", remedy="restart"), DeadlineExceeded("late"), EngineError("dead", remedy="look")]
)
def test_an_error_comes_back_as_what_it_was(error):
    with pytest.raises(type(error)) as caught:
        read_answer(answer(raising(error)))
    assert (caught.value.message, caught.value.remedy) == (error.message, error.remedy)
    assert type(caught.value) is type(error)


def test_a_refusal_keeps_its_status():
    with pytest.raises(Refused, match="no") as caught:
        read_answer(answer(raising(Refused("no", status=422, remedy="do"))))
    assert (caught.value.status, caught.value.remedy) == (422, "do")


def test_any_other_error_is_ours_and_named():
    with pytest.raises(EngineError, match="KeyError"):
        read_answer(answer(raising(KeyError("x"))))


@pytest.mark.parametrize("lora", [None, LoraSpec(r=2, alpha=4.0, target_modules=("q", "v"), rslora=True, name="n")])
def test_a_spec_survives_json(lora):
    spec = ReceiverSpec(
        init_method="tcp://h:1",
        world_size=3,
        backend="gloo",
        kind="full" if lora is None else "lora",
        tensors=(ReceivedTensor("a", (2, 3), "float32"), ReceivedTensor("b", (), "bfloat16")),
        lora=lora,
        param_mappings={"a": "b"},
    )
    assert ReceiverSpec.model_validate(from_json(to_json(spec))) == spec


@pytest.mark.parametrize("slices", [None, {}, {"x": DigestSlice("y", 2, 3), "z": DigestSlice("z")}])
def test_slices_survive_json(slices):
    request = DigestRequest(slices=slices)
    assert DigestRequest.model_validate(from_json(to_json(request))) == request


def runner() -> SimpleNamespace:
    """With a sampler of a module that compiles what counts the ranks of tokens when it is first called."""
    module = ModuleType("sampler_of_a_test")

    def compiled(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it would be compiled now")

    compiled._torchdynamo_orig_callable = lambda x, values: (x >= values).sum(-1)  # as torch.compile keeps it
    vars(module)["batched_count_greater_than"] = compiled
    sys.modules[module.__name__] = module
    return SimpleNamespace(sampler=type("Sampler", (), {"__module__": module.__name__})())


def install_on_cpu(made: SimpleNamespace) -> None:
    config = SimpleNamespace(lora_config=None)
    calls = dict.fromkeys(("execute_model", "sample_tokens"), print)
    WorkerWeights(SimpleNamespace(model_runner=made, vllm_config=config, device="cpu", rank=0, **calls)).install(0)


def test_on_a_cpu_the_system_is_asked_for_what_attention_uses(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    install_on_cpu(runner())
    assert asked == [True]


def test_on_a_cpu_no_compiler_stands_before_the_first_token():
    made = runner()
    install_on_cpu(made)
    logprobs = torch.tensor([[-1.0, -3.0, -2.0]])
    ranks = sys.modules[type(made.sampler).__module__].batched_count_greater_than(logprobs, torch.tensor([[-2.0]]))
    assert ranks.tolist() == [2]
