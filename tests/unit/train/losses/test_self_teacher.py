"""A policy that is its own teacher, with a prompt that says more: values of TRL's trainers, and passes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lachesis.common.types import Group, Sample
from lachesis.config.schema import TeacherConfig
from lachesis.metrics.values import reduce_metrics
from lachesis.train.batch import pack
from lachesis.train.losses.divergence import divergence, sampled_reverse_kl
from lachesis.train.losses.teacher import Candidates, divergence_from, shares
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model
from tests.unit.train.drifted import drifted_groups
from tests.unit.train.test_policy import make_policy, without_advantage

# Computed by TRL 1.16, trl/experimental/sdpo/loss_utils.py (the same file as of SDFT), in float64: logits of student
# and teacher, the loss of each token by distillation_alpha, and the gradient of the student's logits where the loss is
# the mean of the first two tokens; of sampled_token the mean of all three.
STUDENT = [[0.3, -1.2, 0.8, 0.1], [1.0, 0.2, -0.7, 0.4], [-0.2, 0.9, 0.3, -1.1]]
TEACHER = [[0.5, -0.4, 1.6, -0.3], [0.1, 1.2, -0.2, 0.6], [0.7, 0.2, -0.9, 0.1]]
LOSSES = {
    0.0: [0.090333383807, 0.262995130367, 0.42242213324],
    0.5: [0.023821768362, 0.066528552845, 0.098470341756],
    1.0: [0.104055398937, 0.2900481383, 0.400382230564],
}
GRADIENTS = {
    0.0: [[0.032600689939, -0.011597928297, -0.085697742816, 0.064694981174],
          [0.151069212202, -0.131913371871, -0.016049344713, -0.003106495618]],
    0.5: [[0.007178929316, -0.002988269314, -0.022080489603, 0.017889829601],
          [0.038532329303, -0.028761674935, -0.00500151708, -0.004769137289]],
    1.0: [[0.023195814826, -0.012962115887, -0.095777801449, 0.08554410251],
          [0.180106915114, -0.114807244733, -0.025735113904, -0.039564556477]],
}  # fmt: skip
SAMPLED = [[0.029329833163, 0.006544370371, -0.059887439927, 0.024013236393],
           [0.194132664362, -0.073871652168, -0.030033972486, -0.090227039708],
           [-0.036079732352, 0.110234079026, -0.059485422169, -0.014668924506]]  # fmt: skip


def logits(values: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# The same with distillation_kl_clip of TRL's OPSD, by distillation_alpha and the clip; the gradient of the first token.
CLIPPED = {
    (0.0, 0.05): ([-0.060394456571, -0.074354735888, -0.167759040354],
                  [-0.051143947623, -0.030283882688, 0.085297159315, -0.003869329004]),
    (0.5, 0.01): ([0.020100663938, 0.02131482079, 0.04],
                  [0.012360185358, -0.001832174824, -0.013538042558, 0.003010032024]),
    (1.0, 0.05): ([-0.064703270519, -0.153165017767, -0.139287853559],
                  [-0.046401014903, 0.010059648163, 0.074331304615, -0.037989937875]),
}  # fmt: skip


@pytest.mark.parametrize(("alpha", "clip"), CLIPPED)
def test_clipped_divergences_are_those_of_trl_s_opsd(alpha: float, clip: float):
    student, (values, gradient) = logits(STUDENT), CLIPPED[alpha, clip]
    teacher = Candidates(logits(TEACHER).detach().log_softmax(-1), None, whole=True)
    found = divergence_from(student.log_softmax(-1), slice(0, 3), candidates=teacher, beta=alpha, clip=clip)
    assert found.tolist() == pytest.approx(values, abs=1e-11)
    (own,) = torch.autograd.grad(found[:2].mean(), student)
    assert own[0].tolist() == pytest.approx(gradient, abs=1e-11)


@pytest.mark.parametrize("alpha", LOSSES)
def test_divergences_are_those_of_trl_s_sdpo_and_sdft(alpha: float):
    student = logits(STUDENT)
    values = divergence(student.log_softmax(-1), logits(TEACHER).detach().log_softmax(-1), beta=alpha)
    assert values.tolist() == pytest.approx(LOSSES[alpha], abs=1e-11)
    (gradient,) = torch.autograd.grad(values[:2].mean(), student)
    torch.testing.assert_close(gradient[:2], torch.tensor(GRADIENTS[alpha], dtype=torch.float64), atol=1e-11, rtol=0)


def test_the_estimate_from_sampled_tokens_is_that_of_trl_s_sdpo():
    student, tokens = logits(STUDENT), torch.tensor([[2], [0], [1]])
    own = student.log_softmax(-1).gather(1, tokens).squeeze(1)
    theirs = logits(TEACHER).log_softmax(-1).gather(1, tokens).squeeze(1)
    advantages = -sampled_reverse_kl(own.detach(), theirs.detach())
    (gradient,) = torch.autograd.grad(-(advantages * own).mean(), student)
    torch.testing.assert_close(gradient, torch.tensor(SAMPLED, dtype=torch.float64), atol=1e-11, rtol=0)


PROMPTS = [(3, 9, 14, 2), (3, 9, 4), None]


def groups() -> list[Group]:
    """Samples with one of two teacher's prompts, or none; one completion occurs with both of them."""
    found = []
    for group in without_advantage(drifted_groups(tiny_model().double(), groups=2)):
        twin = replace(group.samples[0], teacher_prompt_ids=PROMPTS[1])
        taught = [replace(s, teacher_prompt_ids=PROMPTS[i % 3]) for i, s in enumerate(group.samples)]
        found.append(replace(group, samples=(*taught, twin)))
    return found


