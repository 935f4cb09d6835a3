"""What the leader tells its followers to take part in, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from lachesis.train.batch import Batch


@dataclass(frozen=True, slots=True)
class Build:
    """Join the group of ranks and build the policy of this configuration (as plain data)."""

    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Accumulate:
    """This rank's part of a batch. Answered with :class:`Accumulated`."""

    part: Batch


@dataclass(frozen=True, slots=True)
class Recompute:
    """This rank's part of a batch, whose π_old is to be fixed. Answered with the part."""

    part: Batch


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer step."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A forward pass over these tokens."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GatherParameter:
    """Give the leader all of a parameter, by its name in the model."""

    name: str


@dataclass(frozen=True, slots=True)
class GatherOptimizer:
    """Give the leader all of the optimizer's state."""


@dataclass(frozen=True, slots=True)
class GatherPolicy:
    """Give the leader all of the policy's other state."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Take this rank's part of trained tensors, which are told by meta tensors of their shapes."""

    tensors: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadOptimizer:
    """Take this rank's part of an optimizer's state; tensors as in :class:`LoadWeights`."""

    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """Take this rank's part of the policy's other state; tensors as in :class:`LoadWeights`."""

    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The run is over."""


Command: TypeAlias = (
    Build
    | Accumulate
    | Recompute
    | Step
    | Canary
    | GatherParameter
    | GatherOptimizer
    | GatherPolicy
    | LoadWeights
    | LoadOptimizer
    | LoadPolicy
    | End
)


@dataclass(frozen=True, slots=True)
class Done:
    """A command was taken part in; with its answer, where it has one."""

    answer: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be: why, and what to do."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life, which says nothing else."""


MESSAGES = (*get_args(Command), Done, Failed, Alive)
