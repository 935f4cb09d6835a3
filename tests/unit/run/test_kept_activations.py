"""What ``model.activations: auto`` is: the first that fits the card."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.config.schema import LachesisConfig
from lachesis.plan.cards import decide_activations
from lachesis.plan.plan import plan
from lachesis.plugins.planning.plan_text import card_lines
from lachesis.run.parts import with_activations


def configured(**model: Any) -> LachesisConfig:
    """1.5B with sequences of 65,536 tokens; the engine has a card of its own."""
    return LachesisConfig.model_validate({
        "run": {"steps": 1}, "model": {"path": "Qwen/Qwen2.5-1.5B", "activations": "auto", **model},
        "data": {"path": "a.jsonl"}, "rewards": {"functions": ["r.f"]}, "adapter": {"kind": "lora"},
        "engine": {"kind": "vllm", "devices": "1"}, "bridge": {"kind": "broadcast"},
        "sampling": {"max_completion_length": 65_000}, "batch": {"max_tokens_per_microbatch": 65_536},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("card_gb", "decided"),
    [(200, "keep"), (80, "selective"), (28, "selective"), (24, "recompute"), (20, "offload"), (10, "offload")],
)
def test_the_first_that_fits_or_the_least(card_gb: float, decided: str):
    assert decide_activations(configured(), card_gb=card_gb).model.activations == decided


def test_what_is_said_stays_and_so_does_what_is_not_known():
    for config in (configured(activations="selective"), configured(activations="keep", gradient_checkpointing=True)):
        assert decide_activations(config, card_gb=10) is config
        assert with_activations(config, devices=1) is config
    assert decide_activations(configured(path="org/of-no-known-shape"), card_gb=10).model.activations == "keep"


def test_on_a_cpu_all_are_kept():
    assert with_activations(configured(device="cpu"), devices=1).model.activations == "keep"


def test_plan_says_what_it_would_be_on_each_card():
    config = configured()
    lines = list(card_lines(config, plan(config, device="cuda")))
    assert [line for line in lines if "activations selective" in line and " 80 GB" in line]
    assert [line for line in lines if "activations" in line and "141 GB" in line]
