"""Routing that is replayed: the engine's choices, the trainer's weights of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ModelError, TrainingError
from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import GenerationRequest, Group, Prompt, Sample, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.train.batch import pack
from lachesis.train.model.experts import routers
from lachesis.train.model.loading import LoadedModel
from lachesis.train.model.router_replay import RouterReplay
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer
from tests.unit.train.test_policy import make_policy

PROMPTS = [(5, 17, 60, 33, 8), (70, 71), (9, 9, 9, 50, 51, 52, 53, 54)]
# Probabilities of experts are float32 in a model of float64: so much of them is no rounding.
TIE = 1e-5


def mixture(**config: Any) -> PreTrainedModel:
    return tiny_model("qwen3_moe", **config).double()


def with_ties(model: PreTrainedModel, *, sign: float) -> PreTrainedModel:
    """Experts 0 and 1 of each router nearly alike; which is chosen before the other is a matter of the sign."""
    with torch.no_grad():
        for _, router in routers(model):
            weight: Any = router.weight
            weight[1] = weight[0] + sign * TIE * weight[2]
    return model


def sampled(model: PreTrainedModel, *, routed: bool = True, count: int = 4) -> list[Group]:
    """Groups that the embedded engine samples, with advantages."""
    engine = EmbeddedEngine(model, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, max_batch_size=64, max_context=100)
    params = SamplingParams(max_tokens=10, routed_experts=routed)
    requests = [GenerationRequest(prompt, params, n=count, seed=len(prompt)) for prompt in PROMPTS]
    answers = engine.generate(requests, deadline=Deadline("test: generation", 60.0))
    groups = []
    for number, (prompt, completions) in enumerate(zip(PROMPTS, answers, strict=True)):
        samples = [
            Sample(prompt, c.token_ids, c.logprobs, "stop", c.versions, advantage=i - 1.25, routed=c.routed)
            for i, c in enumerate(completions)
        ]
        groups.append(Group(Prompt(str(number), prompt, ""), tuple(samples)))
    return groups


def policy_of(model: PreTrainedModel, *, packing: str = "packed", replays: bool = True) -> Policy:
    loaded = LoadedModel(model, model, tiny_tokenizer())
    return make_policy(options=loss_options(router_replay=replays), loaded=loaded, packing=packing)


def apart(policy: Policy, groups: Sequence[Group]) -> float:
    """The largest difference between the trainer's logprobs and the engine's."""
    found = policy.logprobs(groups)
    pairs = [pair for group, own in zip(groups, found, strict=True) for pair in zip(group.samples, own, strict=True)]
    return max(float((torch.tensor(s.logprobs, dtype=own.dtype) - own).abs().max()) for s, own in pairs)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_near_ties_are_decided_as_the_engine_did(packing: str):
    groups = sampled(with_ties(mixture(), sign=1.0))
    other = with_ties(mixture(), sign=-1.0)
    assert apart(policy_of(other, packing=packing, replays=False), groups) > 0.1
    policy = policy_of(other, packing=packing)
    assert apart(policy, groups) < 1e-4
    batch = pack(groups, max_tokens=30, share_prefixes=policy.plan.packed)
    assert len(batch.micro_batches) > 1
    metrics = {name: value.value() for name, value in policy.accumulate(batch).items()}
    assert 0.02 < (metrics["router_replay_difference"] or 0) < 1
    assert (metrics["logprob_diff_max"] or 0) < 1e-4


def test_what_is_chosen_alike_is_the_same_to_the_last_bit():
    groups = sampled(mixture())
    without = policy_of(mixture(), replays=False)
    policy = policy_of(mixture())
    for one, other in zip(policy.logprobs(groups), without.logprobs(groups), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert policy.forward_backward(groups)["router_replay_difference"] == 0
    without.forward_backward(groups)
    for a, b in zip(policy.transformer.parameters(), without.transformer.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def with_other_experts(groups: Sequence[Group]) -> list[Group]:
    """The groups with experts that no router has chosen; those of a prompt are shared by its samples."""
    draw = np.random.default_rng(0)

    def drawn(tokens: int) -> np.ndarray:
        return np.stack([[draw.permutation(4)[:2] for _ in range(2)] for _ in range(tokens)])

    found = []
    for group in groups:
        prompt = drawn(len(group.prompt.token_ids))
        made = [np.concatenate([prompt, drawn(len(s.completion_ids))])[:-1] for s in group.samples]
        samples = [replace(s, routed=RoutedExperts.of(m)) for s, m in zip(group.samples, made, strict=True)]
        found.append(replace(group, samples=tuple(samples)))
    return found


@contextmanager
def plainly_routed(model: PreTrainedModel, routed: RoutedExperts) -> Iterator[None]:
    """The routers of Qwen3-MoE as its paper writes them, with these choices, for one sequence."""
    for layer, (_, router) in enumerate(routers(model)):
        chosen = torch.from_numpy(routed.chosen[:, layer].astype("int64"))

        def forward(hidden: Tensor, *, gate: Any = router, chosen: Tensor = chosen) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            probabilities = logits.float().exp() / logits.float().exp().sum(-1, keepdim=True)
            weights = torch.stack([row[picked] for row, picked in zip(probabilities, chosen, strict=True)])
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(hidden.dtype), chosen

        router.forward = forward  # type: ignore[method-assign]
    yield


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_a_plain_implementation(packing: str, checkpointing: bool):
    """On-policy the GRPO loss is -mean over samples of A times the mean of exp(logprob - its value)."""
    groups = with_other_experts(sampled(mixture(norm_topk_prob=True), routed=False, count=3))
    model, plain = mixture(norm_topk_prob=True), mixture(norm_topk_prob=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = policy_of(model, packing=packing)
    found = policy.logprobs(groups)
    samples = [(s, own) for group, logprobs in zip(groups, found, strict=True)
               for s, own in zip(group.samples, logprobs, strict=True)]  # fmt: skip
    loss = torch.zeros((), dtype=torch.float64)
    for sample, own in samples:
        assert sample.routed is not None
        with plainly_routed(plain, sample.routed):
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids[:-1]])
            log_p = plain(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 :].log_softmax(-1)
        targets = torch.tensor(sample.completion_ids)[:, None]
        logprobs = log_p.gather(-1, targets).squeeze(-1)
        assert torch.allclose(logprobs, own.double(), atol=1e-6)
        assert sample.advantage is not None
        loss = loss - sample.advantage * (logprobs - logprobs.detach()).exp().mean() / len(samples)
    loss.backward()
    known = iter(own for _, own in samples)
    on_policy = [
        replace(group, samples=tuple(replace(s, logprobs=tuple(next(known).tolist())) for s in group.samples))
        for group in groups
    ]
    policy.accumulate(pack(on_policy, max_tokens=40, share_prefixes=policy.plan.packed))
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7), name
    gate = model.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert gate is not None and gate.abs().max() > 1e-4


def test_layers_are_compiled_alike():
    """What hooks note differs from layer to layer, and torch compiles no more than eight versions of a layer."""
    groups = sampled(tiny_model("qwen3_moe", num_hidden_layers=4), count=1)
    model = tiny_model("qwen3_moe", num_hidden_layers=4, output_router_logits=True, router_aux_loss_coef=0.1)
    model.set_experts_implementation("grouped_mm")
    policy = policy_of(model)
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    torch.compiler.reset()  # of what other tests have compiled of the same functions
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        metrics = policy.forward_backward(groups)
    assert metrics["router_replay_difference"] == 0 and metrics["router_aux_loss"] > 0


def test_samples_without_routing_choose_for_themselves():
    groups = sampled(with_ties(mixture(), sign=1.0))
    first = replace(groups[0], samples=tuple(replace(s, routed=None) for s in groups[0].samples))
    policy, without = (policy_of(with_ties(mixture(), sign=-1.0), replays=replays) for replays in (True, False))
    mixed, own = policy.logprobs([first, *groups[1:]]), without.logprobs(groups)
    assert all(torch.equal(a, b) for a, b in zip(mixed[0], own[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(mixed[2], own[2], strict=True))


def test_a_reference_chooses_for_itself():
    """Also that under an adapter, whose modules are the policy's: the KL is to the model as it is."""
    groups = with_other_experts(sampled(mixture(), routed=False))
    references = []
    for lora in (True, False):
        policy = make_policy(
            options=loss_options(router_replay=True, beta=0.1), lora=lora, architecture="qwen3_moe", packing="packed"
        )
        (micro,) = pack(groups, max_tokens=1 << 20).micro_batches
        with policy._replayed(micro):
            found = policy._reference_logprobs(micro)
        assert found is not None
        references.append(found)
    assert torch.allclose(*references, atol=1e-9)
    batch = pack(groups, max_tokens=1 << 20, old_logprobs="trainer")
    (own,) = policy_of(mixture(), replays=False).recompute_logprobs(batch).micro_batches
    assert torch.allclose(own.old_logprobs, references[0], atol=1e-9)
    (replayed,) = policy_of(mixture()).recompute_logprobs(batch).micro_batches
    assert not torch.allclose(replayed.old_logprobs, references[0], atol=0.1)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
        ("deepseek_v3", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                         "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": None,
                         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}),
    ],
)  # fmt: skip
def test_routers_of_other_architectures_are_learned_by_looking(architecture: str, config: dict[str, Any]):
    model = build_other(architecture, config)
    replay, ids = RouterReplay(model), torch.arange(5, 25)[None]
    with torch.no_grad(), replay.learning():
        own = model(input_ids=ids).logits
    seen: dict[int, Tensor] = {}
    layers = [int(name.split(".")[2]) for name, _ in routers(model)]
    for layer, (_, router) in zip(layers, routers(model), strict=True):
        router.register_forward_hook(lambda module, args, output, layer=layer: seen.update({layer: output[2]}))
    with torch.no_grad():
        model(input_ids=ids)
    given = torch.zeros((20, 2, 2), dtype=torch.int16)
    for layer in layers:
        given[:, layer] = seen[layer].to(torch.int16)
    with torch.no_grad(), replay.replaying(given.flip(-1), counting=True):
        again = model(input_ids=ids).logits
    assert torch.allclose(again, own, atol=1e-5)
    assert replay.take()["router_replay_difference"].value() == 0
    with torch.no_grad(), replay.replaying((given + 1) % 4):
        assert not torch.allclose(model(input_ids=ids).logits, own, atol=1e-3)


