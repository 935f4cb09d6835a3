"""Context parallelism: several ranks compute one micro-batch together, each a run of its tokens (Ulysses).

Embeddings, norms, linear layers and experts need only their own tokens. Attention needs all: around it each rank
exchanges its tokens' heads for its own heads of all tokens (DeepSpeed-Ulysses, arXiv 2309.14509), so segments, shared
prompts included, are described as on one rank. The predictions, which may all stand at the end of the stream, are
divided evenly for the head; then the ranks gather the logprobs, and each computes the whole loss. Its gradient flows
back only through a rank's own logprobs, so that the gradients of all ranks add up to that of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lachesis.config.schema.mesh import require_heads
from lachesis.train.batch import MicroBatch
from lachesis.train.model.rank_group import RankGroup


class Share(NamedTuple):
    """Part of a micro-batch that a rank computes: n of its tokens, and m of its predictions.

    Attributes:
        input_ids, position_ids: int64 [n]; beyond the end of the stream they are 0.
        places: int64 [p], positions in ``input_ids`` whose predictions any rank takes.
        sent: number of ``places`` that each rank takes, in the order of ranks.
        received: number of predictions that this rank gets from each.
        order: int64 [m], position of each of the rank's predictions among the received ones.
        predictions: the rank's among the micro-batch's.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor
    predictions: slice


class ContextGroup(RankGroup):
    """Group of ranks that share the tokens of a micro-batch."""

    __slots__ = ()

    def share(self, micro: MicroBatch) -> Share:
        """Return this rank's part of a micro-batch, which all ranks of the group have whole."""
        run, taken = self.part(micro.num_inputs), self.part(micro.targets.numel())
        owner = micro.predict // run
        taker = torch.arange(len(owner), device=owner.device) // taken
        own = owner == self.rank
        predictions = self.slice_of(len(owner))
        from_rank = owner[predictions]
        return Share(
            input_ids=self._cut(micro.input_ids),
            position_ids=self._cut(micro.position_ids),
            places=micro.predict[own] - self.rank * run,
            sent=torch.bincount(taker[own], minlength=self.size).tolist(),
            received=torch.bincount(from_rank, minlength=self.size).tolist(),
            # Arriving values are sorted by their sender.
            order=torch.argsort(torch.argsort(from_rank, stable=True)),
            predictions=predictions,
        )

    def deal(self, values: Tensor, share: Share) -> Tensor:
        """Exchange values [p, ...] of a rank's tokens for those [m, ...] of the predictions that it takes."""
        return self.exchange(values, share.sent, share.received).index_select(0, share.order)

    def holds(self, tokens: int) -> Tensor:
        """Return which places of a rank's run hold tokens, not padding beyond the stream's end: bool [n]."""
        run = self.part(tokens)
        return torch.arange(self.rank * run, (self.rank + 1) * run) < tokens

    def to_heads(self, *states: Tensor, tokens: int) -> list[Tensor]:
        """Exchange queries, keys and values [1, H, n, D] of a rank's tokens for [1, H / size, tokens, D] of its heads.

        If there are fewer heads of keys and values than ranks, several ranks get the same one.

        Raises:
            ConfigError: the heads do not divide evenly among the ranks.
        """
        heads, kv_heads = states[0].shape[1], states[1].shape[1]
        require_heads(self.size, heads=heads, kv_heads=kv_heads)
        whole = [x if x.shape[1] >= self.size else x.repeat_interleave(self.size // x.shape[1], dim=1) for x in states]
        return [self._to_heads(x, tokens) for x in whole]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Exchange the output of attention back: [1, tokens, H / size, D] to [1, n, H, D]."""
        tokens = attended.shape[1]
        missing = self.size * self.part(tokens) - tokens
        rows = pad(attended.squeeze(0), (0, 0, 0, 0, 0, missing)).unflatten(0, (self.size, -1))
        blocks = self._exchanged(rows)
        return blocks.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _to_heads(self, states: Tensor, tokens: int) -> Tensor:
        blocks = self._exchanged(states.squeeze(0).unflatten(0, (self.size, -1)))
        return blocks.transpose(0, 1).flatten(1, 2)[:, :tokens].unsqueeze(0)

    def _exchanged(self, blocks: Tensor) -> Tensor:
        """Send block i of [size, ...] to rank i, and return the blocks received, in the order of ranks."""
        ones = [1] * self.size
        return self.exchange(blocks, ones, ones)

    def _cut(self, stream: Tensor) -> Tensor:
        own = stream[self.slice_of(len(stream))]
        return pad(own, (0, self.part(len(stream)) - len(own)))
