"""Where checkpoints lie, and when they are gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from lachesis.common.errors import CheckpointError, DataError
from lachesis.plugins.tinker.checkpoints import CheckpointStore, Saved
from lachesis.plugins.tinker.records import LoraShape

WEIGHTS = {"a": torch.ones(2)}


def saved(store: CheckpointStore, name: str = "one", ttl_s: int | None = None) -> Saved:
    return store.save(
        "s:train:0",
        "weights",
        name,
        base_model="m",
        shape=LoraShape(rank=2, seed=0),
        config=LoraConfig(r=2),
        weights=WEIGHTS,
        optimizer={"step:a": torch.ones(())},
        ttl_s=ttl_s,
    )


def test_what_is_saved_is_found(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = saved(store).path
    assert path == "tinker://s:train:0/weights/one"
    assert store.find(path).shape == LoraShape(rank=2, seed=0)
    assert torch.equal(store.weights(path)["a"], WEIGHTS["a"]) and store.optimizer(path).keys() == {"step:a"}
    assert [one.checkpoint_id for one in store.of_run("s:train:0")] == ["weights/one"]
    with pytest.raises(CheckpointError, match="exists already"):
        saved(store)


def test_one_that_has_expired_is_gone(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = saved(store, ttl_s=0).path
    with pytest.raises(DataError, match="there is no checkpoint"):
        store.find(path)
    assert not (tmp_path / "s:train:0" / "weights" / "one").exists()


@pytest.mark.parametrize("ttl_s", [-1, 10**15, 10**400])
def test_times_that_no_clock_has_are_refused(tmp_path: Path, ttl_s: int):
    """One of them in a checkpoint would be an error in each list of checkpoints from then on."""
    with pytest.raises(CheckpointError, match="ttl_seconds is not between 0 and"):
        saved(CheckpointStore(tmp_path), ttl_s=ttl_s)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("path", ["tinker://" + "x" * 300 + "/weights/a", "tinker://x/weights/" + "a" * 300])
def test_names_that_are_longer_than_files_have_are_refused(tmp_path: Path, path: str):
    for read in (CheckpointStore(tmp_path).find, CheckpointStore(tmp_path).delete):
        with pytest.raises(DataError, match="not the path"):
            read(path)


@pytest.mark.parametrize("name", ["..", "a/b", "", ".x", "/etc", "a" * 201])
def test_names_lead_nowhere_else(tmp_path: Path, name: str):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="not a valid name"):
        saved(store, name=name)
    with pytest.raises(DataError, match="not the path"):
        store.find(f"tinker://x/weights/{name}")


@pytest.mark.parametrize("run", ["..", ".", "a/.."])
def test_runs_lead_nowhere_else(tmp_path: Path, run: str):
    with pytest.raises(DataError, match="not the path"):
        CheckpointStore(tmp_path).find(f"tinker://{run}/weights/a")