def build_other(architecture: str, config: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.25}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoConfig.for_model(architecture, **(sizes | config), experts_implementation="eager")
        return AutoModelForCausalLM.from_config(made).eval()


class TestRefused:
    def test_a_dense_model(self):
        with pytest.raises(ModelError, match="not a mixture of experts"):
            RouterReplay(tiny_model("qwen2"))

    def test_a_mixture_whose_routers_are_not_known(self, monkeypatch: pytest.MonkeyPatch):
        model = mixture()
        for part in (model, model.model):
            monkeypatch.setattr(type(part), "_can_record_outputs", {})
        with pytest.raises(ModelError, match="where its routers are"):
            RouterReplay(model)

    def test_a_router_that_weighs_otherwise(self):
        model = mixture()
        for _, router in routers(model):
            router.register_forward_hook(lambda module, args, output: (output[0], output[1].square(), output[2]))
        replay = RouterReplay(model)
        named = r"model\.layers\.0\.mlp\.gate weights experts by an unknown formula"
        with pytest.raises(ModelError, match=named), replay.learning():
            model(input_ids=torch.arange(5)[None])

    @pytest.mark.parametrize("shape", [(5, 1, 2), (5, 2, 3)], ids=["fewer layers", "more of each token"])
    def test_experts_of_another_model(self, shape: tuple[int, ...]):
        policy = policy_of(mixture())
        assert policy.replay is not None
        with pytest.raises(TrainingError, match="layer 1 of Qwen3MoeForCausalLM chooses 2"):
            policy.replay.replaying(torch.zeros(shape, dtype=torch.int16)).__enter__()

    def test_a_router_that_gives_something_else(self):
        model = mixture()
        for _, router in routers(model):
            router.register_forward_hook(lambda module, args, output: output[:2])
        replay = RouterReplay(model)
        with pytest.raises(ModelError, match="does not return logits, weights and chosen experts"), replay.learning():
            model(input_ids=torch.arange(5)[None])
