"""verl's, OpenRLHF's and ms-swift's configurations: everything except rewards, which have another signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from lachesis.config.document import Document
from lachesis.plugins.dialects import openrlhf, swift, verl
from lachesis.plugins.dialects.openrlhf import OPENRLHF
from lachesis.plugins.dialects.swift import SWIFT
from lachesis.plugins.dialects.table import Dialect, Translation
from lachesis.plugins.dialects.verl import VERL

SystemName = Literal["verl", "OpenRLHF", "ms-swift"]


class System(NamedTuple):
    """Table of a system's keys, and the translation of its documents."""

    keys: Dialect
    translate: Callable[[Document], Translation]


OTHER_SYSTEMS: Mapping[str, System] = {
    "verl": System(VERL, verl.translate),
    "OpenRLHF": System(OPENRLHF, openrlhf.translate),
    "ms-swift": System(SWIFT, swift.translate),
}
_MARKS: Mapping[SystemName, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref",),
    "ms-swift": ("rlhf_type", "tuner_type", "train_type"),
    "OpenRLHF": ("prompt_data", "data.prompt_dataset", "rollout_batch_size", "rollout.batch_size"),
}


def other_system(names: Mapping[str, Any]) -> SystemName | None:
    """Return the system that has these names, flat and dotted; None if none has."""
    for system, marks in _MARKS.items():
        if any(name == mark or name.startswith(f"{mark}.") for name in names for mark in marks):
            return system
    return None
