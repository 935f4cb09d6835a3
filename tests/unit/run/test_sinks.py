"""Settings of parts that follow from several sections."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lachesis.config.presets import PRESETS, apply_preset
from lachesis.config.schema import LachesisConfig
from lachesis.metrics.health.types import HealthLimits
from lachesis.run.sinks import health_limits, template_marks


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_trainer_that_alone_is_quantized_may_differ_more_before_a_run_says_so(kind: str):
    def limits(engine: str, quantization: str) -> HealthLimits:
        sections = {
            "run": {"steps": 1},
            "model": {"path": "a", "quantization": quantization},
            "adapter": {"kind": "lora"},
            "data": {"path": "a"},
            "rewards": {"functions": ["a.b"]},
            "engine": {"kind": engine},
        }
        return health_limits(LachesisConfig.model_validate(sections))

    assert limits("embedded", kind) == limits("vllm", "none") == HealthLimits()
    wider = limits("vllm", kind)
    assert (wider.logprob_diff > HealthLimits().logprob_diff) == (kind == "nf4")


@pytest.mark.parametrize("keys", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_an_engine_that_alone_computes_in_8_bits_may_differ_more_before_a_run_says_so(keys: dict[str, str]):
    sections = {"run": {"steps": 1}, "model": {"path": "a"}, "engine": {"kind": "vllm"} | keys}
    limits = health_limits(LachesisConfig.model_validate(sections))
    assert HealthLimits().logprob_diff < limits.logprob_diff < 1.0
    both = sections | {"model": {"path": "a", "matmul_dtype": "float8"}}
    assert health_limits(LachesisConfig.model_validate(both)) == limits, "the trainer's products are not the canary's"


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_float8_products_are_off_in_the_canary_and_on_in_the_logprobs_of_the_loss(engine: str):
    sections = {
        "run": {"steps": 1},
        "model": {"path": "a", "matmul_dtype": "float8"},
        "data": {"path": "a"},
        "rewards": {"functions": ["a.b"]},
        "engine": {"kind": engine},
    }
    limits = health_limits(LachesisConfig.model_validate(sections))
    assert limits.logprob_diff > HealthLimits().logprob_diff


@pytest.mark.parametrize(
    ("algorithm", "pipeline", "limit"),
    [
        ({}, {}, 4),
        ({"num_iterations": 7}, {}, 6),
        ({}, {"async_prefetch": True, "max_staleness": 9}, 9),
        ({}, {"async_prefetch": True, "max_staleness": None}, 4),
        ({}, {"max_staleness": 9}, 4),
    ],
)
def test_samples_as_old_as_the_configuration_wants_them_are_nothing_to_warn_of(algorithm, pipeline, limit: int):
    sections = {
        "run": {"steps": 1},
        "model": {"path": "a"},
        "data": {"path": "a"},
        "rewards": {"functions": ["a.b"]},
        "algorithm": algorithm,
        "pipeline": pipeline,
    }
    assert health_limits(LachesisConfig.model_validate(sections)).staleness == limit


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_rules_judge_an_algorithm_by_what_is_usual_for_it(preset: str | None):
    data: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": "a"},
        "data": {"path": "a"},
        "rewards": {"functions": ["a.b"]},
        "algorithm": {"preset": preset},
    }
    apply_preset(data)
    limits, usual = health_limits(LachesisConfig.model_validate(data)), HealthLimits()
    assert limits.clipped_fraction == (None if preset in ("gspo", "rloo") else usual.clipped_fraction)
    assert limits.ratio_of_tokens == (preset != "rloo")
    assert limits.clips == (preset not in ("cispo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "gpg"))
    assert limits.group_baseline == (preset != "reinforce_plus_plus")
    assert limits.unscaled == (preset in ("dr_grpo", "rloo", "opo", "gpg"))


@pytest.mark.parametrize(("template", "known"), [("[INST] {{ x }} [/INST]", {"[INST]", "[/INST]"}), (None, None)])
def test_the_marks_of_turns_are_those_of_the_template_that_the_model_came_with(
    template: str | None, known: set[str] | None
):
    """A template that the configuration puts in its place makes no mark one of the model's."""
    backend = Tokenizer(WordLevel({"<|end|>": 0, "a": 1}, unk_token="a"))
    options = {} if template is None else {"chat_template": template}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **options)
    tokenizer.chat_template = "<|im_start|>{{ x }}"
    assert template_marks(tokenizer) == (None if known is None else known | {"<|end|>"})
