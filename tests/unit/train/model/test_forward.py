"""Packed forward passes against plain ones, sequence by sequence, over architectures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lachesis.common.errors import ModelError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.batch import pack
from lachesis.train.model import attention, forward
from lachesis.train.model.forward import plan_forward, target_logprobs
from tests.tiny import VOCAB_SIZE, tiny_model

PACKED = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2", "deepseek_v3", "gpt_oss", "llama4_text", "stablelm"]
PADDED = ["bloom", "mamba"]


def random_groups(*, groups: int, samples: int, longest: int, seed: int = 0) -> list[Group]:
    generator = torch.Generator().manual_seed(seed)
    tokens = lambda n: tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist())  # noqa: E731
    length = lambda: int(torch.randint(1, longest + 1, (1,), generator=generator))  # noqa: E731
    made = []
    for g in range(groups):
        prompt = tokens(length())
        drawn = [tokens(length()) for _ in range(samples)]
        drawn[-1] = drawn[0]  # a group often has the same answer twice
        made.append(
            Group(
                Prompt(str(g), prompt, ""),
                tuple(
                    Sample(
                        prompt, ids, (-1.0,) * len(ids), "stop", VersionSpan(0, 0), advantage=0.5 - i, temperature=0.8
                    )
                    for i, ids in enumerate(drawn)
                ),
            )
        )
    return made


def plain_logprobs(model, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    log_p = (model(input_ids=ids, use_cache=False).logits[0] / sample.temperature).log_softmax(-1)
    start = len(sample.prompt_ids)
    return log_p[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)


def check_against_plain(model, groups: list[Group], *, max_tokens: int) -> None:
    expected = {(s.prompt_ids, s.completion_ids): plain_logprobs(model, s) for g in groups for s in g.samples}
    plan = plan_forward(model, packing="auto")
    compared = 0
    for micro in pack(groups, max_tokens=max_tokens, share_prefixes=plan.packed).micro_batches:
        found = target_logprobs(model, micro, plan=plan).logprobs
        found = found if micro.expand is None else found[micro.expand]
        targets = micro.targets if micro.expand is None else micro.targets[micro.expand]
        for row in range(micro.advantages.numel()):
            ids = tuple(targets[micro.row == row].tolist())
            candidates = [value for (_, completion), value in expected.items() if completion == ids]
            errors = [float((found[micro.row == row] - value).abs().max()) for value in candidates]
            assert min(errors) < 2e-4, (row, ids, errors)
            compared += 1
    assert compared == sum(len(group.samples) for group in groups)


@torch.no_grad()
@pytest.mark.parametrize("architecture", PACKED + PADDED)
def test_logprobs_equal_those_of_plain_passes(architecture):
    model = tiny_model(architecture)
    check_against_plain(model, random_groups(groups=4, samples=4, longest=9), max_tokens=60)
    plan = plan_forward(model, packing="auto")
    assert plan.packed == (architecture in PACKED)
    assert f"{type(model).__name__} trains {'packed' if plan.packed else 'padded'}, " in plan.told
    assert plan.packed or "; rejected: " in plan.told


def test_sparse_attention_is_compared_without_padding_whose_scores_are_all_equal():
    """DeepSeek V3.2's indexer chooses 8 tokens; that of padding, whose embedding is zeros, among equal scores."""
    fields = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 24, "head_dim": 8, "pad_token_id": 0}
    model = tiny_model("deepseek_v32", **fields)
    assert not model.get_input_embeddings().weight[0].any()
    check_against_plain(model, random_groups(groups=2, samples=3, longest=20), max_tokens=400)


def test_the_softcap_that_sdpa_leaves_out_is_applied():
    model = tiny_model("gemma2", attn_logit_softcapping=0.1)
    ids = torch.arange(5, 15)[None]
    model.set_attn_implementation("sdpa")
    without = model(input_ids=ids).logits
    model.set_attn_implementation("eager")
    right = model(input_ids=ids).logits
    model.set_attn_implementation("sdpa")
    plan_forward(model, packing="auto")
    torch.testing.assert_close(model(input_ids=ids).logits, right, rtol=1e-4, atol=1e-4)
    assert (without - right).abs().max() > 0.01


@torch.no_grad()
def test_many_lengths_are_cut_into_buckets_and_still_right():
    model = tiny_model("llama", max_position_embeddings=256)
    groups = random_groups(groups=6, samples=6, longest=90, seed=1)
    (micro,) = pack(groups, max_tokens=1 << 20).micro_batches
    assert len(attention.plan_buckets(micro).buckets) > 2
    check_against_plain(model, groups, max_tokens=1 << 20)


def test_generation_is_unchanged_by_the_packed_attention():
    ids = torch.tensor([[5, 6, 7, 8]])
    before = tiny_model("mistral").generate(ids, max_new_tokens=8, do_sample=False)
    model = tiny_model("mistral")
    plan_forward(model, packing="packed")
    assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == before.tolist()


