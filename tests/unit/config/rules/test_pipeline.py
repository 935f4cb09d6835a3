"""What is said of keys that do something else, or nothing, where environments push the groups."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_argv
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig


def build(**sections: Any) -> LachesisConfig:
    return LachesisConfig.model_validate(
        {
            "run": {"steps": 10},
            "model": {"path": "org/model"},
            "source": {"kind": "atropos", "batch_size": 64},
            "engine": {"kind": "embedded_server"},
            "bridge": {"kind": "shared_vllm"},
            **sections,
        }
    )


def held_out(**sections: Any) -> LachesisConfig:
    return build(
        **{"data": {"eval_path": "held_out.jsonl"}, "rewards": {"functions": ["rewards.exact"]}, **sections},
    )


@pytest.mark.parametrize(
    "config",
    [
        build(),
        build(engine={"kind": "vllm", "max_model_len": 2048}),
        build(algorithm={"loss_type": "dr_grpo"}, sampling={"max_completion_length": 512}),
        build(source={"kind": "atropos"}, sampling={"num_generations": 4}, batch={"prompts_per_step": 8}),
        held_out(),
        held_out(evaluation={"every_steps": 5}),
        held_out(data={"path": "all.jsonl", "eval_size": 20}),
        held_out(sampling={"max_completion_length": 64, "top_p": 0.9}),
        load_argv(["--model-name", "m"]).config,
        load_argv(["--model-name", "m", "--weight-bridge-mode", "lora_nccl", "--lora-dropout", "0"]).config,
    ],
)
def test_what_is_fine_is_not_mentioned(config: LachesisConfig):
    assert check(config) == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            build(engine={"kind": "embedded"}, bridge={"kind": "in_process"}),
            "engine.kind embedded runs in the trainer's process and has no address; set engine.kind: embedded_server",
        ),
        (
            held_out(data={"eval_size": 5}),
            "data.eval_split and data.eval_size need data.path, which is missing; set data.eval_path",
        ),
        (
            held_out(data={"eval_split": "test"}),
            "data.eval_split and data.eval_size need data.path, which is missing; set data.eval_path",
        ),
        (held_out(rewards={}), "held-out problems are scored by rewards.functions, which is not set"),
        (build(evaluation={"every_steps": 5}), "evaluation.every_steps is 5 but there are no held-out problems"),
    ],
)
def test_what_cannot_work_is_refused(config: LachesisConfig, expected: str):
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("config", "level", "expected"),
    [
        (build(pipeline={"refill_zero_signal": 2}), "warning", "environments cannot be asked for other groups"),
        (build(batch={"prompts_per_step": 8}), "note", "batch.prompts_per_step does nothing: source.batch_size sets"),
        (
            build(batch={"prompts_per_step": 8}, sampling={"num_generations": 4}),
            "note",
            "batch.prompts_per_step and sampling.num_generations do nothing",
        ),
        (build(sampling={"temperature": 0.7, "top_p": 0.9}), "note", "sampling.temperature, sampling.top_p: with"),
        (build(sampling={"max_completion_length": 64}), "note", "the environments choose their sampling"),
        (held_out(sampling={"temperature": 0.7}), "note", "sampling.temperature: with source.kind atropos"),
        (
            held_out(data={"path": "train.jsonl", "eval_path": "test.jsonl"}),
            "note",
            "the environments have their own problems",
        ),
        (
            build(engine={"kind": "embedded_server", "max_model_len": 1024}),
            "warning",
            "engine.max_model_len 1024 is less than source.max_sequence_length 2048",
        ),
        (
            build(batch={"max_tokens_per_microbatch": 1024}),
            "note",
            "less than the longest possible sequence (2048 tokens)",
        ),
        (build(engine={"kind": "vllm", "devices": "1"}), "note", "engine.devices 1 must name the trainer's"),
    ],
)
def test_what_is_odd_is_said(config: LachesisConfig, level: str, expected: str):
    (finding,) = check(config)
    assert finding.level == level
    assert expected in finding.message


def test_prefetching_is_what_environments_do_anyway():
    findings = check(build(pipeline={"async_prefetch": True}, algorithm={"sampler_correction": "token_truncate"}))
    assert [finding.level for finding in findings if finding.rule == "rollout_api"] == ["note"]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"path": "m", "train_layers": [3]}, "adapter": {"kind": "lora"}}, "set adapter.layers instead"),
        (
            {"adapter": {"kind": "lora", "layers": [3], "targets": ".*_proj"}},
            "adapter.targets is the expression '.*_proj'; write [.*_proj], or all-linear",
        ),
    ],
)
def test_layers_that_cannot_be_meant(sections: dict[str, Any], expected: str):
    with pytest.raises(ConfigError) as caught:
        check(build(bridge={"kind": "broadcast"}, **sections))
    assert expected in caught.value.message


def test_layers_go_with_what_they_are_of():
    assert check(build(model={"path": "m", "train_layers": [3, 4]})) == []
    adapter = {"kind": "lora", "layers": [3], "targets": ["q_proj"]}
    assert check(build(bridge={"kind": "lora_only"}, adapter=adapter)) == []


def test_scaling_by_parameter_is_adafactors():
    (finding,) = check(build(optimizer={"scale_parameter": True}))
    assert finding.message == "optimizer.scale_parameter does nothing with optimizer.kind adamw"
    assert check(build(optimizer={"scale_parameter": True, "kind": "adafactor"})) == []
