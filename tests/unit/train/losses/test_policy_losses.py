"""Every loss with every option through the policy: TRL's own values, and independence of how a step is cut."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import AlgorithmConfig
from lachesis.metrics.values import reduce_metrics
from lachesis.train.batch import MicroBatch, pack
from lachesis.train.losses.loss import LOSS_TYPES
from lachesis.train.model.loading import LoadedModel
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.paths import GOLDEN
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.drifted import drifted_groups
from tests.unit.train.losses.test_loss import CASES, FIXTURE, _options
from tests.unit.train.test_policy import make_policy

COMMON = {"sampler_correction": "token_truncate", "cov_share": 0.2, "cov_low": 0.01}
TRAINER = {"old_logprobs": "trainer"}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # what is set: options of the loss, of packing, of the reference
    "plain": ({}, {}, {}),
    "sequence level": ({"importance_sampling_level": "sequence"}, {}, {}),
    "two-sided clip": ({"delta": 1.3, "epsilon": 0.05, "epsilon_high": 0.1}, {}, {}),
    "masked truncated": ({}, {"mask_truncated": True}, {}),
    "token truncate": ({"sampler_correction_min": 0.8}, TRAINER, {}),
    "token mask": (
        {"sampler_correction": "token_mask", "sampler_correction_min": 0.7},
        TRAINER,
        {},
    ),
    "sequence truncate": ({"sampler_correction": "sequence_truncate"}, TRAINER, {}),
    "sequence mask": (
        {"sampler_correction": "sequence_mask", "sampler_correction_max": 1.5},
        TRAINER,
        {},
    ),
    "opsm": ({"off_policy_mask_threshold": 0.02}, {}, {}),
    "entropy bonus": ({"entropy_coef": 0.1}, {}, {}),
    "top entropy": ({"top_entropy_quantile": 0.3, "entropy_coef": 0.1}, {}, {}),
    "kl to the base": ({"beta": 0.1}, {}, {}),
    "kl to the sampler": ({"beta": 0.1, "use_bias_correction_kl": False}, {}, {"kl_reference": "sampler"}),
    "everything": (
        {
            "importance_sampling_level": "sequence",
            "delta": 1.5,
            "off_policy_mask_threshold": 0.05,
            "entropy_coef": 0.05,
            "top_entropy_quantile": 0.45,  # of these tokens: at 0.5 equal completions tie at the threshold
            "beta": 0.1,
        },
        {"mask_truncated": True, **TRAINER},
        {"kl_reference": "ema", "ref_mixup_alpha": 0.5, "ref_sync_steps": 1},
    ),
}


def exact_model() -> PreTrainedModel:
    """Most other architectures normalize in float32, whatever the dtype: then nothing agrees to 1e-9."""
    return tiny_model("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, n_layer=1).double()


def exact_policy(**keywords: Any) -> Policy:
    model = exact_model()
    return make_policy(loaded=LoadedModel(model=model, transformer=model, tokenizer=tiny_tokenizer()), **keywords)


@cache
def groups() -> list[Group]:
    return drifted_groups(exact_model())


@cache
def moved_policy(packing: str, reference: str) -> Policy:
    """The weights have moved since the reference was taken, so its KL is not 0. Nothing else depends on options."""
    policy = exact_policy(packing=packing, options=AlgorithmConfig.model_validate_json(reference))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.02)
    return policy


def gradient(policy: Policy, these: list[Group], **pack_options: Any) -> tuple[torch.Tensor, dict[str, float]]:
    batch = pack(these, share_prefixes=policy.plan.packed, **pack_options)
    metrics = reduce_metrics(policy.accumulate(batch))
    found = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    policy.optimizer.zero_grad()
    return found, metrics


@cache
def silent_gradient(loss_type: str) -> torch.Tensor:
    policy = exact_policy(options=loss_options(loss_type=loss_type, **COMMON))
    return gradient(policy, groups(), max_tokens=1 << 20)[0]


@pytest.mark.parametrize(("loss_type", "name"), [*itertools.product(LOSS_TYPES, OPTIONS)])
def test_the_gradient_does_not_depend_on_how_a_step_is_cut(loss_type: str, name: str):
    loss, packing, reference = OPTIONS[name]
    options = loss_options(loss_type=loss_type, **{**COMMON, **loss, **reference})
    referred = loss_options(beta=options.beta, **reference).model_dump_json(exclude_unset=True)
    packed, padded = moved_policy("packed", referred), moved_policy("padded", referred)
    for policy in (packed, padded):
        policy.options = options
    whole, metrics = gradient(packed, groups(), max_tokens=1 << 20, **packing)
    assert whole.norm() > 1e-4, "there is nothing to compare"
    shuffled = random.Random(0).sample(groups(), len(groups()))
    cases = {
        "small budget, other order": (packed, shuffled, {"max_tokens": 14, "max_rows": 2}),
        "padded": (padded, groups(), {"max_tokens": 30}),
    }
    for case, (policy, these, cut) in cases.items():
        found, found_metrics = gradient(policy, these, **cut, **packing)
        torch.testing.assert_close(
            found, whole, rtol=1e-9, atol=1e-9 * float(whole.abs().max()), msg=lambda m, c=case: f"{c}: {m}"
        )
        for metric, value in metrics.items():
            if not metric.startswith(("tokens_forward", "micro_batches")):
                assert found_metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), (case, metric)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_every_option_changes_the_gradient(name: str):
    loss, packing, reference = OPTIONS[name]
    policy = exact_policy(options=loss_options(loss_type="dapo", **{**COMMON, **loss, **reference}))
    found, _ = gradient(policy, groups(), max_tokens=1 << 20, **packing)
    if name == "kl to the base":  # before the first step the reference is the policy, and the KL flat
        assert torch.allclose(found, silent_gradient("dapo"))
    else:
        assert not torch.allclose(found, silent_gradient("dapo"), rtol=1e-6)


class FixedReference:
    """The golden values' reference, found by the old logprob of each token."""

    def __init__(self) -> None:
        old, ref = FIXTURE["old_logps"], FIXTURE["ref_logps"]
        pairs = [pair for rows in zip(old, ref, strict=True) for pair in zip(*rows, strict=False)]
        self._table = {float(torch.tensor(old, dtype=torch.float32)): ref for old, ref in pairs}

    def logprobs(self, micro: MicroBatch) -> torch.Tensor:
        return torch.tensor([self._table[value] for value in micro.old_logprobs.tolist()])


