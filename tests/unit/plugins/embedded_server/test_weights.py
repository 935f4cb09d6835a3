"""Adapters by hooks against peft, and changes of weights that are whole or have not happened."""

from __future__ import annotations

import copy
import os
import socket
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lachesis.common.errors import ConfigError, EngineError, ModelError, StaleWeights
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.options import ServeOptions
from lachesis.engines.serving.backend import DigestRequest, DigestSlice, LoraSpec, ReceiverSpec, Refused
from lachesis.plugins.embedded_server.app import serve_embedded
from lachesis.plugins.embedded_server.weights import EmbeddedWeights
from lachesis.transport.digest import served_lora_b
from lachesis.transport.layout import ReceivedTensor
from tests.tiny import EOS_ID, PAD_ID, tiny_model
from tests.unit.transport.sharing import digest

CANARY = [5, 17, 60, 33, 8, 41]


def make(model, *, max_lora_rank: int = 8) -> tuple[EmbeddedEngine, EmbeddedWeights]:
    engine = EmbeddedEngine(
        model, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, max_batch_size=4, max_context=64, session_id="s"
    )
    return engine, EmbeddedWeights(engine, model, path="tiny", max_lora_rank=max_lora_rank)


@torch.no_grad()
def adapter(model, path: Path, *, targets: str = "all-linear", **options):
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(path)
    return adapted.eval()


@torch.no_grad()
def read(model) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([CANARY])).logits[0, :-1].float().log_softmax(-1)
    return logits.gather(-1, torch.tensor(CANARY[1:])[:, None]).squeeze(-1)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2", "bloom"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_an_adapter_computes_what_peft_computes(architecture, options, tmp_path):
    model = tiny_model(architecture)
    adapted = adapter(model, tmp_path, **options)
    engine, weights = make(model)
    names = set(weights.state_dict_info())
    weights.load_adapter(name="a", path=tmp_path)
    torch.testing.assert_close(torch.tensor(engine.canary(CANARY).logprobs), read(adapted), rtol=0, atol=1e-4)
    assert set(weights.state_dict_info()) == names == {name for name, _ in tiny_model(architecture).named_parameters()}
    weights.unload_adapter(name="a")
    torch.testing.assert_close(torch.tensor(engine.canary(CANARY).logprobs), read(tiny_model(architecture)))


def test_16_bit_adapters_are_held_as_they_are_digested(tmp_path):
    model = tiny_model("llama").bfloat16()
    adapted = adapter(tiny_model("llama"), tmp_path)
    _, weights = make(model)
    weights.load_adapter(name="a", path=tmp_path)
    found = weights.digests(DigestRequest(slices={}, adapter=True))
    module = adapted.base_model.model.model.layers[1].mlp.up_proj
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    assert found["model.layers.1.mlp.up_proj.lora_A.weight"] == digest(a.bfloat16())
    expected = served_lora_b(b, scaling=2.0, dtype=torch.bfloat16)
    assert found["model.layers.1.mlp.up_proj.lora_B.weight"] == digest(expected)


def full_spec(model, **changes) -> ReceiverSpec:
    named = dict(model.named_parameters()) | changes
    tensors = tuple(ReceivedTensor(n, tuple(t.shape), "float32") for n, t in named.items() if t is not None)
    return ReceiverSpec(init_method="tcp://a:1", world_size=2, backend="gloo", kind="full", tensors=tensors)


def test_new_weights_drop_the_adapter_and_are_copied_in_place(tmp_path):
    model, other = tiny_model("qwen2"), tiny_model("qwen2", seed=9)
    adapter(model, tmp_path)
    engine, weights = make(model)
    weights.load_adapter(name="a", path=tmp_path)
    before = model.model.norm.weight.data_ptr()
    weights.check_receivable(full_spec(other))
    weights.apply([(name, p.detach()) for name, p in other.named_parameters()], full_spec(other))
    assert weights.adapter is None and model.model.norm.weight.data_ptr() == before
    torch.testing.assert_close(torch.tensor(engine.canary(CANARY).logprobs), read(other), rtol=0, atol=1e-5)


