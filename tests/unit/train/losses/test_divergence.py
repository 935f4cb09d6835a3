"""Divergences: TRL's own values and gradients, the paper's formula in numpy, and what holds of any divergence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lachesis.train.losses.divergence import (
    IMPOSSIBLE,
    divergence,
    sampled_reverse_kl,
    with_rest,
)

# Of GKDTrainer.generalized_jsd_loss of TRL 1.16 in float64 over four tokens, as :func:`logits` has them, by beta and
# temperature: the mean, and its gradient in the student's logits of the first token.
TRL = {
    (0.0, 1.0): (
        1.4001202753927111,
        (-0.037540050, 0.131662729, -0.067853621, -0.013309753, 0.026455389, -0.035852872, -0.003561823),
    ),
    (0.0, 0.7): (
        1.9554179774939389,
        (-0.048387086, 0.226023854, -0.100017562, -0.009606282, 0.025441937, -0.091715561, -0.001739300),
    ),
    (0.1, 1.0): (
        0.10692466966105156,
        (-0.002830174, 0.009774020, -0.003329798, -0.000551024, 0.001885389, -0.004664471, -0.000283943),
    ),
    (0.5, 1.0): (
        0.2650538730427003,
        (-0.005508627, 0.025784488, -0.004363608, -0.000659455, 0.004324677, -0.018978235, -0.000599239),
    ),
    (0.5, 0.7): (
        0.30653203082489644,
        (-0.004019495, 0.038766308, -0.002273064, -0.000144476, 0.003937029, -0.036088771, -0.000177531),
    ),
    (0.9, 0.7): (
        0.14601511476500048,
        (-0.001310584, 0.020301349, -0.000628888, -0.000038774, 0.001422872, -0.019685522, -0.000060454),
    ),
    (1.0, 1.0): (
        1.7256670515620396,
        (-0.028214810, 0.253886542, -0.017032291, -0.002436406, -0.004235981, -0.198687727, -0.003279327),
    ),
    (1.0, 0.7): (
        2.6533527915846804,
        (-0.020946466, 0.484419375, -0.008917629, -0.000536433, -0.020853450, -0.432170684, -0.000994714),
    ),
}
BETAS = (0.0, 0.05, 0.3, 0.5, 0.9, 1.0)


def logits() -> tuple[Tensor, Tensor]:
    """The student's and the teacher's, [4, 7]."""
    places = torch.arange(28, dtype=torch.float64).view(4, 7)
    return 3 * torch.sin(1.7 * places), 2 * torch.cos(2.3 * places + 1)


def random_pair(tokens: int = 9, vocab: int = 31) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, tokens, vocab, generator=generator, dtype=torch.float64)
    return student.log_softmax(-1), teacher.log_softmax(-1)


@pytest.mark.parametrize(("beta", "temperature"), TRL)
def test_values_and_gradients_are_those_of_gkd_in_trl(beta: float, temperature: float):
    student, teacher = logits()
    student.requires_grad_()
    found = divergence(
        (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1), beta=beta
    ).mean()
    found.backward()
    value, gradient = TRL[beta, temperature]
    assert found.item() == pytest.approx(value, abs=1e-9)
    torch.testing.assert_close(student.grad[0], torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_it_is_equation_1_of_the_paper(beta: float):
    """In numpy, from probabilities."""
    student, teacher = random_pair()
    q, p = student.exp().numpy(), teacher.exp().numpy()
    m = beta * p + (1 - beta) * q
    kl = lambda a, b: np.sum(a * np.log(a / b), axis=-1)  # noqa: E731
    expected = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
    np.testing.assert_allclose(divergence(student, teacher, beta=beta).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_it_is_0_between_equals_and_their_gradient_too(beta: float):
    student, _ = random_pair()
    student.requires_grad_()
    found = divergence(student.log_softmax(-1), student.detach(), beta=beta)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.zeros_like(found), rtol=0, atol=1e-12)
    torch.testing.assert_close(student.grad, torch.zeros_like(student), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_with_the_rest_as_one_outcome_it_grows_with_k_to_the_whole(beta: float):
    student, teacher = random_pair()
    order = teacher.argsort(-1, descending=True)
    found = [
        divergence(with_rest(student.gather(1, order[:, :k])), with_rest(teacher.gather(1, order[:, :k])), beta=beta)
        for k in (1, 5, 20, 30)
    ]
    for fewer, more in zip(found, [*found[1:], divergence(student, teacher, beta=beta)], strict=True):
        # Of 30 tokens in 32 the rest is a difference of nearly equal numbers, rounded otherwise by each processor.
        assert (fewer <= more + 1e-9).all()
    torch.testing.assert_close(found[-1], divergence(student, teacher, beta=beta), rtol=0, atol=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_tokens_that_cannot_be_leave_numbers_and_gradients_finite(beta: float):
    """Of a row that knows fewer tokens than others, and one whose tokens are all of the probability."""
    teacher = torch.tensor([[0.6, 0.3, 0.0], [1.0, 0.0, 0.0]]).log().clamp(min=IMPOSSIBLE)
    scores = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    student = scores.log_softmax(-1)[:, :3].masked_fill(teacher == IMPOSSIBLE, IMPOSSIBLE)
    found = divergence(with_rest(student), with_rest(teacher), beta=beta)
    found.sum().backward()
    assert found.isfinite().all() and (found > 0).all() and scores.grad.isfinite().all()


def test_the_sampled_estimate_has_the_reverse_kl_as_its_mean():
    student, teacher = random_pair(tokens=1)
    tokens = torch.multinomial(student.exp()[0], 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = sampled_reverse_kl(student[0, tokens], teacher[0, tokens]).mean()
    assert found.item() == pytest.approx(divergence(student, teacher, beta=1.0).item(), rel=0.01)


def test_a_token_that_the_teacher_does_not_know_teaches_nothing():
    assert sampled_reverse_kl(torch.tensor([-1.0, -2.0]), torch.tensor([torch.nan, -3.0])).tolist() == [0.0, 1.0]
