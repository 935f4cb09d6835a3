"""Lachesis: a GRPO trainer for language models.

What Python programs use is here by name, and loaded when it is asked for: ``lachesis.train``, ``lachesis.load``,
``lachesis.parts`` and the classes and functions of :data:`__all__`; docs/python.md shows them.

It has two storeys. Plug-ins, the folders of ``plugins``, may import any room of the core. A run loads those that its
configuration names.

The core's rooms, from the top down; each imports from those below it:
cli, run, plan, config, train, bridges, pipeline, rollouts, engines, transport, metrics, web, process, common.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lachesis.train as _train_room
from lachesis.common.chatter import without_chatter
from lachesis.common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    DependencyError,
    EngineError,
    LachesisError,
    ModelError,
    RewardError,
    StaleWeights,
    TrainingError,
)
from lachesis.common.version import __version__
from lachesis.plugins.public_names import find_public_names
from lachesis.process.openmp import brief_waits

if TYPE_CHECKING:
    from lachesis.bridges.base import Bridge
    from lachesis.common.types import Completion, Group, Prompt, Sample, SamplingParams, StepRecord
    from lachesis.engines.base import Engine, TrainedModel
    from lachesis.metrics.health.types import Alarm, Observation
    from lachesis.metrics.hub import Sink
    from lachesis.pipeline.feed import Feed
    from lachesis.run.library import Run, load, train
    from lachesis.run.pieces import Pieces, parts
    from lachesis.train.losses.advantage import assign_advantages, group_advantages
    from lachesis.train.losses.loss import policy_loss
    from lachesis.train.policy import Policy


# The public names of each module.
_MODULES = {
    "bridges.base": ("Bridge",),
    "common.types": ("Completion", "Group", "Prompt", "Sample", "SamplingParams", "StepRecord"),
    "engines.base": ("Engine", "TrainedModel"),
    "metrics.health.types": ("Alarm", "Observation"),
    "metrics.hub": ("Sink",),
    "pipeline.feed": ("Feed",),
    "run.library": ("Run", "load"),
    "run.pieces": ("Pieces", "parts"),
    "train.losses.advantage": ("assign_advantages", "group_advantages"),
    "train.losses.loss": ("policy_loss",),
    "train.policy": ("Policy",),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Alarm", "Bridge", "CheckpointError", "Completion", "ConfigError", "DataError", "DeadlineExceeded",
    "DependencyError", "Engine", "EngineError", "Feed", "Group", "LachesisError", "ModelError", "Observation",
    "Pieces", "Policy", "Prompt", "RewardError", "Run", "Sample", "SamplingParams", "Sink", "StaleWeights",
    "StepRecord", "TrainedModel", "TrainingError", "__version__", "assign_advantages", "group_advantages", "load",
    "parts", "policy_loss", "train",
]  # fmt: skip


class _TrainRoom(ModuleType):
    """The room ``lachesis.train`` has the name of the function, so it is both: importing from it sets that name."""

    def __call__(self, *args: Any, **keys: Any) -> Run:
        return _loaded("run.library").train(*args, **keys)


_train_room.__class__ = _TrainRoom  # pyright: ignore[reportAttributeAccessIssue]  # modules allow it


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lachesis' has no attribute {name!r}")
    return getattr(_loaded(_PUBLIC[name]), name)


def _loaded(module: str) -> ModuleType:
    os.environ |= brief_waits(os.environ)
    with without_chatter():
        return import_module(f"lachesis.{module}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


find_public_names()
