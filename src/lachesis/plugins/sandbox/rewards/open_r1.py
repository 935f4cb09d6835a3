"""Rewards that open-r1's recipes call ``code`` and ``binary_code``: the code of an answer runs in the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lachesis.plugins.sandbox.rewards.code_tests import read_cases
from lachesis.plugins.sandbox.rewards.execution import share_passed
from lachesis.plugins.sandbox.rewards.grpo_code.rewards import extract_code
from lachesis.rollouts.rewards.built_in import completion_text
from lachesis.rollouts.rewards.functions import Excluded


def code_reward(
    completions: Sequence[Any], verification_info: Sequence[Any], **_: Any
) -> list[float | Excluded | None]:
    """Return the share of ``verification_info``'s test cases (input, output) that the code passes in a sandbox.

    A completion whose sandbox failed is excluded. Raises SandboxError if there is no sandbox.
    """
    rewards: list[float | Excluded | None] = []
    for completion, info in zip(completions, verification_info, strict=True):
        tests = read_cases(info["test_cases"])
        code = extract_code(completion_text(completion))
        rewards.append(share_passed(code, tests) if tests and code.strip() else 0.0 if tests else None)
    return rewards


def binary_code_reward(
    completions: Sequence[Any], verification_info: Sequence[Any], **_: Any
) -> list[float | Excluded | None]:
    """Return 1 for each completion whose code passes all tests, else 0. Excludes and raises as :func:`code_reward`."""
    shares = code_reward(completions, verification_info)
    return [float(share > 0.99) if isinstance(share, float) else share for share in shares]
