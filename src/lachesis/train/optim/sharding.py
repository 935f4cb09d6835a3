"""Optimizer of a sharded model: each rank updates its own rows.

These optimizers work element by element, so ranks can update their parts independently; they share only the norm of the
gradient. States are saved whole, or in the ranks' parts, and fit any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lachesis.common.errors import CheckpointError
from lachesis.config.schema import OptimizerConfig
from lachesis.train.distributed.sharded_checkpoint import NOISE, OPTIMIZER, sharded_as
from lachesis.train.distributed.strategy import Strategy
from lachesis.train.optim.optimizer import PolicyOptimizer, build_optimizer, global_norm

# Returns the replacement of a state's value, given its name in a checkpoint, the parameter that it belongs to, and the
# value: the tensor as the optimizer or a checkpoint has it, or its name.
Convert = Callable[[str, DTensor, Any], Any]


class Shards:
    """Sharded parameters and, in the same storage, the local parts that an optimizer is built over.

    Args:
        named_parameters: of the model, after its first forward pass: until then FSDP may move them.
        strategy: shards them.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, Parameter]], *, strategy: Strategy) -> None:
        self.strategy = strategy
        self.whole: dict[str, DTensor] = {}
        self.parts: list[tuple[str, Parameter]] = []
        for name, parameter in named_parameters:
            assert isinstance(parameter, DTensor)
            self.whole[name] = parameter
            self.parts.append((name, Parameter(parameter.to_local().detach())))

    def take_gradients(self) -> None:
        """Move the gradients of the parameters to their parts."""
        for name, part in self.parts:
            parameter = self.whole[name]
            part.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
            parameter.grad = None

    def drop_gradients(self) -> None:
        for parameter in self.whole.values():
            parameter.grad = None

    def norm(self) -> float:
        """Return the L2 norm of all ranks' gradients together."""
        gradients = [part.grad for _, part in self.parts if part.grad is not None]
        return self.strategy.sum_squares(global_norm(gradients) ** 2) ** 0.5

    def gather(self, like: DTensor, part: Tensor) -> Tensor:
        """Gather a tensor that is cut as ``like`` is: on rank 0's CPU, empty elsewhere."""
        whole = self.strategy.whole(sharded_as(like, part))
        return whole.cpu() if self.strategy.rank == 0 else part.new_empty(0)

    def cut(self, like: DTensor, whole: Tensor) -> Tensor:
        """Return this rank's part of ``whole``: the inverse of :meth:`gather`.

        Ranks other than 0 give a meta tensor.
        """
        spread = self.strategy.spread(like, whole)
        assert isinstance(spread, DTensor)
        return spread.to_local()


