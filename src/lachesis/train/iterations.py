"""Which logprobs the importance ratio π/π_old compares with, and batches that are used several times.

A token has up to three logprobs beside the current log π: log s, by the sampler that drew it; log π_old, of the
importance ratio; log π_ref, of the KL term. The first two differ where generation ran ahead of training, and by
the engine's own rounding. What π_old is, is chosen when a batch is packed (``pack(old_logprobs=...)``):

- ``sampler``: π_old = s. The ratio π/s corrects for everything at once, and the clip bounds all of it. A token
  of unknown s has a ratio of 1 at its batch's first use. Right for synchronous runs, and the default.
- ``trainer``: π_old is the trainer's policy when the batch is first used. Then the ratio is 1 at the first use, and
  the clip bounds what the batch's own updates did. What the sampler did differently is a separate factor π_old/s
  (sampler correction), capped or masked; without the correction it stays in, as in TRL without it. Sampler
  correction needs ``trainer``: with π_old = s its factor is always 1.

TRL 1.16 computes π_old in a pass of its own where gradient accumulation and the steps and iterations of a
generation do not line up, or the sampler is corrected for; else it takes log π of the first pass, detached. Here
a batch is one optimizer step, so log π of its first use *is* that of scoring time, at no cost: the same weights
compute it. It is taken from the first use and held for the others (``num_iterations``, μ).

Replayed groups have a choice of their own (``pack(replayed_old_logprobs=...)``). With ``trainer`` their π_old is of
now, s of then, and ratio and correction are made of both at every use; with ``sampler`` the ratio is π/s and the
correction 1. Either way nothing is kept that could be stale. ``Policy.recompute_logprobs`` fixes the
trainer's π_old of a batch before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lachesis.common.errors import CheckpointError, TrainingError
from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.types import Group
from lachesis.pipeline.feed import Feed
from lachesis.train.batch import Batch, MicroBatch


class OldLogprobStore:
    """log π_old of a batch's loss tokens: found at its first use, the same at all others."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def begin(self, batch: Batch, *, num_passes: int) -> None:
        """A use of ``batch`` begins, in ``num_passes`` micro-batches.

        Raises:
            TrainingError: it is not the first use, and the one before was not seen.
        """
        if batch.iteration == 0:
            self._held = []
        elif len(self._held) != num_passes:
            raise TrainingError(
                f"use {batch.iteration + 1} of a batch of {num_passes} micro-batches has the old logprobs of "
                f"{len(self._held)}",
                remedy="use a batch's iterations one after the other, and restore them with the checkpoint",
            )

    def take(self, batch: Batch, index: int, micro: MicroBatch, *, current: Tensor) -> Tensor:
        """log π_old of micro-batch ``index``, [N]; ``current`` are the policy's logprobs, detached."""
        if batch.iteration > 0:
            held = self._held[index].to(current.device)
            if held.shape != current.shape:
                raise TrainingError(
                    f"micro-batch {index + 1} has {current.numel()} loss tokens and had {held.numel()} before",
                    remedy="use one and the same batch in all iterations",
                )
            return held
        old = torch.where(micro.old_logprobs.isnan(), current, micro.old_logprobs.to(current.dtype))
        if batch.num_iterations > 1:
            self._held.append(old)
        return old

    def state_dict(self) -> list[Tensor]:
        """One tensor for each micro-batch of the batch in use; empty where it is used once."""
        return list(self._held)

    def load_state_dict(self, held: Sequence[Tensor]) -> None:
        """The reverse of :meth:`state_dict`."""
        self._held = list(held)


class RepeatedFeed(Feed[Batch]):
    """Yields each batch of a feed ``num_iterations`` times. The loop and the feed know nothing of it.

    The feed hears of the version after the last use, which frees the batch's slot. A checkpoint in between holds
    the batch: resumed, the run goes on with its next use.

    Args:
        feed: where batches come from.
        num_iterations: uses of each, μ.
        pack: makes the batch of its groups again, the same as before.
    """

    def __init__(self, feed: Feed[Batch], *, num_iterations: int, pack: Callable[[Sequence[Group]], Batch]) -> None:
        if num_iterations < 1:
            raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
        self._feed = feed
        self._num_iterations = num_iterations
        self._pack = pack
        self._batch: Batch | None = None
        self._uses = 0

    def next(self) -> Batch:
        if self._batch is None:
            self._batch, self._uses = self._feed.next(), 0
        batch = replace(self._batch, iteration=self._uses, num_iterations=self._num_iterations)
        self._uses += 1
        return batch

    def advance(self, step: int) -> None:
        if self._uses == self._num_iterations:
            self._batch = None
            self._feed.advance(step)

    def counters(self) -> dict[str, float]:
        return self._feed.counters()

    def state_dict(self) -> dict[str, Any]:
        groups = [] if self._batch is None else [encode_group(group) for group in self._batch.groups]
        return {"feed": self._feed.state_dict(), "uses": self._uses, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError where its batch was to be used another number of times."""
        groups = state["groups"]
        if groups and state["uses"] >= self._num_iterations:
            raise CheckpointError(
                f"the checkpoint's batch was used {state['uses']} times and num_iterations is {self._num_iterations}",
                remedy="resume with the num_iterations that the run was started with",
            )
        self._feed.load_state_dict(state["feed"])
        self._uses = int(state["uses"])
        self._batch = self._pack([decode_group(group) for group in groups]) if groups else None

    def close(self) -> None:
        self._feed.close()
