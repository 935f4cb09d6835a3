"""A loss by import path: what it is given, what it may return, and that it stays inside the rest of the algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lachesis.common.errors import ConfigError, LachesisError, TrainingError
from lachesis.config.schema import AlgorithmConfig
from lachesis.metrics.values import reduce_metrics
from lachesis.train.batch import idle_micro_batch, pack
from lachesis.train.losses.custom import CustomLoss, load_custom_loss
from tests.losses import loss_options
from tests.tiny import tiny_model
from tests.unit.train.drifted import drifted_groups
from tests.unit.train.test_policy import make_policy

CLIPPED = """
import torch
def loss(logprobs, *, old_logprobs, advantages, options, **rest):
    ratio = (logprobs - old_logprobs).exp()
    inside = ratio.clamp(1 - options.epsilon, 1 + options.upper_epsilon)
    return -torch.minimum(ratio * advantages, inside * advantages)
"""


def write(directory: Path, text: str) -> CustomLoss:
    path = directory / f"loss_{abs(hash(text))}.py"
    path.write_text(text)
    return load_custom_loss(f"{path}:loss")


def step(loss: CustomLoss | None, *, split: int = 1 << 20, **options) -> tuple[torch.Tensor, dict[str, float]]:
    policy = make_policy(options=loss_options(sampler_correction="none", **options), custom_loss=loss)
    batch = pack(drifted_groups(tiny_model().double()), max_tokens=split)
    metrics = reduce_metrics(policy.accumulate(batch))
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]), metrics


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
def test_grpos_own_loss_written_down_again_is_grpo(tmp_path: Path, loss_type: str):
    """The normalization stays the loss type's, and so do masks, KL and entropy bonus."""
    options = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.1, "off_policy_mask_threshold": 0.05}
    expected, metrics = step(None, **options)
    found, own_metrics = step(write(tmp_path, CLIPPED), **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert "clipped_fraction" in metrics
    assert "clipped_fraction" not in own_metrics, "what it clips is its own affair"
    split, _ = step(write(tmp_path, CLIPPED), split=20, **options)
    torch.testing.assert_close(split, expected, rtol=1e-3, atol=1e-6)


def test_it_is_given_what_it_names(tmp_path: Path):
    loss = write(
        tmp_path,
        "seen = {}\n"
        "def loss(logprobs, mask, row, num_rows, ratio, entropies, sampling_logprobs, advantages, scale=1.0):\n"
        "    seen.update({name: value for name, value in locals().items() if name != 'seen'})\n"
        "    return -scale * logprobs * advantages\n",
    )
    assert not loss.needs_reference
    step(loss)
    seen = loss.function.__globals__["seen"]
    tokens = seen["logprobs"].numel()
    for name in ("mask", "row", "ratio", "entropies", "sampling_logprobs", "advantages"):
        assert seen[name].shape == (tokens,), name
    assert seen["num_rows"] == 12
    assert seen["sampling_logprobs"].isnan().any()
    assert seen["scale"] == 1.0


def test_its_options_are_the_algorithm_section(tmp_path: Path):
    loss = write(
        tmp_path,
        "seen = []\ndef loss(logprobs, *, options):\n    seen.append(options)\n    return -logprobs\n",
    )
    options = loss_options(loss_type="cispo", sampler_correction="token_mask", sampler_correction_min=0.5)
    policy = make_policy(options=options, custom_loss=replace(loss, max_completion_length=8))
    policy.accumulate(pack(drifted_groups(tiny_model().double(), groups=1), max_tokens=100))
    (seen,) = loss.function.__globals__["seen"]
    for name in set(AlgorithmConfig.model_fields) - {"epsilon_high"}:
        assert getattr(seen, name) == getattr(options, name), name
    assert (seen.epsilon_high, seen.upper_epsilon, seen.max_completion_length) == (5.0, 5.0, 8)
    assert seen.sampler_correction == "token_mask"
    assert (seen.sampler_correction_min, seen.sampler_correction_max) == (0.5, 3.0)
    assert seen.ignores_zero_advantage


def test_naming_the_reference_holds_one_and_rest_does_not(tmp_path: Path):
    text = "def loss(logprobs, {}):\n    return -logprobs * (1 if {} is None else 2)\n"
    named = write(tmp_path, text.format("ref_logprobs", "ref_logprobs"))
    rest = write(tmp_path, text.format("**rest", "rest['ref_logprobs']"))
    assert named.needs_reference
    policies = [make_policy(options=loss_options(), custom_loss=loss) for loss in (named, rest)]
    assert [policy.reference is None for policy in policies] == [False, True]
    assert torch.allclose(step(named)[0], 2 * step(rest)[0])


def test_rows_without_advantage_are_its_own_affair(tmp_path: Path):
    policy = make_policy(options=loss_options(), custom_loss=write(tmp_path, CLIPPED))
    assert not policy.ignores_zero_advantage
    assert make_policy(options=loss_options()).ignores_zero_advantage


def test_a_pass_without_tokens_does_not_ask_it(tmp_path: Path):
    policy = make_policy(
        options=loss_options(),
        custom_loss=write(tmp_path, "def loss(logprobs):\n    return logprobs.max() + logprobs\n"),
    )
    batch = pack(drifted_groups(tiny_model().double(), groups=1), max_tokens=100)
    found = policy._loss(batch, 0, idle_micro_batch(), policy._count(batch, batch.micro_batches), num_inputs=0)
    assert float(found.loss.detach()) == 0.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1.0", "returned a float -> return one value per token"),
        ("return logprobs.sum()", r"returned shape \(\) for"),
        ("return logprobs.detach()", "do not depend on the logprobs"),
        ("return logprobs.long()", "returned torch.int64"),
        ("return logprobs / 0", "values that are not finite"),
        ("raise KeyError('x')", r"raised KeyError: 'x' \(loss_\d+.py:3\)"),
    ],
)
def test_what_is_no_loss_of_each_token_is_refused(tmp_path: Path, body: str, message: str):
    with pytest.raises(TrainingError, match=message):
        step(write(tmp_path, f"\ndef loss(logprobs):\n    {body}\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss():\n    pass\n", "takes no logprobs"),
        ("def loss(*, logprobs):\n    pass\n", "takes no logprobs"),
        (
            "def loss(logprobs, advantage):\n    pass\n",
            "a loss does not get -> did you mean advantages",
        ),
        ("def loss(logprobs, zzzz):\n    pass\n", "it may take: old_logprobs, sampling_logprobs"),
        ("loss = 3\n", "a int, no function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_training(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        write(tmp_path, text)
    assert message in str(caught.value)


def test_a_module_that_is_not_there_is_an_error_of_the_configuration():
    with pytest.raises(LachesisError, match="nowhere"):
        load_custom_loss("nowhere_to_be_found.loss")
