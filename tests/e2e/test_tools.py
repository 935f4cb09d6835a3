"""The example of tools: a model that guesses or asks its calculator learns to ask."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lachesis.metrics.sinks.tape import read_groups, tape_files
from tests.e2e.runs import Main, metrics
from tests.paths import EXAMPLES


def test_it_learns_to_use_the_tool(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(
        EXAMPLES / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns(".cache", "__pycache__", "runs")
    )
    monkeypatch.chdir(tmp_path)
    outcome = main("train", "tools/config.yaml")
    assert outcome.code == 0, outcome.err
    run_dir = tmp_path / "runs" / "tools"
    log = metrics(run_dir)
    assert log.evaluations[-1].accuracy - log.evaluations[0].accuracy >= 0.2
    calls = [line.values["tool_calls"] for line in log.steps]
    assert sum(calls[-5:]) > 1.5 * sum(calls[:5])
    assert all(line.values["turns"] >= 64 for line in log.steps)
    first = read_groups(sorted(tape_files(run_dir / "rollouts").items())[0][1])
    masked = [sample for group in first for sample in group.samples if sample.mask is not None]
    assert masked
    assert all("<tool>" in sample.text for sample in masked)
