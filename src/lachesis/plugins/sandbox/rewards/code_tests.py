"""Tests of code in datasets' formats: statements, functions that check, or inputs with the expected output.

=================  ==========================================================================
columns            as in
=================  ==========================================================================
test_cases         this project: statements, or ``{"input": ..., "output": ...}``
test_list          MBPP: statements, with ``test_imports`` or ``test_setup_code`` before each
test, entry_point  HumanEval: a function ``check``, which is given the function
test               KodCode: functions ``test_...``, or methods of a class
input_output       APPS: inputs and outputs, of a script or of the function ``fn_name``
*_test_cases       LiveCodeBench: ``public_test_cases``, ``private_test_cases``
=================  ==========================================================================
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

COLUMNS = (
    "test_cases", "test_list", "test_imports", "test_setup_code", "test", "entry_point", "input_output",
    "public_test_cases", "private_test_cases", "starter_code", "metadata",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class InputTest:
    """Input of a script, and the output that it has to print."""

    stdin: str
    stdout: str


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

CodeTest: TypeAlias = str | InputTest


def cases_of(row: Mapping[str, Any]) -> list[CodeTest]:
    """Return all tests of a row, from whichever test columns it has.

    Raises:
        ValueError: a column has an unknown form.
    """
    found: list[CodeTest] = [*read_cases(row.get("test_cases"))]
    found += _listed(row)
    found += _written(row)
    found += _input_output(row.get("input_output"))
    for column in ("public_test_cases", "private_test_cases"):
        found += _contest_cases(row.get(column), row.get("metadata"))
    return found


def read_cases(value: object) -> list[CodeTest]:
    """Read tests from a list, a list in JSON, or one string; ``None`` counts as no tests.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else [value] if value.strip() else []
    tests = [] if value is None else value
    if not isinstance(tests, list) or not all(isinstance(test, str) or _is_case(test) for test in tests):
        raise ValueError(f"test_cases must be a list of strings, or of inputs with outputs, not {value!r}")
    return [test if isinstance(test, str) else InputTest(str(test["input"]), str(test["output"])) for test in tests]


def same_output(found: str, expected: str) -> bool:
    """Compare two outputs line by line, except for white space at their ends; numbers are compared by value."""
    lines, wanted = _lines(found), _lines(expected)
    return len(lines) == len(wanted) and all(
        line == right or _same_numbers(line.split(), right.split()) for line, right in zip(lines, wanted, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_numbers(found: Sequence[str], wanted: Sequence[str]) -> bool:
    try:
        return [Decimal(one) for one in found] == [Decimal(one) for one in wanted]
    except InvalidOperation:
        return False


def _is_case(test: object) -> bool:
    return isinstance(test, Mapping) and {"input", "output"} <= set(test)


def _listed(row: Mapping[str, Any]) -> list[CodeTest]:
    tests = row.get("test_list")
    if not isinstance(tests, list):
        return []
    setup = row.get("test_imports") or row.get("test_setup_code") or []
    before = setup if isinstance(setup, str) else "\n".join(setup)
    return [f"{before}\n{test}" if before else str(test) for test in tests]


def _written(row: Mapping[str, Any]) -> list[CodeTest]:
    test, entry = row.get("test"), row.get("entry_point")
    if not isinstance(test, str) or not test.strip():
        return []
    if isinstance(entry, str) and entry:
        return [f"{test}\ncheck({entry})"]
    return list(_functions_of(test))


def _functions_of(test: str) -> list[str]:
    """Return a test for each function ``test_...``, each after the whole source; without any, the source alone."""
    calls: list[str] = []
    for node in ast.parse(test).body:
        if isinstance(node, _FUNCTIONS) and node.name.startswith("test"):
            calls.append(_called(node, node.name))
        elif isinstance(node, ast.ClassDef):
            methods = {one.name: one for one in node.body if isinstance(one, _FUNCTIONS)}
            before = "".join(f"_case.{name}()\n" for name in ("setUp", "setup_method") if name in methods)
            made = f"_case = {node.name}()\n{before}"
            calls += [made + _called(one, f"_case.{name}") for name, one in methods.items() if name.startswith("test")]
    return [f"{test}\n{call}" for call in calls] or [test]


def _called(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Return the statement that runs a test to its end: calling a coroutine function alone would run none of it."""
    if isinstance(function, ast.FunctionDef):
        return f"{name}()"
    return f"__import__('asyncio').run({name}())"


def _input_output(value: object) -> list[CodeTest]:
    if isinstance(value, str) and value.strip():
        value = json.loads(value)
    if not isinstance(value, Mapping):
        return []
    name = value.get("fn_name")
    pairs = list(zip(value["inputs"], value["outputs"], strict=True))
    if name:
        return [_call_test(str(name), args, output) for args, output in pairs]
    return [InputTest(_joined(given), _joined(wanted)) for given, wanted in pairs]


def _contest_cases(value: object, metadata: object) -> list[CodeTest]:
    if isinstance(value, str) and value.strip():
        value = json.loads(value) if value.lstrip().startswith("[") else _unpacked(value)
    if not isinstance(value, list):
        return []
    facts = json.loads(metadata) if isinstance(metadata, str) and metadata.strip() else metadata
    name = facts.get("func_name") if isinstance(facts, Mapping) else None
    found: list[CodeTest] = []
    for case in value:
        if case.get("testtype") == "functional" and name:
            args = [json.loads(line) for line in case["input"].split("\n") if line.strip()]
            found.append(_call_test(name, args, json.loads(case["output"])))
        else:
            found.append(InputTest(case["input"], case["output"]))
    return found


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for LiveCodeBench, which pickles a string; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"private_test_cases names {module}.{name}, which is not a string")


def _unpacked(packed: str) -> object:
    return json.loads(_PlainUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(packed)))).load())


def _call_test(name: str, args: Sequence[Any], output: Any) -> str:
    """Return a test that calls a function, or the method of a class ``Solution``, and compares the result."""
    wanted = f"_wanted = {output!r}\n"
    if isinstance(output, list) and len(output) == 1:  # APPS puts outputs into lists of one
        wanted = f"_wanted = {output!r}\nif _got == _wanted[0]: _wanted = _got\n"
    return (
        f"try:\n    _function = Solution().{name}\nexcept NameError:\n    _function = {name}\n"
        f"_got = _function(*{list(args)!r})\n"
        f"if isinstance(_got, tuple): _got = list(_got)\n{wanted}assert _got == _wanted"
    )


def _joined(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
