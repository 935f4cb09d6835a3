"""Rewards for code blocks, for valid Python, and for passing tests."""

from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from lachesis.plugins.sandbox.choice import shared_sandbox
from lachesis.plugins.sandbox.rewards.code_tests import COLUMNS, CodeTest, cases_of
from lachesis.plugins.sandbox.rewards.execution import share_passed
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.tagged_text import tagged

logger = logging.getLogger(__name__)

_PYTHON = ("", "python", "python3", "py", "py3")
_IDLE = (ast.Expr, ast.Pass)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def soft_format_reward_func(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 0.5 for exactly one code block, plus 0.5 for code that is valid Python and does something."""
    texts = map(_text, completions)
    return [0.5 * (len(list(code_blocks(text))) == 1) + 0.5 * _does_something(extract_code(text)) for text in texts]


def code_execution_reward_func(
    completions: Sequence[Any],
    response: Sequence[Any] = (),
    prompts: Sequence[Any] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | Excluded | None]:
    """Return the share of tests that each completion's code passes, run in a sandbox out of its control.

    Tests are in any of the columns of :mod:`lachesis.plugins.sandbox.rewards.code_tests`. Without tests: the share of
    the functions and classes of ``response`` that the code defines when it runs, 0 if it raises. ``None`` if there is
    neither a test nor a name to look for. A completion whose sandbox failed is excluded.

    An answer to a follow-up question may be the whole class or the new method alone.

    Raises:
        SandboxError: there is no sandbox, and the configuration does not allow running without one.
        ValueError: a test column cannot be read.
    """
    count = len(completions)
    rows = [{name: columns[name][i] for name in COLUMNS if columns.get(name)} for i in range(count)]
    references = [_code_of(value) for value in response or [None] * count]
    earlier = [_earlier_code(prompt) for prompt in prompts or [None] * count]
    works = [
        _work(_text(completion), cases_of(row), reference, before)
        for completion, row, reference, before in zip(completions, rows, references, earlier, strict=True)
    ]
    if any(work is not None for work in works):
        shared_sandbox()
    different = list(dict.fromkeys(works))  # trained models repeat themselves
    with ThreadPoolExecutor(max_workers=min(count, os.cpu_count() or 1) or 1) as pool:
        scored = dict(zip(different, pool.map(_score, different), strict=True))
    scores = [scored[work] for work in works]
    if log_metric is not None:
        log_metric("sandbox_failures", sum(isinstance(score, Excluded) for score in scores))
    return scores


def answer_execution_reward_func(
    completions: Sequence[Any], answers: Sequence[Any], **_: Any
) -> list[float | Excluded | None]:
    """Return ``2 * share^3``, with the share of tests in ``answers`` that the code passes, as Axolotl's package does.

    The code is the text between ``<answer>`` and its end tag, or else what :func:`extract_code` finds.
    """
    texts = [_text(completion) for completion in completions]
    marked = [next((part.strip() for part in tagged(text, "<answer>", "</answer>")), text) for text in texts]
    scores = code_execution_reward_func(marked, test_cases=list(answers))
    return [2 * score**3 if isinstance(score, float) else score for score in scores]


def extract_code(text: str) -> str:
    """Return the last code block in Python or without a language; the whole text if it has no such block."""
    blocks = [code for language, code in code_blocks(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else text


@dataclass(frozen=True, slots=True)
class _Work:
    """Code to run with its tests; without code nothing passes."""

    code: str
    tests: tuple[CodeTest, ...]
    imports: str


def _work(text: str, tests: Sequence[CodeTest], reference: str, before: str) -> _Work | None:
    code = extract_code(text)
    if not tests:
        names = _definitions(reference)
        if not names:
            return None
        _warn_of_no_tests()
        tests = [_name_test(name, before) for name in names]
        defined = {node.name for node in ast.walk(_parsed(code)) if isinstance(node, _DEFINITIONS)}
        if before and defined.isdisjoint(names):  # an earlier block is not the answer
            code = ""
    return _Work(join_turns(before, code) if _does_something(code) else "", tuple(tests), _imports(reference))


def _score(work: _Work | None) -> float | Excluded | None:
    if work is None:
        return None
    if not work.code:
        return 0.0
    return share_passed(work.code, work.tests, imports=work.imports)


@cache
def _warn_of_no_tests() -> None:
    logger.warning(
        "code_execution_reward_func has no tests for some problems: it rewards any code that runs and defines the "
        "response's names, right or wrong; give test_cases (docs/code.md)"
    )


def join_turns(before: str, code: str) -> str:
    """Join the code of an answer to a follow-up question with that of the turn before it.

    Methods outside a class become methods of the last class there. Code that cannot be written
    anew is appended unchanged.
    """
    if not before:
        return code
    old, new = _parsed(before), _parsed(code)
    classes = [node for node in old.body if isinstance(node, ast.ClassDef)]
    methods = [node for node in new.body if _is_method(node)]
    if not classes or not methods:
        return f"{before}\n\n{code}"
    names = {node.name for node in methods if isinstance(node, _DEFINITIONS)}
    kept = [node for node in classes[-1].body if not (isinstance(node, _DEFINITIONS) and node.name in names)]
    classes[-1].body = [*kept, *methods]
    old.body += new.body
    try:
        return ast.unparse(ast.fix_missing_locations(old))
    except (RecursionError, ValueError):  # a sum of a thousand terms is a thousand deep, an integer too long to write
        return f"{before}\n\n{code}"


def _is_method(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    first = [argument.arg for argument in node.args.posonlyargs + node.args.args][:1]
    return first in (["self"], ["cls"]) or any(
        isinstance(one, ast.Name) and one.id in ("staticmethod", "classmethod", "property")
        for one in node.decorator_list
    )


def _name_test(name: str, before: str) -> str:
    """Return a test that a name is defined: at the top, or as a method of a class of the turn before."""
    tests = name
    for node in _parsed(before).body:
        if isinstance(node, ast.ClassDef) and node.name != name:
            tests = f"try:\n    {name}\nexcept NameError:\n    {node.name}.{name}"
    return tests


def _earlier_code(prompt: Any) -> str:
    """Return the code of the assistant's last message in a conversation, which a follow-up question is about."""
    if not isinstance(prompt, list):
        return ""
    answers = [message for message in prompt if message.get("role") == "assistant"]
    return _code_of(answers[-1].get("content")) if answers else ""


def _code_of(value: object) -> str:
    code = extract_code(value) if isinstance(value, str) else ""
    return code if _parsed(code).body else ""


def _does_something(code: str) -> bool:
    """Return True if the code is valid, and has statements other than expressions (a single word is one) or prints."""
    body = _parsed(code).body
    return any(not isinstance(node, _IDLE) or (isinstance(node, ast.Expr) and _prints(node)) for node in body)


def _prints(node: ast.Expr) -> bool:
    call = node.value
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"


def _definitions(code: str) -> list[str]:
    """Return the names of the functions and classes that a solution defines at its top level."""
    return sorted({node.name for node in _parsed(code).body if isinstance(node, _DEFINITIONS)})


def _imports(code: str) -> str:
    return "\n".join(ast.unparse(node) for node in _parsed(code).body if isinstance(node, ast.Import | ast.ImportFrom))


def _parsed(code: str) -> ast.Module:
    """Return the syntax tree of code; an empty one if it is not Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


_FENCE = "```"
_LANGUAGE = re.compile(r"[ \t]*([\w.+-]*)")


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and code of each block between fences of three backticks, from left to right.

    A block's first line may have the language and more words; a block without an end does not count.
    """
    at = 0
    while (start := text.find(_FENCE, at)) >= 0:
        line_end = text.find("\n", start)
        if line_end < 0:
            return
        broken = text.rfind("\r", start, line_end - 1)
        if broken >= 0:  # that line ended earlier, without a line feed, so it opens no block
            at = broken + 1
            continue
        end = text.find(_FENCE, line_end + 1)
        if end < 0:
            return
        language = _LANGUAGE.match(text, start + len(_FENCE))
        yield language[1] if language else "", text[line_end + 1 : end]
        at = end + len(_FENCE)
