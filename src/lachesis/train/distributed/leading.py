"""The policy of rank 0: what it does, all ranks do.

A method that all ranks have to call together is overridden here, in a turn; there is no other place to name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lachesis.metrics.values import MetricValue, merge_metrics
from lachesis.train.batch import Batch
from lachesis.train.distributed.leader import Leader
from lachesis.train.distributed.split import collect, deal, split
from lachesis.train.policy import Policy


class LeadingPolicy(Policy):
    """A :class:`Policy` that has the followers take part in whatever needs them.

    Its methods are for one thread at a time, as those of a :class:`Policy` are.

    Args:
        *args, **options: of :class:`Policy`, on all ranks the same.
        leader: announces its turns.
    """

    def __init__(self, *args: Any, leader: Leader, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leader = leader
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}

    def accumulate(self, batch: Batch) -> dict[str, MetricValue]:
        """As :meth:`Policy.accumulate`, of the whole batch; metrics are of all ranks."""
        own, *others = split(batch, self._leader.size)
        with self._leader.turn("accumulate", what="forward and backward", parts=others, answers=True) as answers:
            metrics = super().accumulate(own)
        return merge_metrics([metrics, *answers])

    def step(self) -> dict[str, MetricValue]:
        with self._leader.turn("step", what="the optimizer step"):
            return super().step()

    def canary(self, token_ids: Sequence[int]) -> list[float]:
        if not self.strategy.sharded:
            return super().canary(token_ids)
        with self._leader.turn("canary", tuple(token_ids), what="reading the canary"):
            return super().canary(token_ids)

    def recompute_logprobs(self, batch: Batch) -> Batch:
        own, *others = split(batch, self._leader.size)
        what = "computing old logprobs"
        with self._leader.turn("recompute_logprobs", what=what, parts=others, answers=True) as answers:
            first = super().recompute_logprobs(own)
        parts = [part.micro_batches for part in (first, *answers)]
        return replace(batch, micro_batches=tuple(collect(parts)))

    def whole(self, parameter: Tensor) -> Tensor:
        return self.full_parameter(self._names[id(parameter)]) if self.strategy.sharded else super().whole(parameter)

    def full_parameter(self, name: str) -> Tensor:
        with self._leader.turn("full_parameter", name, what=f"gathering {name}"):
            return super().full_parameter(name)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        with self._leader.turn("load_weights", _shapes(dict(tensors)), what="loading weights"):
            super().load_weights(tensors)

    def optimizer_state(self) -> dict[str, Any]:
        if not self.strategy.sharded:
            return super().optimizer_state()
        with self._leader.turn("optimizer_state", what="gathering the optimizer's state"):
            return super().optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        told = {**state, "parts": _shapes(state["parts"])} if self.strategy.sharded else state
        with self._leader.turn("load_optimizer_state", told, what="loading the optimizer's state"):
            super().load_optimizer_state(state)

    def reference_state(self) -> dict[str, Tensor]:
        if self.reference is None or not self.strategy.sharded:
            return super().reference_state()
        with self._leader.turn("reference_state", what="gathering the reference"):
            return super().reference_state()

    def old_logprobs(self) -> list[Tensor]:
        """As :meth:`Policy.old_logprobs`, in the order of the batch's micro-batches."""
        with self._leader.turn("old_logprobs", what="gathering old logprobs", answers=True) as answers:
            own = super().old_logprobs()
        # Idle passes are at the end, and have none.
        return [tensor for tensor in collect([own, *answers]) if tensor.numel()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        reference = _shapes(state["reference"])
        own, *others = _dealt_evenly(state["old_logprobs"], self._leader.size)
        parts = [{"reference": reference, "old_logprobs": part} for part in others]
        with self._leader.turn("load_state_dict", what="loading the policy's state", parts=parts):
            super().load_state_dict({**state, "old_logprobs": own})


# What a turn may be.
METHODS = frozenset(name for name in vars(LeadingPolicy) if not name.startswith("_"))


def _shapes(state: Any) -> Any:
    """The same with meta tensors in place of those that ranks get by collectives; scalars stay."""
    return tree_map_only(
        Tensor, lambda tensor: torch.empty_like(tensor, device="meta") if tensor.ndim else tensor, state
    )


def _dealt_evenly(held: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """Old logprobs by rank, with those of idle passes where a rank has fewer micro-batches."""
    parts = [list(part) for part in deal(held, ranks)]
    passes = len(parts[0])
    return [part + [torch.empty(0)] * (passes - len(part)) for part in parts]
