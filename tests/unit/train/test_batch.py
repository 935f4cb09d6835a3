"""Packing: what stands in a micro-batch, and that nothing is lost, whatever the budget and over however many ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from lachesis.common.errors import TrainingError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.batch import Batch, MicroBatch, MicroBatches, collect, deal, idle_micro_batch, pack, split
from lachesis.train.packing import PASS_TOKENS, passes_cost
from tests.unit.train.model.test_forward import random_groups


def sample(prompt, completion, *, advantage=1.0, mask=None, logprob=-1.0, temperature=1.0, finish_reason="stop"):
    return Sample(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(logprob - i for i in range(len(completion))),
        finish_reason=finish_reason,
        versions=VersionSpan(0, 0),
        mask=mask,
        advantage=advantage,
        temperature=temperature,
    )


def group(*samples):
    return Group(Prompt("0", samples[0].prompt_ids, ""), tuple(samples))


def sequences(micro: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """For each row: all tokens that its last prediction sees, and its targets. Rebuilt from the segments."""
    keys = micro.key_index if micro.key_index is not None else torch.arange(micro.num_inputs)
    seen = {}
    for g in range(micro.cu_seq_q.numel() - 1):
        q = range(int(micro.cu_seq_q[g]), int(micro.cu_seq_q[g + 1]))
        k = keys[int(micro.cu_seq_k[g]) : int(micro.cu_seq_k[g + 1])].tolist()
        for i, position in enumerate(q):
            visible = k[: len(k) - len(q) + i + 1]
            seen[position] = micro.input_ids[visible].tolist()
            assert micro.position_ids[position] == len(visible) - 1
    expand = micro.expand if micro.expand is not None else torch.arange(micro.predict.numel())
    rows = []
    for row in range(micro.advantages.numel()):
        tokens = expand[micro.row == row].tolist()
        rows.append((seen[int(micro.predict[tokens[-1]])], micro.targets[tokens].tolist()))
    return rows


def test_prompt_stands_once_and_completions_see_only_it_and_themselves():
    batch = pack([group(sample([1, 2, 3], [4, 5, 6]), sample([1, 2, 3], [7, 8]))], max_tokens=100)
    (micro,) = batch.micro_batches
    assert micro.input_ids.tolist() == [1, 2, 3, 4, 5, 7]
    assert sequences(micro) == [([1, 2, 3, 4, 5], [4, 5, 6]), ([1, 2, 3, 7], [7, 8])]
    assert micro.sampling_logprobs.tolist() == [-1, -2, -3, -1, -2]


def test_equal_completions_are_computed_once_and_counted_each():
    twins = [sample([1, 2], [3, 4], advantage=1.0), sample([1, 2], [3, 4], advantage=-0.5), sample([1, 2], [5])]
    batch = pack([group(*twins)], max_tokens=100)
    (micro,) = batch.micro_batches
    assert micro.input_ids.tolist() == [1, 2, 3]
    assert micro.predict.numel() == 3 and micro.row.numel() == 5
    assert batch.num_sequences == 3 and batch.num_tokens == 5
    assert micro.advantages.tolist() == [1.0, 1.0, -0.5], "the one that is the beginning of the others comes first"


def test_samples_at_another_temperature_or_mask_are_no_duplicates():
    different = [sample([1], [3, 4]), sample([1], [3, 4], temperature=0.5), sample([1], [3, 4], mask=(1, 0))]
    (micro,) = pack([group(*different)], max_tokens=100).micro_batches
    assert micro.inverse_temperature.tolist() == [1, 1, 2, 2]
    assert micro.expand is not None and micro.expand.tolist() == [0, 1, 2, 3, 0], "what they predict alike is one"


@pytest.mark.parametrize("max_tokens", [1, 7, 12, 1000])
@pytest.mark.parametrize("max_rows", [None, 1, 3])
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_every_sequence_is_there_once_whatever_the_limits(max_tokens, max_rows, share_prefixes):
    groups = [group(*(sample([g, g + 1, g + 2], [10 * g + i, *range(i)]) for i in range(4))) for g in range(1, 4)]
    batch = pack(groups, max_tokens=max_tokens, max_rows=max_rows, share_prefixes=share_prefixes)
    found = sorted(row for micro in batch.micro_batches for row in sequences(micro))
    expected = sorted(
        ([*s.prompt_ids, *s.completion_ids[:-1]], list(s.completion_ids)) for g in groups for s in g.samples
    )
    assert found == expected
    for micro in batch.micro_batches:
        alone = micro.advantages.numel() == 1
        assert alone or micro.num_inputs <= max_tokens
        assert max_rows is None or micro.advantages.numel() <= max_rows


def test_masked_tokens_are_context_but_not_predicted():
    (micro,) = pack([group(sample([1, 2], [3, 4, 5], mask=(1, 0, 1)))], max_tokens=100).micro_batches
    assert micro.input_ids.tolist() == [1, 2, 3, 4]
    assert micro.targets.tolist() == [3, 5]
    assert micro.predict.tolist() == [1, 3]


def test_sequences_without_advantage_are_left_out_but_counted():
    samples = [sample([1], [2, 3], advantage=0.0), sample([1], [4, 5], advantage=1.0)]
    batch = pack([group(*samples)], max_tokens=100, skip_zero_advantage=True)
    assert batch.skipped_sequences == 1
    assert (batch.num_sequences, batch.num_tokens) == (2, 4)
    assert [m.targets.tolist() for m in batch.micro_batches] == [[4, 5]]
    assert pack([group(*samples)], max_tokens=100).skipped_sequences == 0


def test_tool_output_in_several_turns_is_context_for_what_follows():
    """With a shared prompt too: each sampled token is predicted by the token before it, whoever wrote that."""
    turns = sample([1, 2], [3, 4, 50, 51, 5, 52, 6], mask=(1, 1, 0, 0, 1, 0, 1))
    other = sample([1, 2], [60, 7], mask=(0, 1))
    (micro,) = pack([group(turns, other)], max_tokens=100).micro_batches
    assert micro.targets.tolist() == [3, 4, 5, 6, 7]
    assert micro.input_ids[micro.predict].tolist() == [2, 3, 51, 52, 60]
    assert sequences(micro) == [([1, 2, 3, 4, 50, 51, 5, 52], [3, 4, 5, 6]), ([1, 2, 60], [7])]
    assert micro.sampling_logprobs.tolist() == [-1, -2, -5, -7, -2]
    assert micro.row.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_each_sample_has_its_own_temperature(share_prefixes):
    samples = [sample([1, 2], [3], temperature=t) for t in (0.5, 2.0, 0.0)]
    batch = pack([group(*samples)], max_tokens=100, share_prefixes=share_prefixes)
    values = torch.cat([micro.inverse_temperature for micro in batch.micro_batches]).tolist()
    assert values == [2.0, 0.5, 1.0], "greedy samples have the logprobs of temperature 1"


def test_truncated_completions_do_not_count_where_asked():
    """Their rows count in the mean over sequences, as in TRL; their rewards have made the advantages before."""
    samples = [sample([1], [2, 3], finish_reason="length"), sample([1], [4], finish_reason="abort"), sample([1], [5])]
    batch = pack([group(*samples)], max_tokens=100, mask_truncated=True)
    assert [micro.targets.tolist() for micro in batch.micro_batches] == [[5]]
    assert (batch.num_sequences, batch.num_tokens, batch.skipped_sequences) == (3, 1, 0)
    assert pack([group(*samples)], max_tokens=100).num_tokens == 4


def test_a_step_of_truncated_completions_is_an_empty_one():
    batch = pack([group(sample([1], [2], finish_reason="length"))], max_tokens=10, mask_truncated=True)
    assert (len(batch.micro_batches), batch.num_sequences, batch.num_tokens) == (0, 1, 0)


@pytest.mark.parametrize("max_rows", [1, 2])
def test_equal_completions_go_through_the_model_as_one_row(max_rows):
    samples = [sample([1, 2], [3, 4])] * 5 + [sample([1, 2], [5])]
    batch = pack([group(*samples)], max_tokens=100, max_rows=max_rows)
    assert [micro.row.numel() for micro in batch.micro_batches] == ([10, 1] if max_rows == 1 else [11])


@pytest.mark.parametrize(
    ("malformed", "message"),
    [
        (replace(sample([1], [2, 3]), logprobs=(-1.0,)), "has 1 logprobs and a mask of 2"),
        (sample([1], [2, 3], mask=(1,)), "has 2 logprobs and a mask of 1"),
        (sample([], [2, 3]), "0 prompt and 2 completion tokens"),
    ],
)
def test_malformed_samples_are_refused(malformed, message):
    with pytest.raises(TrainingError, match=message):
        pack([group(malformed)], max_tokens=10)


def test_nothing_to_learn_from_is_an_error():
    with pytest.raises(TrainingError, match="none of the 1 groups"):
        pack([group(sample([1, 2], [3], mask=(0,)))], max_tokens=10)


def test_unknown_behaviour_logprobs_stay_nan():
    (micro,) = pack([group(sample([1], [2], logprob=math.nan))], max_tokens=10).micro_batches
    assert micro.sampling_logprobs.isnan().all()


def cost(batch: Batch, ranks: int) -> int:
    return passes_cost([micro.num_inputs for micro in batch.micro_batches], ranks)


DEALT = random_groups(groups=5, samples=4, longest=8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50])
def test_parts_are_the_whole(ranks: int):
    batch = pack(DEALT, max_tokens=20)
    parts = split(batch, ranks)
    assert len(parts) == ranks
    assert collect([part.micro_batches for part in parts]) == list(batch.micro_batches)
    counts = [len(part.micro_batches) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert sum(part.num_sequences for part in parts) == batch.num_sequences
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert parts[0].groups == batch.groups
    assert all(part.groups == () for part in parts[1:])


def test_uses_of_a_batch_are_told():
    batch = replace(pack(DEALT, max_tokens=20), iteration=1, num_iterations=3)
    assert {(part.iteration, part.num_iterations) for part in split(batch, 2)} == {(1, 3)}


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_what_is_dealt_is_collected_in_its_order(count: int):
    assert collect(deal(list(range(count)), 3)) == list(range(count))


def test_a_pass_takes_as_long_as_its_largest():
    sizes = [20, 20, 18, 7]
    assert passes_cost(sizes, 1) == sum(sizes) + 4 * PASS_TOKENS
    assert passes_cost(sizes, 2) == 20 + 18 + 2 * PASS_TOKENS
    assert passes_cost(sizes, 4) == passes_cost(sizes, 5) == 20 + PASS_TOKENS


def test_one_micro_batch_is_cut_for_the_ranks_that_would_have_none():
    alone = pack(DEALT, ranks=1, max_tokens=1 << 20)
    assert len(alone.micro_batches) == 1
    halves = pack(DEALT, ranks=2, max_tokens=1 << 20)
    assert len(halves.micro_batches) >= 2
    assert cost(halves, 2) < cost(alone, 2)
    assert (halves.num_tokens, halves.num_sequences) == (alone.num_tokens, alone.num_sequences)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("max_tokens", [15, 30, 60, 200])
def test_micro_batches_for_ranks_are_within_the_budget_and_never_slower(ranks: int, max_tokens: int):
    plain, found = (pack(DEALT, ranks=n, max_tokens=max_tokens) for n in (1, ranks))
    assert all(micro.num_inputs <= max_tokens for micro in found.micro_batches)
    assert cost(found, ranks) <= cost(plain, ranks)


def test_nothing_to_learn_is_no_micro_batch():
    from tests.unit.train.test_policy import without_advantage

    packed = pack(without_advantage(DEALT), ranks=2, max_tokens=100, skip_zero_advantage=True)
    assert len(packed.micro_batches) == 0


def test_a_micro_batch_is_made_when_it_is_read_and_then_kept():
    made: list[int] = []
    lazy = MicroBatches([cache(lambda i=i: made.append(i) or idle_micro_batch()) for i in range(4)])
    assert (len(lazy), [len(part) for part in deal(lazy, 3)], made) == (4, [2, 1, 1], [])
    odd = lazy[1::2]
    assert odd[1] is lazy[3] is odd[-1]
    assert made == [3]
    assert [*lazy] == [*lazy]
    assert made == [3, 0, 1, 2]
    with pytest.raises(IndexError):
        lazy[4]
