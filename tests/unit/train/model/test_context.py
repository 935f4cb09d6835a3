"""What ranks that share a micro-batch give one another; that they then learn as one is in `tests/ranks_program.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lachesis.common.errors import ConfigError, ModelError
from lachesis.train.batch import MicroBatch, idle_micro_batch, pack
from lachesis.train.model.context import ContextGroup, Share
from lachesis.train.model.forward import plan_forward
from tests.tiny import tiny_model
from tests.unit.train.drifted import drifted_groups

NOBODY: Any = None


@pytest.fixture(scope="module")
def micro() -> MicroBatch:
    (found,) = pack(drifted_groups(tiny_model()), max_tokens=1 << 20).micro_batches
    return found


def ranks(size: int) -> list[ContextGroup]:
    return [ContextGroup(rank=rank, size=size, group=NOBODY) for rank in range(size)]


def exchanged(sent: list[torch.Tensor], shares: list[Share], *, to: int) -> torch.Tensor:
    """What arrives at a rank of the rows that each sends, by the counts that both ends have."""
    parts = [rows.split(share.sent)[to] for rows, share in zip(sent, shares, strict=True)]
    assert [len(part) for part in parts] == shares[to].received
    return torch.cat(parts)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 64])
def test_each_token_and_each_prediction_is_one_ranks(micro: MicroBatch, size: int):
    """64 are more ranks than there are tokens for: some have none."""
    shares = [rank.share(micro) for rank in ranks(size)]
    assert len({share.input_ids.shape for share in shares}) == 1
    assert torch.equal(torch.cat([share.input_ids for share in shares])[: micro.num_inputs], micro.input_ids)
    assert torch.equal(torch.cat([share.position_ids for share in shares])[: micro.num_inputs], micro.position_ids)
    predictions = torch.arange(micro.targets.numel())
    assert torch.equal(torch.cat([predictions[share.predictions] for share in shares]), predictions)
    held = torch.cat([rank.holds(micro.num_inputs) for rank in ranks(size)])
    assert int(held.sum()) == micro.num_inputs
    run = len(shares[0].input_ids)
    sent = [share.places + rank * run for rank, share in enumerate(shares)]  # of the stream, as what is predicted from
    for rank, share in enumerate(shares):
        arrived = exchanged(sent, shares, to=rank).index_select(0, share.order)
        assert torch.equal(arrived, micro.predict[share.predictions])


def test_an_idle_pass_has_one_token_and_still_work_for_one_rank():
    shares = [rank.share(idle_micro_batch()) for rank in ranks(3)]
    assert [share.input_ids.tolist() for share in shares] == [[0], [0], [0]]
    assert [share.sent for share in shares] == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert [len(share.order) for share in shares] == [1, 0, 0]


def test_heads_that_cannot_be_dealt_out_are_refused_before_anything_travels():
    states = [torch.zeros(1, heads, 5, 8) for heads in (4, 2, 2)]
    with pytest.raises(ConfigError, match="context_parallel_size is 3, but the model has 4 attention heads"):
        ranks(3)[0].to_heads(*states, tokens=15)


def test_a_model_that_mixes_tokens_without_attention_is_refused():
    with pytest.raises(ModelError, match="MambaForCausalLM cannot be trained with context parallelism") as caught:
        plan_forward(tiny_model("mamba"), packing="auto", context=ranks(2)[0])
    assert "context_parallel_size" in caught.value.remedy
