"""Weights & Biases itself, which writes in a process of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lachesis.common.types import StepRecord
from lachesis.config.schema import WandbConfig
from lachesis.metrics.sinks.wandb import WandbSink


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an extra of the package")
def test_a_run_without_a_network_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = WandbConfig(project="fates", group="quick", mode="offline")
    real = WandbSink(config, run_dir=tmp_path, run_name="quickstart", settings={"run": {"steps": 3}})
    real.write(StepRecord(step=1, values={"reward": 0.5}))
    real.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
