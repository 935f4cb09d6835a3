"""The pass on a short model while the engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from lachesis.config.schema import LachesisConfig
from lachesis.run.parts import build_policy
from lachesis.run.warm_up import EarlyPolicy, needs_no_engine, pass_once, short_policy, shorten, warm_up
from tests.tiny import tiny_model, tiny_tokenizer

ADAPTERS = [{"kind": "none"}, {"kind": "lora", "r": 4}]


def configured(path: Path, architecture: str = "qwen2", **sections: object) -> LachesisConfig:
    tiny_model(architecture).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return LachesisConfig.model_validate({"run": {"steps": 1}, "model": {"path": str(path)}, **sections})


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter["kind"])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])  # gpt2 has no position beyond its context
def test_what_the_first_step_does_is_done(tmp_path: Path, architecture: str, adapter: dict[str, object]):
    config = configured(tmp_path, architecture, adapter=adapter)
    policy = short_policy(config, device=torch.device("cpu"))
    pass_once(policy, config)
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    assert trained
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained)


def test_a_model_is_cut_to_one_layer_of_each_kind():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=14, vocab_size=100_000)
    kinds = list(config.layer_types)
    shorten(config)
    assert set(config.layer_types) == set(kinds)
    assert config.num_hidden_layers == len(config.layer_types) == kinds.index("full_attention") + 1
    assert config.vocab_size == 100_000


def test_two_layers_of_a_kind_remain():
    config = AutoConfig.for_model("qwen2", num_hidden_layers=28, vocab_size=60)
    shorten(config)
    assert config.num_hidden_layers == 2


def test_nothing_is_done_on_a_cpu(tmp_path: Path):
    config = configured(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    before = torch.random.get_rng_state()
    (tmp_path / "config.json").unlink()  # which would be an error to whoever builds a model
    warm_up(config)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_policy_that_needs_no_engine_is_built_before_that_is_up(tmp_path: Path):
    config = configured(tmp_path, engine={"kind": "vllm"}, bridge={"kind": "broadcast"})
    early = EarlyPolicy(config, build_policy)
    early.begin()
    assert early.built is not None
    assert early.finish(weights=None) is early.built


def test_one_of_several_ranks_is_built_with_the_others(tmp_path: Path):
    config = configured(tmp_path, engine={"kind": "vllm"}, bridge={"kind": "broadcast"})
    early = EarlyPolicy(config, build_policy, alone=False)
    early.begin()
    assert early.built is None
    assert early.finish(weights=None).transformer is not None


@pytest.mark.parametrize(
    ("sections", "early"),
    [
        ({"bridge": {"kind": "broadcast"}}, True),
        ({"bridge": {"kind": "shared_vllm"}}, False),
        ({"adapter": {"kind": "lora"}, "bridge": {"kind": "lora_only"}}, True),
        ({"adapter": {"kind": "lora"}, "bridge": {"kind": "lora_only", "share_base": True}}, False),
    ],
    ids=["copied", "shared", "adapter", "shared base"],
)
def test_on_the_engines_tensors_it_is_built_once_they_are_there(sections: dict[str, object], early: bool):
    engine = {"kind": "vllm"}
    model = {"path": "model", "device": "cpu"}
    config = LachesisConfig.model_validate({"run": {"steps": 1}, "model": model, "engine": engine, **sections})
    assert needs_no_engine(config) == early


@pytest.mark.parametrize(
    ("keys", "early"),
    [
        ({}, False),
        ({"devices": "1"}, True),
        ({"extra_args": ["--kv-cache-memory-bytes", "1000000000"]}, False),
    ],
    ids=["its memory is measured", "on another GPU", "its cache is said: what is free is looked at all the same"],
)
def test_beside_an_engine_on_the_trainers_gpu_it_is_built_once_that_is_up(
    keys: dict[str, object], early: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lachesis.run.warm_up.resolve_device", lambda _: torch.device("cuda"))
    sections = {"run": {"steps": 1}, "model": {"path": "model"}, "bridge": {"kind": "broadcast"}}
    config = LachesisConfig.model_validate({**sections, "engine": {"kind": "vllm", **keys}})
    assert needs_no_engine(config) == early
