"""Weights & Biases itself, which writes in a process of its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.types import Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.console import CompletionPicker
from lachesis.plugins.sinks.section import WandbConfig
from lachesis.plugins.sinks.wandb import WandbSink

COLUMNS = ["step", "prompt", "completion", "reward", "right", "extracted"]


def answered(text: str, *, reward: float) -> Group:
    """A prompt with one completion, of which no more is kept than what a table shows."""
    sample = Sample((1,), (4,), (0.0,), "stop", VersionSpan(0, 0), text=text, rewards=(reward,), reward=reward)
    return Group(Prompt("1", (1,), "2+2="), (sample,), logged={"extracted": [{text}]})


def tables(run_dir: Path) -> list[dict[str, Any]]:
    """Those of the one run that W&B has kept, in the order of its steps."""
    (run,) = (run_dir / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb")), "the values, and which table belongs to which step"
    found = [json.loads(path.read_text()) for path in run.rglob("completions_*.table.json")]
    return sorted(found, key=lambda table: table["data"][0])


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an extra of the package")
def test_a_run_without_a_network_is_on_the_disk_with_its_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = WandbConfig(project="fates", group="quick", mode="offline")
    picker = CompletionPicker(count=1, reward_names=["right"], decode=str, every_steps=2)
    settings = {"run": {"steps": 3}}
    real = WandbSink(config, run_dir=tmp_path, run_name="quickstart", settings=settings, completions=picker)
    for step in range(1, 5):
        groups = [answered(str(step), reward=step / 4)]
        real.write(StepRecord(step=step, values={"reward": step / 4}, groups=groups))
    real.close()
    first, second = tables(tmp_path)
    assert first["columns"] == second["columns"] == COLUMNS
    assert first["data"] == [[2, "2+2=", "2", 0.5, 0.5, "{'2'}"]]
    assert second["data"] == [[4, "2+2=", "4", 1.0, 1.0, "{'4'}"]]
