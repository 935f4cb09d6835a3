"""The disk of the run directory: how fast it is, what a checkpoint takes, and disks that will not do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.checks import disk
from lachesis.plugins.checks.disk import measure, try_disk

MIB = 2**20
QWEN = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = disk.measure
    monkeypatch.setattr(disk, "measure", lambda directory: measured(directory, size=8 * MIB))


@pytest.fixture
def at(tmp_path: Path) -> Callable[..., LachesisConfig]:
    """A configuration of a 1.5B model whose runs are there."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))

    def build(directory: Path, **sections: Any) -> LachesisConfig:
        run = {"steps": 1, "dir": str(directory), "name": "one"}
        return LachesisConfig.model_validate({"run": run, "model": {"path": str(tmp_path)}, **sections})

    return build


def test_speed_and_seconds_of_a_checkpoint_are_told_and_nothing_stays(at: Any, tmp_path: Path):
    check = try_disk(at(tmp_path / "runs", adapter={"kind": "lora"}))
    assert not check.failed
    assert check.message.startswith(f"{tmp_path}: ") and "of 8 MB (limit 8 s); a checkpoint of 0." in check.message
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_run_that_takes_several_devices_is_looked_at_by_one_process(at: Any, tmp_path: Path):
    alone, shared = ({}, {"distributed": {"context_parallel_size": 2}})
    said = [try_disk(at(tmp_path / "runs", **sections)).message for sections in (alone, shared)]
    sizes = {message.partition("a checkpoint of ")[2].partition(" GB")[0] for message in said}
    assert len(sizes) == 1 and sizes != {""}


def test_what_was_written_is_on_the_disk_before_the_clock_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    assert measure(tmp_path, size=8 * MIB).bytes == 8 * MIB
    assert synced == [8 * MIB]


def test_a_slow_disk_is_given_up(tmp_path: Path):
    assert measure(tmp_path, size=64 * MIB, limit_s=0.0).bytes == 4 * MIB


@pytest.mark.parametrize("place", ["file/runs", "/proc/runs"])
def test_a_directory_that_cannot_be_written_is_named(at: Any, tmp_path: Path, place: str):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .* -> give a run.dir") as caught:
        try_disk(at(tmp_path / place))
    assert str(tmp_path / "file" if place == "file/runs" else "/proc") in str(caught.value)


def test_checkpoints_that_do_not_fit_are_a_failure(at: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=30 * 10**9))
    kept = {"every_steps": 1, "keep_last": 2}
    with pytest.raises(ConfigError, match=r"what a run keeps there needs 43\.\d GB, of which 30 are free -> make room"):
        try_disk(at(tmp_path, checkpoint=kept))
    assert not try_disk(at(tmp_path, checkpoint=kept | {"keep_last": 1})).failed


def test_a_model_that_nobody_knows_has_no_checkpoint_to_time(tmp_path: Path):
    config = LachesisConfig.model_validate({"run": {"steps": 1, "dir": str(tmp_path)}, "model": {"path": "/nowhere"}})
    check = try_disk(config)
    assert not check.failed and check.message.endswith("follows from the model's config.json")
