from __future__ import annotations

import pytest

from lachesis.config.capabilities import BridgeCapabilities
from lachesis.config.rules import check, learning_rate
from lachesis.errors import ConfigError

LORA = {"kind": "lora"}


def test_the_defaults_have_nothing_to_complain_about(build):
    assert check(build()) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"run": {"name": "../up"}}, "run.name '../up' must be a directory name"),
        ({"run": {"name": ""}}, "run.name '' must be a directory name"),
        (
            {"run": {"setup": "prepare"}},
            "run.setup: 'prepare' is neither FILE.py:FUNCTION nor module.function",
        ),
        ({"rewards": {"functions": ["a.b", "c:d"]}}, "rewards.functions[1]: 'c:d' is neither"),
        ({"rewards": {"weights": [1.0, 2.0]}}, "rewards.weights has 2 values for 1 rewards.functions"),
        ({"rewards": {"weights": [0.0]}}, "rewards.weights are all 0"),
        ({"model": {"chat_template": "/no/such.jinja"}}, "model.chat_template: '/no/such.jinja' is no file"),
        ({"data": {"eval_path": "e.jsonl", "eval_size": 5}}, "data.eval_path and data.eval_size both"),
        (
            {"evaluation": {"every_steps": 5}},
            "evaluation.every_steps is 5 and there are no held-out problems",
        ),
        ({"optimizer": {"warmup_steps": 11}}, "optimizer.warmup_steps 11 is more than run.steps 10"),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "optimizer.betas must be below 1"),
        (
            {"model": {"dtype": "float16"}, "optimizer": {"weight_update": "stochastic_rounding"}},
            "stochastic_rounding is for bfloat16 and model.dtype is float16",
        ),
    ],
)
def test_what_cannot_work_is_refused(build, sections, expected):
    with pytest.raises(ConfigError) as caught:
        check(build(**sections))
    assert expected in caught.value.message


def test_all_problems_are_told_at_once(build):
    with pytest.raises(ConfigError) as caught:
        check(build(rewards={"weights": [0.0]}, optimizer={"warmup_steps": 11}))
    assert caught.value.message.splitlines()[0] == "the configuration cannot work: 2 problems"


@pytest.mark.parametrize(
    ("sections", "level", "rule", "expected"),
    [
        (
            {"sampling": {"top_p": 0.9, "top_k": 50}},
            "warning",
            "truncated_sampling",
            "sampling.top_p 0.9, sampl",
        ),
        ({"sampling": {"min_p": 0.1}}, "warning", "truncated_sampling", "sampling.min_p 0.1: "),
        ({"sampling": {"repetition_penalty": 1.1}}, "warning", "truncated_sampling", "ratios are biased"),
        ({"sampling": {"num_generations": 2}}, "note", "group_size", "+0.71 or -0.71"),
        ({"data": {"eval_path": "train.jsonl"}}, "warning", "held_out", "on the training problems"),
        (
            {"data": {"eval_size": 5}, "evaluation": {"every_steps": 11}},
            "note",
            "held_out",
            "before and after",
        ),
        ({"optimizer": {"min_lr_ratio": 0.1}}, "warning", "schedule", "does nothing with schedule constant"),
        (
            {"optimizer": {"kind": "adafactor", "eps": 1e-6}},
            "warning",
            "optimizer",
            "optimizer.eps do nothing",
        ),
        (
            {"optimizer": {"kind": "adamw_cpu"}, "model": {"device": "cpu"}},
            "note",
            "optimizer",
            "adamw_cpu is adamw where the model is on the CPU",
        ),
        ({"optimizer": {"learning_rate": 2e-4}}, "warning", "learning_rate", "nothing holds the policy near"),
        ({"adapter": {**LORA, "dropout": 0.1}}, "warning", "adapter", "ratios are noisy"),
        (
            {"model": {"dtype": "float32"}, "optimizer": {"weight_update": "stochastic_rounding"}},
            "note",
            "weight_update",
            "model.dtype is float32 already",
        ),
        (
            {"batch": {"max_tokens_per_microbatch": 128}},
            "note",
            "microbatch",
            "one longest sequence (256 tokens)",
        ),
        (
            {"algorithm": {"importance_sampling_level": "sequence", "loss_type": "dapo"}},
            "warning",
            "algorithm",
            "GSPO is defined with loss_type grpo",
        ),
        (
            {"algorithm": {"aggregation": "normalize_then_sum", "scale_rewards": "none"}},
            "warning",
            "algorithm",
            "scale_rewards none does nothing",
        ),
        ({"algorithm": {"epsilon": 1.0}}, "warning", "algorithm", "never clips below"),
        ({"algorithm": {"epsilon_high": 0.1}}, "note", "algorithm", "is below epsilon 0.2"),
        ({"deadlines": {"batch_s": 10.0}}, "warning", "deadlines", "ends before generation may"),
        ({"checkpoint": {"save_final": False}}, "warning", "checkpoint", "leaves no trained weights"),
        ({"checkpoint": {"every_steps": 11}}, "note", "checkpoint", "more than run.steps 10"),
        ({"checkpoint": {"keep_last": 5}}, "note", "checkpoint", "keep_last does nothing"),
        ({"bridge": {"proof": False}}, "warning", "bridge", "stale weights would go unnoticed"),
    ],
)
def test_what_is_odd_is_said(build, sections, level, rule, expected):
    (finding,) = check(build(**sections))
    assert (finding.level, finding.rule) == (level, rule)
    assert expected in finding.message


