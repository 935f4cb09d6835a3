"""Routed experts of samples become one tensor in the order of what goes through the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lachesis.common.errors import TrainingError
from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.batch import MicroBatch, pack
from lachesis.train.distributed.messages import decode, encode
from lachesis.train.route_tensors import require_routed


def sample(prompt: tuple[int, ...], completion: tuple[int, ...], *, first: int | None, **fields: Any) -> Sample:
    """Each input has the experts [[n, n + 1]] of one layer, n its place in the sequence from ``first`` on."""
    inputs = len(prompt) + len(completion) - 1
    places = np.arange(inputs)[:, None, None] + (first or 0)
    routed = None if first is None else RoutedExperts.of(np.concatenate([places, places + 1], axis=-1))
    logprobs = (-1.0,) * len(completion)
    return Sample(prompt, completion, logprobs, "stop", VersionSpan(0, 0), advantage=1.0, routed=routed, **fields)


def group(*samples: Sample) -> Group:
    return Group(Prompt("0", samples[0].prompt_ids, ""), samples)


def packed(*samples: Sample, **options: Any) -> MicroBatch:
    (micro,) = pack([group(*samples)], max_tokens=1 << 20, **options).micro_batches
    return micro


def first_experts(micro: MicroBatch) -> list[int]:
    assert micro.routed is not None and micro.routed.dtype == torch.int16
    assert micro.routed.shape == (micro.num_inputs, 1, 2)
    return micro.routed[:, 0, 0].tolist()


def test_what_is_shared_has_the_experts_of_the_first():
    samples = sample((1, 2, 3), (4, 5), first=100), sample((1, 2, 3), (6, 7, 8), first=200)
    micro = packed(*samples)
    assert micro.input_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert first_experts(micro) == [100, 101, 102, 103, 203, 204]


def test_without_sharing_each_has_its_own():
    samples = sample((1, 2, 3), (4, 5), first=100), sample((1, 2, 3), (6, 7, 8), first=200)
    micro = packed(*samples, share_prefixes=False)
    assert sorted(first_experts(micro)) == [100, 101, 102, 103, 200, 201, 202, 203, 204]
    starts = dict(zip(first_experts(micro), micro.input_ids.tolist(), strict=True))
    assert (starts[103], starts[203]) == (4, 6)


def test_a_sequence_that_goes_on_with_another_has_its_own_experts():
    """The inputs of the longer one are those that are computed."""
    micro = packed(sample((1, 2), (3,), first=100), sample((1, 2, 3), (4, 5), first=200))
    assert micro.input_ids.tolist() == [1, 2, 3, 4]
    assert first_experts(micro) == [200, 201, 202, 203]


def test_those_without_are_left_to_the_router():
    assert packed(sample((1, 2), (3, 4), first=None)).routed is None
    micro = packed(sample((1, 2), (3, 4), first=100), sample((1, 2), (7, 8), first=None))
    assert sorted(first_experts(micro)) == [-1, 100, 101, 102]
    own = packed(sample((1, 2), (3, 4), first=100), sample((5, 6), (7, 8), first=None))
    assert own.routed is not None and (own.routed[own.input_ids >= 5] == -1).all()


def test_they_travel_to_other_ranks():
    micro = packed(sample((1, 2), (3, 4), first=100))
    found = decode(encode(micro))
    assert torch.equal(found.routed, micro.routed) and found.routed.dtype == torch.int16


def test_those_of_another_sequence_are_refused():
    wrong = replace(sample((1, 2), (3, 4), first=100), completion_ids=(3,), logprobs=(-1.0,))
    with pytest.raises(TrainingError, match="with 2 inputs has routed experts for 3"):
        packed(wrong)


def test_those_of_another_model_are_refused():
    other = replace(sample((1, 2), (7, 8), first=1), routed=RoutedExperts.of(np.zeros((3, 2, 2), np.int64)))
    with pytest.raises(TrainingError, match=r"\(1, 2\) and \(2, 2\)"):
        packed(sample((1, 2), (3, 4), first=100), other)


def test_a_run_that_replays_says_how_many_samples_came_without():
    whole, without = sample((1, 2), (3, 4), first=100), sample((1, 2), (7, 8), first=None)
    require_routed([group(whole)])
    with pytest.raises(TrainingError, match="1 of 3 samples lack"):
        require_routed([group(whole), group(whole, without)])
