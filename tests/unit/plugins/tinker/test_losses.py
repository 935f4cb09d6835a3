"""The formulas of the protocol against this project's own, or written down once more in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from lachesis.common.errors import DataError
from lachesis.config.schema import AlgorithmConfig
from lachesis.plugins.tinker.losses import LOSSES, options_of
from lachesis.train.losses.loss import policy_loss

LOGPROBS = torch.tensor([-0.1, -2.0, -1.0, -0.4, -3.0], dtype=torch.float64)
OLD = torch.tensor([-0.5, -1.0, -1.0, -2.0, -0.2], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3], dtype=torch.float64)


@pytest.mark.parametrize(
    "name, options",
    [
        ("ppo", AlgorithmConfig(loss_type="dapo", epsilon=0.2)),
        ("cispo", AlgorithmConfig(loss_type="cispo", epsilon_high=4.0)),
    ],
)
def test_loss_and_gradient_are_ours(name: str, options: AlgorithmConfig):
    theirs, ours = (LOGPROBS.clone().requires_grad_() for _ in range(2))
    inputs = {"logprobs": OLD, "advantages": ADVANTAGES}
    loss = LOSSES[name].per_token(theirs, inputs, options_of(name, {})).sum()
    expected = policy_loss(
        ours,
        row=torch.zeros(5, dtype=torch.int64),
        mask=torch.ones(5, dtype=torch.float64),
        advantages=ADVANTAGES,
        old_logprobs=OLD,
        num_sequences=1,
        num_tokens=1,
        options=options,
    ).loss
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    assert torch.allclose(theirs.grad, ours.grad)  # type: ignore[arg-type]


def test_unclipped_losses():
    terms = {"logprobs": OLD, "advantages": ADVANTAGES, "weights": ADVANTAGES}
    assert torch.equal(LOSSES["cross_entropy"].per_token(LOGPROBS, terms, {}), -ADVANTAGES * LOGPROBS)
    found = LOSSES["importance_sampling"].per_token(LOGPROBS, terms, {})
    assert torch.allclose(found, -(LOGPROBS - OLD).exp() * ADVANTAGES)


def differentiated(
    name: str, options: dict[str, float], policy_logprobs: list[float], lengths: list[int], **inputs: list[float]
) -> tuple[float, list[float]]:
    """The loss of data of those lengths, and its gradient by logprob."""
    policy = torch.tensor(policy_logprobs, dtype=torch.float64, requires_grad=True)
    given = {key: torch.tensor(values, dtype=torch.float64) for key, values in inputs.items()}
    loss = LOSSES[name].summed(policy, given, options_of(name, options), lengths=lengths)
    loss.backward()
    assert policy.grad is not None
    return loss.item(), policy.grad.tolist()


def test_dro_is_its_formula():
    new, old, advantages = LOGPROBS.tolist(), OLD.tolist(), ADVANTAGES.tolist()
    loss, gradient = differentiated("dro", {"beta": 0.05}, new, [2, 3], logprobs=old, advantages=advantages)
    expected = -sum(n * a - 0.5 * 0.05 * (n - o) ** 2 for n, o, a in zip(new, old, advantages, strict=True))
    assert loss == pytest.approx(expected, rel=0, abs=1e-9)
    slopes = [-a + 0.05 * (n - o) for n, o, a in zip(new, old, advantages, strict=True)]
    assert gradient == pytest.approx(slopes, rel=0, abs=1e-9)


def test_gspo_is_its_formula_for_each_datum():
    """The ratio of the first is inside the range, that of the second above it, that of the third below it."""
    low, high, lengths = 0.8, 1.2, [3, 2, 3]
    new = [-9.0, -0.5, -0.9, -9.0, -0.1, -9.0, -2.0, -3.0]
    old = [0.0, -0.6, -0.7, 0.0, -1.0, 0.0, -0.4, -3.5]
    advantages = [0.0, 1.0, -2.0, 0.5, 1.0, -0.5, 1.5, -1.0]
    mask = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    loss, gradient = differentiated(
        "gspo",
        {"clip_low_threshold": low, "clip_high_threshold": high},
        new,
        lengths,
        logprobs=old,
        advantages=advantages,
        sequence_ratio_mask=mask,
    )
    expected, slopes, ratios, start = 0.0, [], [], 0
    for length in lengths:
        tokens = range(start, start + length)
        start += length
        logs = [new[token] - old[token] for token in tokens if mask[token]]
        ratio = math.exp(sum(logs) / len(logs))
        ratios.append(ratio)
        for token in tokens:
            free, bound = ratio * advantages[token], min(max(ratio, low), high) * advantages[token]
            expected -= min(free, bound)
            slopes.append(-free if free <= bound else 0.0)
    assert low < ratios[0] < high < ratios[1] and ratios[2] < low
    assert loss == pytest.approx(expected, rel=0, abs=1e-9)
    assert gradient == pytest.approx(slopes, rel=0, abs=1e-9)


@pytest.mark.parametrize(
    "name, given, said",
    [
        ("ppo", {"clip_low": 0.1}, "did you mean clip_low_threshold"),
        ("ppo", {"clip_low_threshold": math.nan}, "loss_fn_config has clip_low_threshold nan"),
        ("dro", {}, "dro needs beta in loss_fn_config"),
        ("gspo", {"clip_low_threshold": 0.9}, "gspo needs clip_high_threshold in loss_fn_config"),
        ("stable_reinforce", {}, "'stable_reinforce' is not served here"),
    ],
)
def test_options_that_are_wrong_or_missing(name: str, given: dict[str, float], said: str):
    with pytest.raises(DataError, match=said):
        options_of(name, given)