def policy_with(*, lora: bool = False, **options: Any) -> Policy:
    section = TeacherConfig(kind="self", prompts=["{prompt}{answer}"], **options)
    policy = make_policy(options=loss_options(loss_type="grpo", sampler_correction="none", teacher=section), lora=lora)
    torch.manual_seed(5)
    with torch.no_grad():  # away from the reference
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def log_p(model: Any, prompt: tuple[int, ...], sample: Sample) -> torch.Tensor:
    ids = torch.tensor([prompt + sample.completion_ids])
    found = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return (found / sample.temperature).log_softmax(-1)[torch.tensor(sample.loss_mask(), dtype=torch.bool)]


def by_hand(policy: Policy, teacher: Any, *, beta: float, sampled: bool = False) -> torch.Tensor:
    """The mean over sequences of their tokens' mean divergence, with nothing but transformers."""
    everything = [sample for group in groups() for sample in group.samples]
    total = torch.zeros((), dtype=torch.float64)
    for sample in everything:
        if sample.teacher_prompt_ids is None:
            continue
        own = log_p(policy.transformer, sample.prompt_ids, sample)
        with torch.no_grad():
            theirs = log_p(teacher, sample.teacher_prompt_ids, sample)
        values = divergence(own, theirs, beta=beta)
        if sampled:
            mask = torch.tensor(sample.loss_mask(), dtype=torch.bool)
            tokens = torch.tensor(sample.completion_ids)[mask].unsqueeze(1)
            own, theirs = own.gather(1, tokens).squeeze(1), theirs.gather(1, tokens).squeeze(1)
            values = (own - theirs).detach() * own
        total = total + values.mean() / len(everything)
    return total


def check(policy: Policy, teacher: Any, *, share_prefixes: bool = True, **how: Any) -> None:
    options = policy.options.teacher
    assert options is not None
    batch = pack(
        groups(), max_tokens=1 << 20, shares=shares(options), share_prefixes=share_prefixes, old_logprobs="trainer"
    )
    metrics = reduce_metrics(policy.accumulate(batch))
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    found = torch.cat([p.grad.flatten() for p in trained if p.grad is not None])
    expected = torch.autograd.grad(by_hand(policy, teacher, beta=options.beta, **how), trained)
    torch.testing.assert_close(
        found, torch.cat([g.flatten() for g in expected]), atol=1e-6, rtol=1e-5
    )  # norms in float32
    assert metrics["distill_kl"] != 0


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_policy_of_now_teaches_itself(beta: float, share_prefixes: bool):
    policy = policy_with(beta=beta)
    check(policy, policy.transformer, share_prefixes=share_prefixes)


def test_the_policy_teaches_itself_by_its_sampled_tokens():
    policy = policy_with(estimate="sampled")
    check(policy, policy.transformer, sampled=True)


def test_the_model_from_before_training_teaches():
    check(policy_with(weights_of="reference"), tiny_model().double())


def test_the_model_under_an_adapter_teaches():
    check(policy_with(weights_of="reference", lora=True), tiny_model().double())


def test_a_batch_without_a_teacher_learns_nothing_from_it():
    policy = policy_with()
    plain = without_advantage(drifted_groups(tiny_model().double(), groups=2))
    reduce_metrics(policy.accumulate(pack(plain, max_tokens=1 << 20)))
    assert all(p.grad is None or not p.grad.any() for p in policy.model.parameters())