def test_tied_embeddings_may_come_once_or_under_both_names():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    _, weights = make(model)
    assert "lm_head.weight" not in weights.state_dict_info()
    weights.check_receivable(full_spec(model))
    weights.check_receivable(full_spec(model, **{"lm_head.weight": model.lm_head.weight}))
    assert weights.digests(DigestRequest(slices={"x": DigestSlice("lm_head.weight")}))["x"] == digest(
        model.lm_head.weight
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "lacks 1 of the model's .*model.norm.weight"),
        ({"model.extra.weight": torch.zeros(3)}, "the model does not have, such as .model.extra.weight"),
        ({"model.norm.weight": torch.zeros(3)}, r"of shape \[3\]"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_before_it_comes(changes, message):
    _, weights = make(tiny_model("qwen2"))
    with pytest.raises(Refused, match=message) as caught:
        weights.check_receivable(full_spec(tiny_model("qwen2"), **changes))
    assert caught.value.status == 422


def test_an_update_that_breaks_off_while_it_is_loaded_leaves_two_versions():
    _, weights = make(tiny_model("qwen2"))
    other = tiny_model("qwen2")

    def half():
        yield from list(other.named_parameters())[:3]
        raise EngineError("the trainer has gone")

    with pytest.raises(StaleWeights, match="of two versions: the trainer has gone") as caught:
        weights.apply(half(), full_spec(other))
    assert caught.value.remedy == "restart the server"


def test_lora_over_a_channel_needs_both_matrices_of_the_rank():
    _, weights = make(tiny_model("qwen2"))
    names = [f"model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    lora = LoraSpec(2, 4.0, ("q_proj",))

    def spec(*shapes: tuple[int, ...]) -> ReceiverSpec:
        tensors = tuple(ReceivedTensor(n, shape, "float32") for n, shape in zip(names, shapes, strict=False))
        return ReceiverSpec(
            init_method="tcp://a:1", world_size=2, backend="gloo", kind="lora", tensors=tensors, lora=lora
        )

    weights.check_receivable(spec((2, 32), (32, 2)))
    for wrong in (((2, 32),), ((3, 32), (32, 3)), ((2, 31), (32, 2)), ((2, 32), (31, 2))):
        with pytest.raises(Refused) as caught:
            weights.check_receivable(spec(*wrong))
        assert caught.value.status == 422


def test_a_server_without_lora_takes_no_adapter(tmp_path):
    model = tiny_model("qwen2")
    adapter(model, tmp_path)
    _, weights = make(model, max_lora_rank=0)
    with pytest.raises(Refused, match="without LoRA") as caught:
        weights.load_adapter(name="a", path=tmp_path)
    assert caught.value.status == 409 and "--enable-lora" in caught.value.remedy
    weights.apply([(n, p.detach()) for n, p in model.named_parameters()], full_spec(model))


@pytest.mark.parametrize("part", [DigestSlice("nothing"), DigestSlice("model.norm.weight", 30, 3)])
def test_digests_of_what_is_not_there_are_refused(part):
    _, weights = make(tiny_model("qwen2"))
    with pytest.raises(Refused):
        weights.digests(DigestRequest(slices={"x": part}))


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_model_len", 0), ("max_num_seqs", 0), ("dtype", "int8"), ("adapter_roots", (Path(__file__),))],
)
def test_options_that_cannot_be_used_are_named(option, value):
    with pytest.raises(ConfigError, match="--" + option.removesuffix("s").replace("_", "-")) as caught:
        serve_embedded(ServeOptions(model="tiny", port=0, **{option: value}))
    assert caught.value.remedy


def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve_embedded(ServeOptions(model="/nonexistent", port=port))


def test_a_model_that_cannot_be_loaded_leaves_no_session(tmp_path, monkeypatch):
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "sessions"))
    with pytest.raises(ModelError, match="no causal language model could be loaded") as caught:
        serve_embedded(ServeOptions(model=str(tmp_path), port=0))
    assert caught.value.remedy and not os.path.exists(tmp_path / "sessions")
