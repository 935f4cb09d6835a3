"""verl's, OpenRLHF's and ms-swift's configurations, for `lachesis translate`.

Their files are not run as they stand, for their rewards have another signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lachesis.config.document import Document
from lachesis.plugins.dialects import openrlhf, swift, verl
from lachesis.plugins.dialects.openrlhf import OPENRLHF
from lachesis.plugins.dialects.swift import SWIFT
from lachesis.plugins.dialects.table import Dialect, Translation
from lachesis.plugins.dialects.verl import VERL

OTHER_SYSTEMS: Mapping[str, tuple[Dialect, Callable[[Document], Translation]]] = {
    "verl": (VERL, verl.translate),
    "OpenRLHF": (OPENRLHF, openrlhf.translate),
    "ms-swift": (SWIFT, swift.translate),
}
_MARKS: Mapping[str, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref",),
    "ms-swift": ("rlhf_type", "tuner_type", "train_type"),
    "OpenRLHF": ("prompt_data", "data.prompt_dataset", "rollout_batch_size", "rollout.batch_size"),
}


def other_system(names: Mapping[str, Any]) -> str | None:
    """Return whose names these are, flat and dotted: "verl", "ms-swift", "OpenRLHF", or None for anybody else's."""
    for system, marks in _MARKS.items():
        if any(name == mark or name.startswith(f"{mark}.") for name in names for mark in marks):
            return system
    return None
