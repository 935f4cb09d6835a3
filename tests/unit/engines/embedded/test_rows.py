"""Batches, branching and the recording of sequences."""

from __future__ import annotations

import numpy as np

from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.embedded.rows import BatchRows, Share, branch, plan_batches


def request(length: int, n: int, **params) -> GenerationRequest:
    return GenerationRequest(tuple(range(3, 3 + length)), SamplingParams(**({"max_tokens": 4} | params)), n=n)


def shapes(batches: list[list[Share]]) -> list[list[tuple[int, int, int]]]:
    return [[(share.index, share.first, share.count) for share in batch] for batch in batches]


def test_requests_stay_whole_and_long_prompts_go_first():
    requests = [request(2, 4), request(5, 4), request(3, 4), request(5, 2)]
    assert shapes(plan_batches(requests, max_rows=8)) == [
        [(1, 0, 4), (3, 0, 2)],
        [(2, 0, 4), (0, 0, 4)],
    ]


def test_only_a_request_larger_than_the_batch_is_split():
    assert shapes(plan_batches([request(2, 7), request(2, 2)], max_rows=3)) == [
        [(0, 0, 3)],
        [(0, 3, 3)],
        [(0, 6, 1), (1, 0, 2)],
    ]


def test_equal_lengths_never_mixes_lengths():
    requests = [request(2, 1), request(3, 1), request(2, 1)]
    assert shapes(plan_batches(requests, max_rows=9, equal_lengths=True)) == [
        [(1, 0, 1)],
        [(0, 0, 1), (2, 0, 1)],
    ]


def test_no_requests_need_no_batch():
    assert plan_batches([], max_rows=4) == []


def step(node: list[int], tokens: list[int], *, width: int):
    parents, inputs, after = branch(np.array(node), np.array(tokens), width=width, vocab_size=100, filler=0)
    return None if parents is None else parents.tolist(), inputs.tolist(), after.tolist()


def test_sequences_with_equal_tokens_share_a_row_until_they_part():
    assert step([0, 0, 0, 1, 1], [7, 9, 7, 5, 5], width=2) == ([0, 0, 1], [7, 9, 5], [0, 1, 0, 2, 2])


def test_rows_stay_where_they_are_while_nobody_parts_or_leaves():
    assert step([0, 0, 1, 2], [7, 7, 5, 7], width=3) == (None, [7, 5, 7], [0, 0, 1, 2])


def test_few_ended_rows_are_fed_the_filler_and_many_are_dropped():
    nine = [i for i in range(10) if i != 4]
    assert step(nine, [8] * 9, width=10) == (None, [8, 8, 8, 8, 0, 8, 8, 8, 8, 8], nine)
    eight = [i for i in range(10) if i not in (4, 5)]
    assert step(eight, [8] * 8, width=10) == (eight, [8] * 8, list(range(8)))


def test_a_fork_drops_ended_rows_with_it():
    assert step([0, 0, 2], [1, 2, 3], width=3) == ([0, 0, 2], [1, 2, 3], [0, 1, 2])


def recorded(*shares: Share, steps: list[dict[int, int]], version: int = 0, decode=None) -> BatchRows:
    rows = BatchRows(shares, end_token_ids=[2], decode=decode, version=version)
    for i, tokens in enumerate(steps):
        live = np.array(sorted(tokens))
        values = np.array([tokens[row] for row in sorted(tokens)])
        rows.record(live, step=i, tokens=values, logprobs=-values / 10, version=version + i)
    return rows


def test_completions_keep_their_end_token_reason_and_versions():
    shares = [Share(0, request(2, 2), 0, 2), Share(1, request(2, 1, max_tokens=3, stop_token_ids=(9,)), 0, 1)]
    rows = recorded(*shares, steps=[{0: 5, 1: 2, 2: 5}, {0: 9, 2: 9}, {0: 5}], version=4)
    (first, second), (third,) = rows.completions()
    assert (first.token_ids, first.finish_reason, first.versions) == ((5, 9, 5), "abort", (4, 6))
    assert (second.token_ids, second.finish_reason, second.versions) == ((2,), "stop", (4, 4))
    assert (third.token_ids, third.finish_reason, third.versions) == ((5, 9), "stop", (4, 5))
    np.testing.assert_allclose(third.logprobs, [-0.5, -0.9], rtol=1e-6)


def test_the_limit_ends_a_row_unless_it_stopped():
    shares = [Share(0, request(2, 2, max_tokens=1), 0, 2)]
    ((first, second),) = recorded(*shares, steps=[{0: 5, 1: 2}]).completions()
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")


def test_a_stop_string_may_span_tokens_and_end_inside_one():
    words = {5: "a", 6: "EN", 7: "D!", 8: "b"}
    shares = [Share(0, request(2, 1, max_tokens=9, stop=("END", "zz")), 0, 1)]
    rows = recorded(
        *shares,
        steps=[{0: 6}, {0: 8}, {0: 6}, {0: 7}],
        decode=lambda ids: "".join(words[i] for i in ids),
    )
    ((completion,),) = rows.completions()
    assert (completion.token_ids, completion.finish_reason) == ((6, 8, 6, 7), "stop")