@torch.no_grad()
def test_left_padding_under_a_softcap_stays_finite():
    model = tiny_model("gemma2")
    plan_forward(model, packing="packed")
    ids, mask = torch.tensor([[0, 0, 7, 8], [5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    padded = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits[0, 2:]
    torch.testing.assert_close(padded, model(input_ids=ids[:1, 2:]).logits[0], rtol=1e-4, atol=1e-4)


def test_a_model_whose_attention_cannot_be_replaced_says_so_when_packing_is_asked_for():
    with pytest.raises(ModelError, match=r"Mamba.*model\.packing: auto"):
        plan_forward(tiny_model("mamba"), packing="packed")


@torch.no_grad()
def test_attention_that_mixes_sequences_is_found_out(monkeypatch):
    """The probe would see an attention that ignores segments, and fall back to padded rows."""

    def ignores_segments(module, query, key, value, mask, *, scaling=None, **kwargs):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    monkeypatch.setattr(attention, "packed_attention", ignores_segments)
    assert not plan_forward(tiny_model("llama"), packing="auto").packed


@torch.no_grad()
def test_a_keyword_that_packed_attention_does_not_know_rules_it_out(monkeypatch):
    model, plain = tiny_model("llama"), attention.packed_attention

    def with_a_bias(*positional, **keywords):
        return plain(*positional, **keywords, head_bias=torch.zeros(4))

    monkeypatch.setattr(attention, "packed_attention", with_a_bias)
    with pytest.raises(ModelError, match="cannot train on packed sequences"):
        plan_forward(model, packing="packed")
    assert not plan_forward(model, packing="auto").packed


@torch.no_grad()
@pytest.mark.parametrize("error", [IndexError("out of range"), AssertionError("no such thing"), ZeroDivisionError()])
def test_a_way_of_running_that_raises_is_one_that_differs(monkeypatch, error: Exception):
    def raises(*positional, packed_plan=None, **keywords):
        if packed_plan is not None:
            raise error
        return plain(*positional, **keywords)

    plain = attention.packed_attention
    monkeypatch.setattr(attention, "packed_attention", raises)
    assert not plan_forward(tiny_model("llama"), packing="auto").packed


def rounds_by_rows(model, *, scale: float) -> None:
    """Few rows go through another kernel than many, and come out a little different."""

    def other_kernel(layer, inputs, output):
        few = inputs[0].shape[:-1].numel() < 8
        return output * (1 + scale) if few else output

    model.lm_head.register_forward_hook(other_kernel)


@torch.no_grad()
def test_what_is_rounding_is_seen_in_the_model_itself():
    model = tiny_model("llama").to(torch.bfloat16)
    rounds_by_rows(model, scale=0.05)  # about 0.2 of a logprob: more than the probe lets pass elsewhere
    assert plan_forward(model, packing="auto").packed
    assert plan_forward(tiny_model("llama").to(torch.bfloat16), packing="auto").packed


@torch.no_grad()
def test_more_than_rounding_is_refused_with_what_was_tried():
    model = tiny_model("llama").to(torch.bfloat16)
    rounds_by_rows(model, scale=0.3)
    with pytest.raises(
        ModelError,
        match=r"padded \(attention bucketed, head chunked: logprobs differ by .*, more than the allowed 0\.6",
    ):
        plan_forward(model, packing="auto")


def loud(architecture: str):
    """A model of 16 bits whose logits are so large that their rounding is more than a wrong way makes elsewhere."""
    model = tiny_model(architecture).to(torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(64)
    model.model.norm.register_forward_hook(rounds_by_place)
    return model


def rounds_by_place(module, args, output):
    """Round 16 bits otherwise for each place of a batch, as kernels of some processors do, and of others do not."""
    if output.dtype is not torch.bfloat16:
        return output
    places = torch.arange(output[..., 0].numel()).view_as(output[..., 0])
    return output * (1 + 0.02 * torch.cos(1.7 * places)).to(output.dtype).unsqueeze(-1)


@torch.no_grad()
def test_rounding_of_large_logits_is_no_reason_to_refuse(monkeypatch):
    assert plan_forward(loud("llama"), packing="auto").packed
    monkeypatch.setattr(forward, "has_float32", lambda model: False)
    with pytest.raises(ModelError, match="could not be reproduced"):
        plan_forward(loud("llama"), packing="auto")


def one_position_late(monkeypatch) -> None:
    plain = forward._packed

    def late(module, micro, *, plan):
        first = micro.input_ids.new_tensor([0])
        lasts = torch.cat([micro.cu_seq_q[1:-1].long(), first])  # the first token of each segment after the first
        positions = micro.position_ids.clone()
        positions[lasts[lasts > 0]] += 1
        return plain(module, replace(micro, position_ids=positions), plan=plan)

    monkeypatch.setattr(forward, "_packed", late)


def window_one_too_wide(monkeypatch) -> None:
    plain = attention._narrowed
    wider = lambda *shape, window, chunk: plain(*shape, window=window and window + 1, chunk=chunk)  # noqa: E731
    monkeypatch.setattr(attention, "_narrowed", wider)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "fault"),
    [("llama", one_position_late), ("gemma2", window_one_too_wide), ("mistral", window_one_too_wide)],
)
@pytest.mark.parametrize("make", [loud, lambda architecture: tiny_model(architecture).to(torch.bfloat16)])
def test_small_faults_are_found_in_16_bits_too(monkeypatch, architecture: str, fault, make):
    assert plan_forward(make(architecture), packing="auto").packed
    fault(monkeypatch)
    plan = plan_forward(make(architecture), packing="auto")
    assert not plan.packed
    assert "attention bucketed, head chunked: logprobs differ by" in plan.told
    assert "more than the allowed 0.001" in plan.told


def test_weights_that_are_no_numbers_are_named_before_ways_are_compared():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="the logits of LlamaForCausalLM have NaN"):
        plan_forward(model, packing="auto")


def test_a_model_that_transformers_cannot_run_is_named(monkeypatch):
    model = tiny_model("qwen2")
    monkeypatch.setattr(model, "forward", lambda **_: torch.ones(4) + torch.ones(8))
    with pytest.raises(ModelError, match="cannot be run by transformers on text: RuntimeError: The size"):
        plan_forward(model, packing="padded")
