"""What a teacher adds to the loss: exact, however it is cut, and by environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lachesis.common.errors import TrainingError
from lachesis.common.teacher_logprobs import teacher_logprobs
from lachesis.common.types import Group, Sample
from lachesis.config.schema import TeacherConfig
from lachesis.metrics.values import reduce_metrics
from lachesis.train.batch import Batch, MicroBatch, pack
from lachesis.train.losses.divergence import divergence, with_rest
from lachesis.train.losses.teacher import shares
from lachesis.train.model import head
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import VOCAB_SIZE, tiny_model
from tests.unit.train.drifted import drifted_groups
from tests.unit.train.test_policy import make_policy, without_advantage


def groups() -> list[Group]:
    return drifted_groups(tiny_model().double(), groups=2)


def policy_with(teacher: torch.nn.Module | None = None, *, lora: bool = False, **options: Any) -> Policy:
    """Learning from another tiny model, in float64."""
    section = TeacherConfig(model="another", **options)
    model = tiny_model(seed=1).double() if teacher is None else teacher
    return make_policy(
        options=loss_options(loss_type="dapo", teacher=section), lora=lora, teachers={"": model.requires_grad_(False)}
    )


def packed(policy: Policy, these: list[Group], *, max_tokens: int = 1 << 20, **cut: Any) -> Batch:
    options = policy.options.teacher
    assert options is not None
    return pack(these, max_tokens=max_tokens, shares=shares(options), **cut)


def gradient(policy: Policy, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    metrics = reduce_metrics(policy.accumulate(batch))
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]), metrics


def whole_log_p(model: Any, micro: MicroBatch) -> torch.Tensor:
    """log p of each loss token, [N, V], with nothing but transformers."""
    assert micro.expand is None or micro.expand.numel()
    rows = []
    for g in groups():
        for sample in g.samples:
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
            keep = torch.tensor(sample.loss_mask(), dtype=torch.bool)
            rows.append((logits.double() / sample.temperature).log_softmax(-1)[keep])
    return torch.cat(rows)


@pytest.mark.parametrize("top_k", [None, 5], ids=["whole", "top 5"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_gradient_is_that_of_the_divergence_by_hand(beta: float, top_k: int | None, monkeypatch):
    monkeypatch.setitem(head._CHUNK_ELEMENTS, "cpu", 3 * VOCAB_SIZE)  # chunks of three rows
    policy = policy_with(beta=beta, top_k=top_k, weight=0.25)
    batch = packed(policy, without_advantage(groups()))
    found, metrics = gradient(policy, batch)

    student = policy.transformer
    policy.optimizer.zero_grad()
    own, theirs = (
        whole_log_p(student, batch.micro_batches[0]),
        whole_log_p(tiny_model(seed=1).double(), batch.micro_batches[0]),
    )
    if top_k is not None:
        top = theirs.topk(top_k)
        own, theirs = with_rest(own.gather(1, top.indices)), with_rest(top.values)
    expected = divergence(own, theirs.detach(), beta=beta).mean()
    (0.25 * expected).backward()
    by_hand = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
    assert metrics["distill_kl"] == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-6)  # norms compute in float32


@pytest.mark.parametrize(
    ("lora", "options"), [(False, {}), (True, {"top_k": 7, "beta": 0.3}), (False, {"estimate": "sampled"})], ids=str
)
def test_a_step_does_not_depend_on_how_it_is_cut(lora: bool, options: dict[str, Any]):
    cuts = [{}, {"max_tokens": 20, "max_rows": 1}]
    policies = [policy_with(lora=lora, **options) for _ in cuts]
    found = [gradient(policy, packed(policy, groups(), **cut)) for policy, cut in zip(policies, cuts, strict=True)]
    for other, metrics in found[1:]:
        torch.testing.assert_close(other, found[0][0], rtol=1e-5, atol=2e-6)
        assert metrics["distill_kl"] == pytest.approx(found[0][1]["distill_kl"], rel=1e-5)


def test_the_sampled_estimate_is_an_advantage_of_each_token():
    """A policy gradient with the same advantages, given by hand."""
    micro = pack(groups(), max_tokens=1 << 20).micro_batches[0]
    policy = policy_with(estimate="sampled", weight=0.5)
    batch = packed(policy, groups())
    with torch.no_grad():
        current = policy._scores(micro).logprobs
        taught = policy.teacher.logprobs(micro)
    taught = taught if micro.expand is None else taught[micro.expand]
    by_hand = replace(micro, advantages=micro.advantages[micro.row].double() - 0.5 * (current - taught))
    plain = make_policy(options=loss_options(loss_type="dapo"))
    expected, _ = gradient(plain, replace(batch, micro_batches=(by_hand,)))
    torch.testing.assert_close(gradient(policy, batch)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"estimate": "sampled"}], ids=str)
def test_from_a_teacher_that_is_the_policy_there_is_nothing_to_learn(options: dict[str, Any]):
    policy = policy_with(tiny_model().double(), **options)
    found, metrics = gradient(policy, pack(without_advantage(groups()), max_tokens=1 << 20))
    assert metrics["distill_kl"] == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-9)


def told(groups: list[Group], *, top_k: int) -> list[Group]:
    """What the other model says of the groups, as a server tells it."""
    model = tiny_model(seed=1).double()

    def of(sample: Sample) -> Sample:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        log_p = (model(input_ids=ids, use_cache=False).logits[0].double() / sample.temperature).log_softmax(-1)
        rows = log_p[len(sample.prompt_ids) - 1 : -1]
        tops = [dict(enumerate(row.tolist())) for row in rows]
        return replace(sample, teacher=teacher_logprobs(tops, sample.completion_ids, top_k=top_k))

    with torch.no_grad():
        return [replace(g, samples=tuple(map(of, g.samples))) for g in groups]


class TestOneThatIsNotHere:
    """A server's word, or that of the environments' own teacher."""

    @pytest.mark.parametrize(
        "options",
        [{"top_k": VOCAB_SIZE, "beta": 0.5}, {"top_k": 5}, {"estimate": "sampled"}],
        ids=str,
    )
    def test_it_teaches_what_the_model_itself_does(self, options: dict[str, Any]):
        """To 1e-6: what is told is in float32."""
        here, away = policy_with(**options), policy_with(kind="url", **options)
        expected, metrics = gradient(here, packed(here, groups()))
        found, others = gradient(away, packed(away, told(groups(), top_k=options.get("top_k", 0)), max_tokens=20))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert others["distill_kl"] == pytest.approx(metrics["distill_kl"], abs=1e-6)

    def test_of_what_it_has_not_spoken_of_nothing_is_learned(self):
        policy = policy_with(kind="rollouts", top_k=4)
        silent, spoken = without_advantage(groups())
        found, metrics = gradient(policy, packed(policy, [silent, *told([spoken], top_k=4)]))
        policy.optimizer.zero_grad()
        alone, others = gradient(policy, packed(policy, told([spoken], top_k=4)))
        share = packed(policy, [spoken]).num_tokens / packed(policy, [silent, spoken]).num_tokens
        torch.testing.assert_close(found, share * alone, rtol=1e-4, atol=1e-7)
        assert metrics["distill_kl"] == pytest.approx(others["distill_kl"], rel=1e-5)

    def test_a_server_that_was_not_asked_is_said(self):
        policy = policy_with(kind="url", top_k=4)
        with pytest.raises(TrainingError, match="lack their teacher's logprobs"):
            policy.accumulate(packed(policy, groups()))


@pytest.mark.parametrize("size", [VOCAB_SIZE - 4, VOCAB_SIZE + 5], ids=["fewer", "more"])
def test_a_teacher_may_have_another_number_of_outcomes(size: int):
    """As where a larger model's embeddings are padded further; its own tokens are a part of the rest."""
    micro = pack(groups(), max_tokens=1 << 20).micro_batches[0]
    micro = replace(micro, input_ids=micro.input_ids.clamp(max=size - 1), targets=micro.targets.clamp(max=size - 1))
    batch = replace(pack(groups(), max_tokens=1 << 20), micro_batches=(micro,))
    found, metrics = gradient(policy_with(tiny_model(seed=1, vocab_size=size).double()), batch)
    assert found.isfinite().all() and metrics["distill_kl"] > 0.1


class TestMixing:
    """Two groups of two environments."""

    @staticmethod
    def batch(**options: Any) -> Batch:
        named = [replace(g, prompt=replace(g.prompt, columns={"env_id": number})) for number, g in enumerate(groups())]
        return pack(named, max_tokens=1 << 20, shares=shares(TeacherConfig(model="another", **options)))

    def test_each_environment_has_its_weights(self):
        batch = self.batch(weight=0.5, weights={"1": 0.0}, reward_weights={"0": 0.0, "1": 2.0})
        (micro,) = batch.micro_batches
        plain = pack(groups(), max_tokens=1 << 20).micro_batches[0]
        taught = micro.teacher_weights > 0
        assert set(micro.teacher_weights.tolist()) == {0.0, 0.5}
        assert (micro.advantages[taught] == 0).all()
        torch.testing.assert_close(micro.advantages[~taught], 2 * plain.advantages[~taught])

    def test_what_has_no_weight_has_no_gradient(self):
        silent = self.batch(weights={"0": 0.0, "1": 0.0}, reward_weight=0.0)
        found, metrics = gradient(policy_with(), silent)
        torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)
        assert "distill_kl" not in metrics or metrics["distill_kl"] == 0
