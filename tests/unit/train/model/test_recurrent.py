"""Recurrent layers over packed trees of sequences, against passes of one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from lachesis.common.errors import ModelError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.batch import MicroBatch, pack
from lachesis.train.model import recurrent
from lachesis.train.model.forward import plan_forward, target_logprobs
from tests.tiny import tiny_model
from tests.unit.train.model.test_forward import plain_logprobs

HYBRIDS = ["qwen3_5_text", "kimi_linear", "nemotron_h", "falcon_h1", "lfm2"]


def branching_groups() -> list[Group]:
    """Return a group whose samples part after a turn, one with a prompt of one token, and one of a sample alone."""
    generator = torch.Generator().manual_seed(0)
    tokens = lambda count: tuple(torch.randint(3, 90, (count,), generator=generator).tolist())  # noqa: E731
    turn = tokens(30)
    answers = [
        (tokens(70), [turn + tokens(2), turn + tokens(75), turn[:1] + tokens(9), turn]),
        (tokens(1), [tokens(3), tokens(40)]),
        (tokens(9), [tokens(5)]),
    ]
    return [
        Group(
            Prompt(str(number), prompt, ""),
            tuple(
                Sample(prompt, ids, (-1.0,) * len(ids), "stop", VersionSpan(0, 0), advantage=1.0) for ids in completions
            ),
        )
        for number, (prompt, completions) in enumerate(answers)
    ]


def gradients(model, total: torch.Tensor) -> dict[str, torch.Tensor]:
    total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def micro_batch(*, share_prefixes: bool = True) -> MicroBatch:
    (micro,) = pack(branching_groups(), max_tokens=1 << 20, share_prefixes=share_prefixes).micro_batches
    return micro


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_logprobs_and_gradients_equal_those_of_one_sequence_at_a_time(architecture, checkpointing):
    model, micro = tiny_model(architecture), micro_batch()
    plan = plan_forward(model, packing="packed")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    found = target_logprobs(model, micro, plan=plan).logprobs[micro.expand]
    rows = [found[micro.row == row] for row in range(micro.advantages.numel())]
    ids = [tuple(micro.targets[micro.expand][micro.row == row].tolist()) for row in range(len(rows))]
    ours = gradients(model, sum((row * torch.arange(len(row)).cos()).sum() for row in rows))
    model.gradient_checkpointing_disable()
    plain = {s.completion_ids: plain_logprobs(model, s) for group in branching_groups() for s in group.samples}
    theirs = gradients(model, sum((row * torch.arange(len(row)).cos()).sum() for row in plain.values()))
    for row, completion in zip(rows, ids, strict=True):
        torch.testing.assert_close(row, plain[completion], rtol=0, atol=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 2e-4 * gradient.norm(), name


def test_a_prompt_and_a_shared_turn_go_through_the_model_once():
    micro = micro_batch()
    starts, before = recurrent._runs(micro)
    lengths = [*torch.cat([starts, torch.tensor([micro.num_inputs])]).diff().tolist()]
    assert sum(lengths) == 70 + 30 + 1 + 74 + 8 + 1 + 2 + 39 + 9 + 4
    roots = [length for length, place in zip(lengths, before, strict=True) if place < 0]
    assert sorted(roots) == [1, 9 + 4, 70 + 1]  # the last: all four samples begin with the same token


@pytest.mark.parametrize("end_to_end", [False, True])
def test_each_token_is_scanned_once_and_after_what_it_continues(end_to_end):
    micro = micro_batch()
    plan = recurrent.plan_runs(micro, ways=recurrent.RunWays(tail=3, end_to_end=end_to_end))
    stream = torch.arange(micro.num_inputs)
    scanned = torch.cat([rows.lay(stream).flatten() for rows in plan.rows])
    assert scanned[plan.unscan].tolist() == stream.tolist()
    done = 0
    for rows in plan.rows:
        assert rows.parents is None or int(rows.parents.max()) < done
        assert (rows.bounds is not None) == end_to_end
        done += rows.shape[0] if rows.bounds is None else len(rows.bounds) - 1
    zeros = torch.cat([stream, torch.tensor([-1])])
    assert zeros[plan.tailed][plan.untail].tolist() == stream.tolist()


def test_what_a_convolution_sees_is_of_the_own_sequence():
    """A run's tail goes on in the runs before it, and is zeros before the beginning of a sequence."""
    micro = micro_batch()
    plan = recurrent.plan_runs(micro, ways=recurrent.RunWays(tail=3, end_to_end=False))
    ids = torch.cat([micro.input_ids, torch.tensor([-1])])[plan.tailed]
    tails = {tuple(ids[place - 3 : place + 1].tolist()) for place in plan.untail.tolist()}
    for group in branching_groups():
        for sample in group.samples:
            sequence = (-1, -1, -1, *sample.prompt_ids, *sample.completion_ids[:-1])
            assert {sequence[i : i + 4] for i in range(len(sequence) - 3)} <= tails


def test_rows_that_end_keep_their_state():
    """Scanning a row beyond its end leaves its final state as it was, which its completions continue from."""
    model = tiny_model("falcon_h1")
    plan = plan_forward(model, packing="packed")
    assert plan.recurrent == recurrent.RunWays(tail=3, end_to_end=False)
    alone = pack(branching_groups()[:1], max_tokens=1 << 20).micro_batches[0]
    with torch.no_grad():
        beside = target_logprobs(model, micro_batch(), plan=plan).logprobs[: alone.targets.numel()]
        torch.testing.assert_close(beside, target_logprobs(model, alone, plan=plan).logprobs, rtol=0, atol=1e-5)


def test_generation_is_unchanged_by_the_packed_layers():
    ids = torch.tensor([[5, 6, 7, 8]])
    before = tiny_model("qwen3_5_text").generate(ids, max_new_tokens=6, do_sample=False)
    model = tiny_model("qwen3_5_text")
    plan_forward(model, packing="packed")
    assert model.generate(ids, max_new_tokens=6, do_sample=False).tolist() == before.tolist()


def test_context_parallelism_is_refused_in_words():
    context: object = object()
    with pytest.raises(ModelError, match=r"recurrent layers .* the state after .*context_parallel_size"):
        plan_forward(tiny_model("lfm2"), packing="auto", context=context)  # type: ignore[arg-type]


def test_models_without_recurrent_layers_have_no_plan_for_them():
    assert recurrent.ways_of(tiny_model("qwen3"), torch.device("cpu")) == ()