def golden_groups(case: dict, temperature: float) -> list[Group]:
    rows = []
    for i in range(case["n_rows"]):
        completion = tuple(FIXTURE["completion_ids"][i])
        rows.append(
            Sample(
                prompt_ids=tuple(FIXTURE["prompt_ids"][i]),
                completion_ids=completion,
                logprobs=tuple(FIXTURE["old_logps"][i][: len(completion)]),
                finish_reason="stop" if completion[-1] == FIXTURE["eos_id"] else "length",
                versions=VersionSpan(0, 0),
                advantage=case["advantages"][i],
                temperature=temperature,
            )
        )
    return [Group(Prompt(str(i), rows[i].prompt_ids, ""), tuple(rows[i : i + 4])) for i in range(0, len(rows), 4)]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_policy_agrees_with_trl_from_token_ids_to_gradients(loss_type: str):
    transformer = Qwen2ForCausalLM.from_pretrained(GOLDEN / "tiny_model", dtype=torch.float32)
    loaded = LoadedModel(model=transformer, transformer=transformer, tokenizer=tiny_tokenizer())
    cases = [c for c in CASES if c["name"] == "model" and c["config"]["loss_type"] == loss_type]
    for number, case in enumerate(cases):
        packing = "padded" if number % 2 else "packed"
        options = _options(case).model_copy(update={"sampler_correction": "none"})
        length = FIXTURE["max_completion_length"]
        policy = make_policy(options=options, max_completion_length=length, packing=packing, loaded=loaded)
        policy.reference = FixedReference() if options.beta else None
        batch = pack(
            golden_groups(case, case["config"]["temperature"]), max_tokens=40, share_prefixes=policy.plan.packed
        )
        assert len(batch.micro_batches) > 1
        metrics = reduce_metrics(policy.accumulate(batch))
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in transformer.parameters()))
        assert norm == pytest.approx(case["param_grad_norm"], rel=1e-5), case["config"]
        assert metrics["loss"] == pytest.approx(case["loss"], rel=1e-5, abs=1e-6), case["config"]
        policy.optimizer.zero_grad()
