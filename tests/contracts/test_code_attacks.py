"""No attack passes any test, and every right program passes all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from lachesis.plugins.sandbox.choice import open_sandbox
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.records import FunctionTests, Limits
from tests.contracts.attacks import ATTACKS, CORRECT, NUMPY, TESTS
from tests.walls import needs_namespaces

pytestmark = needs_namespaces

LIMITS = Limits(cpu_s=3, wall_s=12, memory_bytes=256 << 20, processes=16, scratch_bytes=4 << 20)
# These end the whole of what is judged together, at a limit: each test alone would take that long.
ENDLESS = {name for name in ATTACKS if name.startswith(("an endless", "endless", "a generator", "a stopped", "a file"))}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    opened = open_sandbox("namespaces", count=1)
    yield opened
    opened.close()


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 60


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_passes_any_test(sandbox: LocalSandbox, name: str):
    limits = Limits(cpu_s=1, wall_s=2, memory_bytes=256 << 20, processes=16) if name in ENDLESS else LIMITS
    verdicts = sandbox.test(FunctionTests(ATTACKS[name], TESTS, limits=limits))
    passed = [test for test, verdict in zip(TESTS, verdicts, strict=True) if verdict.passed]
    assert passed == []


@pytest.mark.parametrize("name", CORRECT)
def test_right_programs_pass(sandbox: LocalSandbox, name: str):
    code, tests = CORRECT[name]
    verdicts = sandbox.test(FunctionTests(code, tests, limits=Limits(wall_s=60)))
    assert [verdict.reason for verdict in verdicts] == [""] * len(tests)


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
def test_numpy_is_there_where_it_is_installed(sandbox: LocalSandbox):
    code, tests = NUMPY
    assert [verdict.reason for verdict in sandbox.test(FunctionTests(code, tests, limits=Limits(wall_s=60)))] == [
        "",
        "",
    ]