class ShardedOptimizer(PolicyOptimizer):
    """Optimizer over local parts. Ranks call its methods together.

    Args:
        *args, **options: of :class:`PolicyOptimizer`.
        shards: the parts.
        seed: of the noise, which is another on each rank.
    """

    def __init__(self, *args: Any, shards: Shards, seed: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shards = shards
        self._seed = seed
        self._renew_noise()

    def step(self) -> float:
        self._shards.take_gradients()
        return super().step()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._shards.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`PolicyOptimizer.state_dict` with whole tensors on rank 0 and empty ones elsewhere."""
        return self._converted(super().state_dict(), lambda _, like, part: self._shards.gather(like, part))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume as :meth:`PolicyOptimizer.load_state_dict`; ranks other than 0 give meta tensors.

        A checkpoint has only rank 0's generator of stochastic rounding; other ranks begin anew.
        """
        self._require_fitting(state)
        super().load_state_dict(self._converted(state, lambda _, like, whole: self._shards.cut(like, whole)))
        if self._shards.strategy.rank > 0:
            self._renew_noise()

    def parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return :meth:`PolicyOptimizer.state_dict` with names instead of tensors, and this rank's part of each.

        Raises:
            CheckpointError: a custom optimizer keeps a tensor in another shape than its parameter's.
        """
        tensors: dict[str, Tensor] = {}

        def named(name: str, like: DTensor, part: Tensor) -> str:
            if part.shape != like.to_local().shape:
                raise CheckpointError(
                    f"the optimizer keeps {name} in shape {list(part.shape)}, which differs from its parameter's, so "
                    "it cannot be sharded",
                    remedy="set distributed.strategy: replicate, or choose an optimizer that works element by element",
                )
            tensors[name] = sharded_as(like, part)
            return name

        state = self._converted(super().state_dict(), named)
        if self._noise is not None:
            tensors[self._noise_name] = self._noise.get_state()
        return state, tensors

    def load_parts(
        self, state: dict[str, Any], *, saved: Mapping[str, Tensor], read: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Resume from a checkpoint saved by :meth:`parts`, of which this rank reads its own part.

        If other ranks saved the state, this rank's noise starts fresh.

        Args:
            state: with names in the places of tensors.
            saved: the saved tensors, on the meta device.
            read: fills tensors by name.

        Raises:
            CheckpointError: it belongs to another optimizer or to other parameters.
        """
        self._require_fitting(state)
        tensors: dict[str, Tensor] = {}

        def room(_: str, like: DTensor, name: str) -> Tensor:
            part = torch.empty(like.to_local().shape, dtype=saved[name].dtype)
            tensors[name] = sharded_as(like, part)
            return part

        local = self._converted(state, room)
        known = self._noise is not None and self._noise_name in saved
        if known:
            tensors[self._noise_name] = torch.empty_like(saved[self._noise_name], device="cpu")
        read(tensors)
        super().load_state_dict({**local, "noise": tensors[self._noise_name]} if known else local)
        if not known and self._shards.strategy.rank > 0:
            self._renew_noise()

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        return self._shards.norm()

    @property
    def _noise_name(self) -> str:
        strategy = self._shards.strategy
        return f"{NOISE}{strategy.rank} of {strategy.world_size}"

    def _renew_noise(self) -> None:
        if self._noise is not None:
            self._noise.manual_seed((self._seed + 1_000_003 * self._shards.strategy.rank + self._step) % 2**63)

    def _converted(self, state: dict[str, Any], convert: Convert) -> dict[str, Any]:
        """Return a state with sharded tensors converted, in the same order on all ranks."""
        whole = self._shards.whole
        parts = []
        for number, (part, saved) in enumerate(zip(self._parts, state["parts"], strict=True)):
            name_of = {id(slot): name for name, slot in zip(part.names, part.update.slots, strict=True)}
            names = [name_of[id(slot)] for group in part.optimizer.param_groups for slot in group["params"]]
            states = {
                index: {
                    key: convert(f"{OPTIMIZER}{number}/{key}/{names[index]}", whole[names[index]], value)
                    if _is_cut(value)
                    else value
                    for key, value in values.items()
                }
                for index, values in saved["optimizer"]["state"].items()
            }
            update = {
                key: [
                    convert(f"{OPTIMIZER}{number}/update.{key}/{name}", whole[name], tensor)
                    for name, tensor in zip(part.names, tensors, strict=True)
                ]
                for key, tensors in saved["update"].items()
            }
            parts.append({"optimizer": {**saved["optimizer"], "state": states}, "update": update})
        return {**state, "parts": parts}


def _is_cut(value: Any) -> bool:
    """Return True if a value is a sharded tensor, or the name of one; scalars are equal on all ranks."""
    return value.ndim > 0 if isinstance(value, Tensor) else isinstance(value, str) and value.startswith(OPTIMIZER)


def build_sharded_optimizer(
    named_parameters: Sequence[tuple[str, Parameter]],
    config: OptimizerConfig,
    *,
    strategy: Strategy,
    learning_rate: float,
    total_steps: int,
    seed: int = 0,
) -> PolicyOptimizer:
    """Build :func:`build_optimizer` over the parts of parameters where ``strategy`` shards them."""
    build = partial(build_optimizer, config=config, learning_rate=learning_rate, total_steps=total_steps, seed=seed)
    if not strategy.sharded:
        return build(named_parameters)
    shards = Shards([(name, p) for name, p in named_parameters if p.requires_grad], strategy=strategy)
    return build(
        shards.parts,
        make_policy_optimizer=partial(ShardedOptimizer, shards=shards, seed=seed),
        sizes={name: parameter.numel() for name, parameter in shards.whole.items()},
    )
