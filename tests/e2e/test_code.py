"""The example of code: its problems, and that a run with the sandbox learns to pass tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lachesis.common.imports import load_function
from tests.e2e.runs import Main, metrics
from tests.paths import EXAMPLES
from tests.walls import needs_namespaces

EXAMPLE = EXAMPLES / "code"


def test_every_reference_solution_passes_its_tests():
    for row in load_function(f"{EXAMPLE / 'setup.py'}:problems")(seed=7)[:50]:
        namespace: dict = {}
        exec(str(row["response"]), namespace)
        for test in row["test_cases"]:
            exec(test, namespace)
        assert len(row["tags"]) <= row["difficulty"] <= 2


@needs_namespaces
def test_it_learns(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = tmp_path / "code"
    shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns(".cache", "__pycache__", "runs"))
    monkeypatch.chdir(tmp_path)
    outcome = main("train", "code/config.yaml", "--set", "run.steps=20")  # half of the example's
    assert outcome.code == 0, outcome.err
    first, last = metrics(tmp_path / "runs" / "code").evaluations
    assert first.accuracy < 0.6, "there is much to learn"
    assert last.step == 20
    assert last.accuracy - first.accuracy >= 0.1
