"""The scoring of reasoning-gym as a reward: ``lachesis.rollouts.rewards.reasoning_gym.score``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.rollouts import procedural


def score(completions: Sequence[Any], entry: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
    """Score each answer by its task, 0 to 1. ``entry`` is the column of ``reasoning_gym:`` data."""
    return [procedural.score(one, _text(completion)) for one, completion in zip(entry, completions, strict=True)]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
