"""Trajectories of several turns that overlap: as a tree they give what they give one by one, for fewer tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.batch import pack, split
from tests.losses import loss_options
from tests.unit.train.test_policy import make_policy

ARCHITECTURES = ["qwen2", "mistral", "gemma2", "qwen3_moe"]  # full attention, sliding windows, softcaps, experts


def turn(before: tuple[int, ...], own: tuple[int, ...], **fields) -> Sample:
    fields = {"advantage": 1.0} | fields
    return Sample(before, own, tuple(-1.0 - 0.1 * i for i in range(len(own))), "stop", VersionSpan(0, 0), **fields)


def trajectories(count: int, turns: int, *, joined: bool = False, seed: int = 0) -> Group:
    """A group of rollouts of one prompt: the next prompt continues the last turn, and some rollouts split off.

    Each turn is a sample; with ``joined`` each rollout is one, with a mask.
    """
    draw = random.Random(seed)
    tokens = lambda: tuple(draw.randint(3, 40) for _ in range(draw.randint(1, 3)))  # noqa: E731
    prompt = tokens()
    played: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    samples = []
    for number in range(count):
        own = list(played[-1][: draw.randint(0, turns)]) if played and number % 2 else []
        while len(own) < turns:
            own.append((own[-1][0] + own[-1][1] + tokens() if own else prompt, tokens()))
        played.append(own)
        advantage = 0.5 - number
        if not joined:
            samples += [turn(*one, advantage=advantage, temperature=0.8) for one in own]
            continue
        whole = own[-1][0] + own[-1][1]
        sampled = {len(before) + i for before, said in own for i in range(len(said))}
        mask = tuple(int(place in sampled) for place in range(len(prompt), len(whole)))
        samples.append(turn(prompt, whole[len(prompt) :], mask=mask, advantage=advantage, temperature=0.8))
    return Group(Prompt(str(seed), prompt, ""), tuple(samples))


def prefixes(groups) -> int:
    """Distinct inputs by brute force: the last token of a sample is none."""
    found = {(g.prompt.id, whole[:n]) for g in groups for s in g.samples
             for whole in [s.prompt_ids + s.completion_ids[:-1]] for n in range(1, len(whole) + 1)}  # fmt: skip
    return len(found)


def test_eight_trajectories_of_ten_turns_compute_their_distinct_tokens():
    groups = [trajectories(8, 10, seed=seed) for seed in range(3)]
    batch = pack(groups, max_tokens=1 << 20)
    (micro,) = batch.micro_batches
    assert micro.num_inputs == batch.distinct_tokens == prefixes(groups)
    assert batch.flat_tokens == sum(len(s.prompt_ids) + len(s.completion_ids) - 1 for g in groups for s in g.samples)
    assert batch.flat_tokens > 7 * batch.distinct_tokens


@pytest.mark.parametrize("seed", range(10))
def test_cost_is_linear(seed: int):
    """However a tree branches it has the keys of its leaves: a turn that the next prompt continues costs none."""
    group = trajectories(6, 5, seed=seed)
    (micro,) = pack([group], max_tokens=1 << 20).micro_batches
    inputs = {sample.prompt_ids + sample.completion_ids[:-1] for sample in group.samples}
    leaves = [one for one in inputs if not any(one == other[: len(one)] for other in inputs - {one})]
    assert micro.cu_seq_q.numel() - 1 == len(leaves)
    assert int(micro.cu_seq_k[-1]) == sum(len(one) for one in leaves)


def test_predictions_that_sequences_have_in_common_are_made_once():
    """One position, token and temperature is one prediction: the head is the dearest part of a small model."""
    first, second = turn((1, 2), (3, 4, 5)), turn((1, 2), (3, 4, 6, 7))
    (micro,) = pack([Group(Prompt("0", (1, 2), ""), (first, second))], max_tokens=100).micro_batches
    assert micro.input_ids.tolist() == [1, 2, 3, 4, 6]
    assert micro.targets.tolist() == [3, 4, 5, 6, 7]
    assert micro.expand is not None
    assert micro.targets[micro.expand].tolist() == [3, 4, 5, 3, 4, 6, 7]
    assert micro.row.tolist() == [0] * 3 + [1] * 4
    cooler = Group(Prompt("0", (1, 2), ""), (first, replace(second, temperature=0.5)))
    (micro,) = pack([cooler], max_tokens=100).micro_batches
    assert micro.predict.numel() == 7 and micro.num_inputs == 5


def test_trajectories_of_another_prompt_share_nothing_and_are_cut_apart():
    samples = (turn((1, 2), (3, 4)), turn((9, 2), (3, 4)), turn((1, 2, 3, 4, 5), (6, 7)))
    batch = pack([Group(Prompt("0", (1, 2), ""), samples)], max_tokens=6)
    assert sorted(micro.input_ids.tolist() for micro in batch.micro_batches) == [[1, 2, 3, 4, 5, 6], [9, 2, 3]]


def test_ranks_count_a_step_once():
    batch = pack([trajectories(3, 3, seed=seed) for seed in range(4)], max_tokens=20)
    parts = split(batch, 3)
    assert [sum(getattr(part, name) for part in parts) for name in ("distinct_tokens", "flat_tokens")] == [
        batch.distinct_tokens, batch.flat_tokens,
    ]  # fmt: skip


def gradients(architecture: str, groups, **pack_options) -> tuple[dict[str, torch.Tensor], float]:
    policy = make_policy(options=loss_options(loss_type="dapo"), architecture=architecture)
    assert policy.plan.packed
    batch = pack(groups, **pack_options)
    metrics = policy.accumulate(batch)
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}, metrics[
        "loss"
    ].value()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_flat_rows(architecture: str, joined: bool):
    groups = [trajectories(5, 3, joined=joined, seed=seed) for seed in range(2)]
    flat, flat_loss = gradients(architecture, groups, max_tokens=1 << 20, share_prefixes=False)
    for max_tokens in (1 << 20, 30):
        tree, tree_loss = gradients(architecture, groups, max_tokens=max_tokens)
        assert tree_loss == pytest.approx(flat_loss, rel=1e-6, abs=1e-9)
        assert tree.keys() == flat.keys() and max(g.abs().max() for g in flat.values()) > 1e-3
        for name, gradient in flat.items():
            torch.testing.assert_close(tree[name], gradient, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_metrics_say_what_the_tree_saves():
    policy = make_policy(options=loss_options(loss_type="dapo"))
    groups = [trajectories(4, 4)]
    found = policy.forward_backward(groups)
    assert found["tokens_forward"] == found["tokens_distinct"] == prefixes(groups)
    assert found["tokens_flat"] > 3 * found["tokens_distinct"]
    assert not math.isnan(found["loss"])
