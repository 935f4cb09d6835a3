"""Transforms of rows with a task and its solution in code to instructions that ask for a code block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from lachesis.plugins.sandbox.rewards.code_tests import read_cases
from lachesis.rollouts.datasets.formats import PAIRS

RowFunction: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_REQUEST = "Answer with Python code in one block that begins with ```python and ends with ```."
_ACECODE_REQUEST = (
    "Reason between <reasoning> and </reasoning>, and give Python code between <answer> and </answer>. It may import "
    "time, itertools, collections, functools, math and typing, inside the answer, and nothing else; it uses no files."
)
# A dataset's own ``question`` and ``answer`` stay unchanged beside the new prompt.
_PAIRS = [pair for name, pair in PAIRS.items() if name != "question_answer"]
_OTHERS = [column for pair in _PAIRS[1:] for column in pair]


def instruction_response_transform(cfg: object, *args: Any, **kwargs: Any) -> tuple[RowFunction, dict[str, Any]]:
    """Return a transform to ``instruction``, which asks for a code block, and ``response``, from such columns.

    A follow-up question is kept and asks for one too.
    """
    return _ask_for_code, {"remove_columns": _OTHERS}


def instruction_response_with_tests_transform(
    cfg: object, *args: Any, **kwargs: Any
) -> tuple[RowFunction, dict[str, Any]]:
    """Return the transform of rows with ``test_cases``: the first test is shown, as it has the names to define."""
    return _ask_with_tests, {"remove_columns": _OTHERS}


def axolotl_acecode_transform(cfg: object, *args: Any, **kwargs: Any) -> tuple[RowFunction, dict[str, Any]]:
    """Return the transform for AceCode: ``question`` asks for reasoning and an answer; tests become ``answers``."""
    return _ask_acecode, {"remove_columns": ["question", "test_cases"]}


def read_tests(value: object) -> list[str]:
    """Return tests as a list of statements: from a list, a list in JSON, or one string; ``None`` means no tests.

    Raises:
        ValueError: it is something else.
    """
    return [test for test in read_cases(value) if isinstance(test, str)]


def _ask_for_code(row: Mapping[str, Any]) -> dict[str, Any]:
    question, answer = next((pair for pair in _PAIRS if row.get(pair[0]) is not None), _PAIRS[0])
    made = {"instruction": _asking(row[question]), "response": row.get(answer)}
    if row.get("follow_up"):
        made["follow_up"] = _asking(row["follow_up"])
    return made


def _ask_acecode(row: Mapping[str, Any]) -> dict[str, Any]:
    content = f"{row['question'].strip()}\n\n{_ACECODE_REQUEST}"
    return {"prompt": [{"role": "user", "content": content}], "answers": row["test_cases"]}


def _ask_with_tests(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = read_cases(row["test_cases"])
    if not tests:
        raise ValueError("test_cases is empty")
    made = _ask_for_code(row)
    first = tests[0]
    example = first if isinstance(first, str) else f"input:\n{first.stdin}\noutput:\n{first.stdout}"
    shown = f"It has to pass tests such as this one:\n{example}\n\n{_REQUEST}"
    kept = [test if isinstance(test, str) else {"input": test.stdin, "output": test.stdout} for test in tests]
    return made | {"instruction": made["instruction"].replace(_REQUEST, shown), "test_cases": kept}


def _asking(question: str) -> str:
    return f"{question.strip()}\n\n{_REQUEST}"