@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": LORA, "optimizer": {"learning_rate": 2e-4}},
        {"optimizer": {"learning_rate": 2e-4}, "algorithm": {"beta": 0.04}},
        {"optimizer": {"weight_update": "plain"}, "model": {"dtype": "float32"}},
        {"optimizer": {"weight_update": "plain"}, "model": {"device": "cpu"}},
        {"optimizer": {"weight_update": "plain"}, "model": {"dtype": "bfloat16"}, "adapter": LORA},
        {"optimizer": {"weight_update": "plain", "learning_rate": 5e-5}, "model": {"dtype": "bfloat16"}},
        {"optimizer": {"weight_update": "stochastic_rounding"}, "model": {"dtype": "bfloat16"}},
        {"checkpoint": {"every_steps": 5, "keep_last": 5}},
        {"rewards": {"functions": ["a.b", "/x y/c.py:d"], "weights": [1.0, 0.0]}},
        {"model": {"chat_template": "{{ x }}"}},
        {"optimizer": {"kind": "adafactor"}},
    ],
)
def test_what_is_fine_is_not_mentioned(build, sections):
    assert check(build(**sections)) == []


def test_vanishing_updates_come_with_their_numbers(build):
    """1e-6 * 2^9 = 5.12e-4: half the spacing of bfloat16 is at least 2^-9 of a weight."""
    (finding,) = check(build(model={"dtype": "bfloat16"}, optimizer={"weight_update": "plain"}))
    assert finding.level == "warning"
    assert "2^-9·|w|" in finding.message
    assert "at learning rate 1e-06 every weight beyond 5.1e-04 stands still" in finding.message


def test_vanishing_updates_are_conditional_where_the_dtype_is_the_checkpoints(build):
    (finding,) = check(build(optimizer={"weight_update": "plain"}))
    assert "if the checkpoint is bfloat16" in finding.message


def test_vanishing_updates_of_float16_are_smaller(build):
    (finding,) = check(build(model={"dtype": "float16"}, optimizer={"weight_update": "plain"}))
    assert "every weight beyond 4.1e-03" in finding.message


def test_a_bridge_that_transfers_adapters_only(build):
    table = {
        "in_process": BridgeCapabilities(adapter_only=True, same_device=False, owns_engine=False, shares_storage=False)
    }
    assert check(build(adapter=LORA), bridges=table) == []
    with pytest.raises(ConfigError, match="transfers adapters only, and adapter"):
        check(build(), bridges=table)


def test_a_template_file_that_is_there(build, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ x }}")
    assert check(build(model={"chat_template": str(path)})) == []


def test_learning_rate(build):
    assert learning_rate(build()) == 1e-6
    assert learning_rate(build(adapter=LORA)) == 1e-5
    assert learning_rate(build(adapter=LORA, optimizer={"learning_rate": 3e-4})) == 3e-4
