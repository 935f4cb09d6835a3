"""Environment variables that other trainers' documents set, with and without effect here."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.common.types import Finding
from lachesis.plugins.dialects.table import Dialect, read_names

ENVIRONMENT = Dialect("the environment", list(read_names("environment")), prefix="$")

# Settings for the default behaviour are not reported.
_AS_IS = {("VLLM_USE_V1", "1"), ("NUM_INFERENCE_NODES", "0"), ("NUM_INFERENCE_NODES", "-1")}


def environment_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Return a warning for each variable that is set and has no effect."""
    return [
        Finding(level="warning", rule="environment", message=f"${name}={environment[name]} has no effect: {entry.note}")
        for name, entry in ENVIRONMENT.entries.items()
        if entry.treatment == "nothing" and name in environment and (name, environment[name]) not in _AS_IS
    ]
