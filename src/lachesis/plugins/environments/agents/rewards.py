"""Rewards that agents bring with them: their exit code, and a number in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lachesis.common.types import LARGEST_NUMBER
from lachesis.rollouts.rewards.functions import Excluded


def exit_code(completions: Sequence[object], exit_code: Sequence[int | None], **_: object) -> list[float]:
    """1 where the agent's command ended with 0, else 0. Goes with ``source.nonzero_exit: score``."""
    return [float(code == 0) for code in exit_code]


def reported(completions: Sequence[object], reported: Sequence[str | None], **_: object) -> list[float | Excluded]:
    """The number that the agent wrote into the file ``LACHESIS_REWARD``; a rollout without one is excluded."""
    return [_number(text) for text in reported]


def _number(text: str | None) -> float | Excluded:
    try:
        number = float(text or "")
    except ValueError:
        return Excluded("no reward reported")
    if abs(number) > LARGEST_NUMBER:
        return Excluded("the reward reported is no usable number")
    return number if math.isfinite(number) else Excluded("no reward reported")
