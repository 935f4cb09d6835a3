"""Rewards for code: is there any, is it Python, does it do what the tests ask."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lachesis.rollouts.rewards.execution import run_tests
from lachesis.rollouts.rewards.grpo_code.transforms import read_tests

_BLOCK = re.compile(r"```[ \t]*(?P<language>\w*)[ \t]*\n(?P<code>.*?)```", re.DOTALL)
_IDLE = (ast.Expr, ast.Pass)


def soft_format_reward_func(completions: Sequence[Any], **_: Any) -> list[float]:
    """0.5 for exactly one code block, and 0.5 for code that is valid Python and does something."""
    return [_format_score(_text(completion)) for completion in completions]


def code_execution_reward_func(
    completions: Sequence[Any], test_cases: Sequence[Any] = (), response: Sequence[Any] = (), **_: Any
) -> list[float | None]:
    """The share of tests that the code passes, run in a process of its own with limits.

    Without tests: the share of the functions and classes of ``response`` that the code defines when it runs, 0
    where that raises. ``None`` where there is neither a test nor a name to look for.
    """
    count = len(completions)
    tests = [read_tests(value) for value in test_cases or [None] * count]
    names = [_defined(value) for value in response or [None] * count]
    wanted = [one or sorted(known) for one, known in zip(tests, names, strict=True)]
    with ThreadPoolExecutor(max_workers=min(count, os.cpu_count() or 1) or 1) as pool:
        return list(pool.map(_execution_score, [_text(completion) for completion in completions], wanted))


def extract_code(text: str) -> str:
    """The last code block that says Python or nothing; the whole text where it has no block."""
    blocks = [match["code"] for match in _BLOCK.finditer(text) if match["language"].lower() in ("", "python", "py")]
    return blocks[-1] if blocks else text


def _format_score(text: str) -> float:
    return 0.5 * (len(_BLOCK.findall(text)) == 1) + 0.5 * _does_something(extract_code(text))


def _execution_score(text: str, tests: Sequence[str]) -> float | None:
    if not tests:
        return None
    code = extract_code(text)
    return run_tests(code, tests) / len(tests) if _does_something(code) else 0.0


def _does_something(code: str) -> bool:
    """Valid Python with more than expressions in it: prose of one word is an expression."""
    try:
        return any(not isinstance(statement, _IDLE) for statement in ast.parse(code).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _defined(response: object) -> frozenset[str]:
    """Names of the functions and classes that a solution defines at its top level."""
    if not isinstance(response, str):
        return frozenset()
    try:
        body = ast.parse(extract_code(response)).body
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in body if isinstance(node, kinds))


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]
