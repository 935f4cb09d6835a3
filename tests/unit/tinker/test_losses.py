"""The formulas of the protocol against this project's own."""

from __future__ import annotations

import pytest
import torch

from lachesis.common.errors import DataError
from lachesis.config.schema import AlgorithmConfig
from lachesis.tinker.losses import LOSSES, options_of
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


def test_an_option_of_no_loss_is_an_error():
    with pytest.raises(DataError, match="did you mean 'clip_low_threshold'"):
        options_of("ppo", {"clip_low": 0.1})
