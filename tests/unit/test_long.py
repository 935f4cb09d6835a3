"""Tests that only `make test-all` runs: each names a shorter one of its kind, and no file is left without any."""

from __future__ import annotations

import gc

import pytest

from tests.paths import ROOT

# Of the units none is long, and collecting them takes longest.
SUITES = ("processes", "contracts", "e2e", "browser")


class _Collected:
    """A plugin that keeps what is collected, before any of it is left out."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = [*items]


@pytest.fixture(scope="module")
def collected() -> list[pytest.Item]:
    """All tests of the suites."""
    plugin = _Collected()
    words = ["--collect-only", "--no-header", "--no-summary", "-qq", "-pno:timeout", f"--rootdir={ROOT}"]
    code = pytest.main([*words, *(str(ROOT / "tests" / suite) for suite in SUITES)], plugins=[plugin])
    gc.freeze()  # again, as it was before that session ended
    assert code == pytest.ExitCode.OK
    return plugin.items


def named(item: pytest.Item) -> str:
    """A test's name after that of its file."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def test_each_long_test_names_a_shorter_one_of_its_kind(collected: list[pytest.Item]):
    """After its file, where that is another: `test_loss_types.py::test_every_loss_reaches_what_grpo_reaches[cispo]`."""
    short = {named(item) for item in collected if item.get_closest_marker("long") is None}
    short |= {name.partition("[")[0] for name in short}
    wrong, count = [], 0
    for item in collected:
        for mark in item.iter_markers("long"):
            count += 1
            (why,) = mark.args
            name, _, reason = why.rpartition(": ")
            of_a_file = name if ".py::" in name else f"{item.path.name}::{name}"
            if of_a_file not in short or len(reason) < 10:
                wrong.append(f"{item.nodeid}: {why!r}")
    assert count > 0
    assert not wrong


def test_no_file_has_long_tests_only(collected: list[pytest.Item]):
    short = {item.path for item in collected if item.get_closest_marker("long") is None}
    assert not {item.path for item in collected} - short
