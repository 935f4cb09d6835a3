"""The policy of rank 0: what it does, all ranks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lachesis.metrics.values import MetricValue, merge_metrics
from lachesis.train.batch import Batch
from lachesis.train.distributed import commands
from lachesis.train.distributed.split import collect, deal, split
from lachesis.train.distributed.team import Team
from lachesis.train.policy import Policy


class LeadingPolicy(Policy):
    """A :class:`Policy` that has the followers take part in whatever needs them.

    Its methods are for one thread at a time, as those of a :class:`Policy` are.

    Args:
        *args, **options: of :class:`Policy`, on all ranks the same.
        team: the followers.
    """

    def __init__(self, *args: Any, team: Team, **options: Any) -> None:
        super().__init__(*args, **options)
        self._team = team
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}

    def accumulate(self, batch: Batch) -> dict[str, MetricValue]:
        """As :meth:`Policy.accumulate`, of the whole batch; metrics are of all ranks."""
        own, *others = split(batch, self._team.size)
        with self._team.together("forward and backward", [commands.Accumulate(part) for part in others]) as answers:
            metrics = super().accumulate(own)
        return merge_metrics([metrics, *answers])

    def step(self) -> dict[str, MetricValue]:
        with self._team.together("the optimizer step", commands.Step()):
            return super().step()

    def canary(self, token_ids: Sequence[int]) -> list[float]:
        if not self.strategy.sharded:
            return super().canary(token_ids)
        with self._team.together("reading the canary", commands.Canary(tuple(token_ids))):
            return super().canary(token_ids)

    def recompute_logprobs(self, batch: Batch) -> Batch:
        own, *others = split(batch, self._team.size)
        with self._team.together("computing old logprobs", [commands.Recompute(part) for part in others]) as answers:
            first = super().recompute_logprobs(own)
        parts = [part.micro_batches for part in (first, *answers)]
        return replace(batch, micro_batches=tuple(collect(parts)))

    def whole(self, parameter: Tensor) -> Tensor:
        if not self.strategy.sharded:
            return super().whole(parameter)
        name = self._names[id(parameter)]
        with self._team.together(f"gathering {name}", commands.GatherParameter(name)):
            return super().whole(parameter)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        with self._team.together("loading weights", commands.LoadWeights(_shapes(dict(tensors)))):
            super().load_weights(tensors)

    def optimizer_state(self) -> dict[str, Any]:
        if not self.strategy.sharded:
            return super().optimizer_state()
        with self._team.together("gathering the optimizer's state", commands.GatherOptimizer()):
            return super().optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        told = {**state, "parts": _shapes(state["parts"])} if self.strategy.sharded else state
        with self._team.together("loading the optimizer's state", commands.LoadOptimizer(told)):
            super().load_optimizer_state(state)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Policy.state_dict`; old logprobs are in the order of the batch's micro-batches."""
        with self._team.together("gathering the policy's state", commands.GatherPolicy()) as answers:
            state = super().state_dict()
        held = [state["old_logprobs"], *answers]
        # Idle passes are at the end, and have none.
        return {**state, "old_logprobs": [tensor for tensor in collect(held) if tensor.numel()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        reference = _shapes(state["reference"])
        own, *others = _dealt_evenly(state["old_logprobs"], self._team.size)
        told = [commands.LoadPolicy({"reference": reference, "old_logprobs": part}) for part in others]
        with self._team.together("loading the policy's state", told):
            super().load_state_dict({**state, "old_logprobs": own})


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
