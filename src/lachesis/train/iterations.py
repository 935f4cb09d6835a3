"""Old logprobs of the importance ratio π/π_old, and batches that are used several times.

A token has up to three logprobs beside the current log π: log s, by the sampler that drew it; log π_old, of the
importance ratio; log π_ref, of the KL term. The first two differ if generation ran ahead of training, and by the
engine's rounding. π_old is chosen when a batch is packed (``pack(old_logprobs=...)``):

- ``sampler``: π_old = s. The ratio π/s corrects for everything at once, and the clip bounds all of it. A token
  of unknown s has a ratio of 1 at its batch's first use. Right for synchronous runs, and the default.
- ``trainer``: π_old is the trainer's policy when the batch is first used. Then the ratio is 1 at the first use, and the
  clip bounds the change by the batch's own updates. The sampler's difference is a separate factor π_old/s (sampler
  correction), capped or masked; without the correction it is ignored, as in TRL. Sampler correction needs ``trainer``:
  with π_old = s its factor is always 1.

TRL 1.16 computes π_old in a separate pass where gradient accumulation and the steps and iterations of a generation do
not line up, or the sampler is corrected for; else it takes log π of the first pass, detached. Here a batch is one
optimizer step, so log π of its first use *is* that of scoring time, at no cost: the same weights compute it. It is
stored then and reused for later iterations (``num_iterations``, μ). Where one generation is divided among several steps
(``steps_per_generation``), a pass over all of it comes before the first.

Replayed groups have a separate choice (``pack(replayed_old_logprobs=...)``). With ``trainer`` their π_old is today's
and s the original, and every use computes ratio and correction from both; with ``sampler`` the ratio is π/s and the
correction 1. Either way nothing stored can become stale. ``Policy.recompute_logprobs`` fixes the trainer's π_old of a
batch before it is used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lachesis.common.errors import CheckpointError, TrainingError
from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.types import Group
from lachesis.pipeline.feed import FeedBefore
from lachesis.train.batch import Batch, MicroBatch

Pack: TypeAlias = Callable[[Sequence[Group]], Batch]


class OldLogprobStore:
    """Store of log π_old of a batch's loss tokens: found at its first use, the same at all others."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def begin(self, batch: Batch, *, num_passes: int) -> None:
        """Begin a use of ``batch``, in ``num_passes`` micro-batches.

        Raises:
            TrainingError: it is a later use whose predecessor was not seen.
        """
        if batch.iteration == 0:
            self._held = []
        elif len(self._held) != num_passes:
            raise TrainingError(
                f"iteration {batch.iteration + 1} of a batch of {num_passes} micro-batches has old logprobs for "
                f"{len(self._held)}",
                remedy="run a batch's iterations one after the other, and restore them with the checkpoint",
            )

    def take(self, batch: Batch, index: int, micro: MicroBatch, *, current: Tensor) -> Tensor:
        """Return :meth:`known`, and hold it for the other uses of the batch."""
        old = self.known(batch, index, micro, current=current)
        if batch.iteration == 0 and batch.num_iterations > 1:
            self._held.append(old)
        return old

    def known(self, batch: Batch, index: int, micro: MicroBatch, *, current: Tensor) -> Tensor:
        """Return log π_old of micro-batch ``index``, [N]; ``current`` are the policy's logprobs, detached."""
        if batch.iteration > 0:
            held = self._held[index].to(current.device)
            if held.shape != current.shape:
                raise TrainingError(
                    f"micro-batch {index + 1} has {current.numel()} loss tokens, but had {held.numel()} before",
                    remedy="use the same batch in all iterations",
                )
            return held
        return torch.where(micro.old_logprobs.isnan(), current, micro.old_logprobs.to(current.dtype))

    def state_dict(self) -> list[Tensor]:
        """Return one tensor for each micro-batch of the current batch; empty if batches are used once."""
        return list(self._held)

    def load_state_dict(self, held: Sequence[Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._held = list(held)


@dataclass(eq=False)
class RepeatedFeed(FeedBefore[Batch]):
    """Feed that makes ``steps_per_generation`` optimizer steps of one generation, ``num_iterations`` times over.

    The loop and the inner feed are unaware of it. If there are several parts, groups are dealt out at random, by the
    seed and the number of the generation, and all old logprobs date from before the first step: the sampler's or, if
    wanted, the trainer's, from a pass over all of them. Each iteration repeats the same parts in the same order. The
    feed is told the version after the last step, which frees the slots of its groups. A checkpoint in between holds the
    groups, so a resumed run continues with the next step.

    Args:
        feed: source of generations, each as one batch.
        num_iterations: uses of each part, μ.
        pack: packs groups to a batch, deterministically.
        steps_per_generation: number of parts of a generation; 1 keeps it whole.
        seed: of the order.
        score: computes the trainer's old logprobs of a batch now.
    """

    num_iterations: int
    pack: Pack
    steps_per_generation: int = 1
    seed: int = 0
    score: Callable[[Batch], Batch] = lambda batch: batch
    _generation: int = field(default=0, init=False)
    _parts: list[Batch] = field(default_factory=list[Batch], init=False)
    _uses: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if min(self.num_iterations, self.steps_per_generation) < 1:
            raise ValueError(
                f"num_iterations and steps_per_generation must be at least 1, got {self.num_iterations} and "
                f"{self.steps_per_generation}"
            )

    def next(self) -> Batch:
        if not self._parts:
            self._parts, self._uses = self._divide(self.feed.next()), 0
            self._generation += 1
        iteration, index = divmod(self._uses, len(self._parts))
        self._uses += 1
        batch = self._parts[index]
        if len(self._parts) > 1:
            return batch  # its old logprobs are fixed, so any use is like the first
        return replace(batch, iteration=iteration, num_iterations=self.num_iterations)

    def _divide(self, whole: Batch) -> list[Batch]:
        if self.steps_per_generation == 1:
            return [whole]
        groups = list(whole.groups)
        random.Random(f"{self.seed}:{self._generation}").shuffle(groups)
        count = min(self.steps_per_generation, len(groups))
        ends = [len(groups) * part // count for part in range(count + 1)]
        parts = [self.pack(groups[start:end]) for start, end in pairwise(ends)]
        return [self._fixed(part) for part in parts] if count > 1 else parts

    def _fixed(self, part: Batch) -> Batch:
        return self.score(part) if part.lacks_old_logprobs else part

    def advance(self, step: int) -> None:
        if self._uses == len(self._parts) * self.num_iterations:
            self._parts = []
            self.feed.advance(step)

    def state_dict(self) -> dict[str, Any]:
        state = {"feed": self.feed.state_dict(), "uses": self._uses, "generation": self._generation}
        groups = [encode_group(group) for part in self._parts for group in part.groups]
        state |= {"groups": groups, "sizes": [len(part.groups) for part in self._parts]}
        if len(self._parts) > 1:
            state["old_logprobs"] = [[micro.old_logprobs.tolist() for micro in p.micro_batches] for p in self._parts]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises CheckpointError if its batch has another number of uses."""
        groups = [decode_group(group) for group in state["groups"]]
        sizes = state["sizes"]
        if groups and state["uses"] >= self.num_iterations * len(sizes):
            raise CheckpointError(
                f"the checkpoint's batch was used {state['uses']} times, but num_iterations is {self.num_iterations}",
                remedy="resume with the num_iterations with which the run was started",
            )
        self.feed.load_state_dict(state["feed"])
        self._uses = int(state["uses"])
        self._generation = int(state.get("generation", 0))
        ends = [0, *accumulate(sizes)]
        parts = [self.pack(groups[start:end]) for start, end in pairwise(ends)]
        known = state.get("old_logprobs", [None] * len(parts))
        self._parts = [part if old is None else _with_old(part, old) for part, old in zip(parts, known, strict=True)]


def undivided(groups: Sequence[Group]) -> Batch:
    """Return one generation as a batch, for :class:`RepeatedFeed` to divide and pack."""
    return Batch(groups=tuple(groups), micro_batches=(), num_sequences=0, num_tokens=0)


def _with_old(part: Batch, old: Sequence[Sequence[float]]) -> Batch:
    """Return the part with old logprobs from before the first step, a list for each micro-batch."""
    micro_batches = [
        replace(micro, old_logprobs=torch.tensor(values, dtype=torch.float64))
        for micro, values in zip(part.micro_batches, old, strict=True)
    ]
    return replace(part, micro_batches=tuple(micro_batches))
