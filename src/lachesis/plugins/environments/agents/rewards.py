"""Rewards of agents: tests of a file that an agent leaves, and its own report (``source.self_reported``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lachesis.common.types import LARGEST_NUMBER
from lachesis.plugins.sandbox.choice import shared_sandbox
from lachesis.plugins.sandbox.rewards.execution import share_passed
from lachesis.rollouts.rewards.functions import Excluded


def file_tests(
    completions: Sequence[object],
    files: Sequence[Mapping[str, str]],
    tests: Sequence[Sequence[str]],
    *,
    file: str = "solution.py",
    **_: object,
) -> list[float | Excluded]:
    """Return the share of statements in the column ``tests`` that hold for a Python file that the agent leaves.

    They run in the sandbox, as the rewards for code do, out of reach of the agent and its file. A rollout whose sandbox
    failed is excluded.

    Args:
        completions: one for each sample.
        files: kept by ``source.keep_files``; without the file the reward is 0.
        tests: statements such as ``assert add(1, 2) == 3``.
        file: its name.
    """
    shared_sandbox()
    return [
        share_passed(left[file], tuple(statements)) if file in left and statements else 0.0
        for left, statements in zip(files, tests, strict=True)
    ]


def exit_code(completions: Sequence[object], exit_code: Sequence[int | None], **_: object) -> list[float]:
    """Return 1 if the agent's command exited with code 0, else 0. Goes with ``source.nonzero_exit: score``."""
    return [float(code == 0) for code in exit_code]


def reported(completions: Sequence[object], reported: Sequence[str | None], **_: object) -> list[float | Excluded]:
    """Return the number that the agent wrote into the file ``LACHESIS_REWARD``; a rollout without one is excluded."""
    return [_number(text) for text in reported]


def _number(text: str | None) -> float | Excluded:
    try:
        number = float(text or "")
    except ValueError:
        return Excluded("no reward reported")
    if abs(number) > LARGEST_NUMBER:
        return Excluded("the reported reward is not a usable number")
    return number if math.isfinite(number) else Excluded("no reward reported")
