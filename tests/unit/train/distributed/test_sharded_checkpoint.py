"""The parts of a checkpoint, by a rank that is alone; what several do is in tests/ranks_program.py."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lachesis.common.errors import CheckpointError
from lachesis.common.files import crc32_of
from lachesis.train.distributed import sharded_checkpoint
from lachesis.train.distributed.sharded_checkpoint import (
    INDEX,
    PartsSave,
    read_parts,
    read_whole,
    saved_tensors,
    sharded_as,
)
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cut(tensor: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (1,))
    return distribute_tensor(tensor, mesh, [Shard(0)])


def save(directory: Path, tensors: dict[str, Any], *, copied: bool = True) -> PartsSave:
    saving = PartsSave(tensors, directory, copied=copied)
    until(lambda: saving.written)
    return saving


def test_what_is_written_is_of_the_moment_it_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"weights/a": cut(torch.arange(6.0).view(3, 2)), "noise/0 of 1": torch.arange(4)}
    going_on: list[int] = []
    write = PartsSave._write

    def later(saving: PartsSave) -> None:
        until(lambda: going_on)
        write(saving)

    monkeypatch.setattr(PartsSave, "_write", later)
    saving = PartsSave(tensors, tmp_path / "parts", copied=True)
    assert not saving.written
    tensors["weights/a"].to_local().zero_()
    tensors["noise/0 of 1"].zero_()
    going_on.append(1)
    files = saving.finish()
    assert {file.name for file in files} == {INDEX, "__0_0.distcp"}
    for file in files:
        path = tmp_path / "parts" / file.name
        assert (path.stat().st_size, crc32_of(path)) == (file.size, file.crc32)
    assert torch.equal(read_whole(tmp_path / "parts")["weights/a"], torch.arange(6.0).view(3, 2))
    assert "noise/0 of 1" not in read_whole(tmp_path / "parts")
    noise = torch.empty(4, dtype=torch.int64)
    read_parts(tmp_path / "parts", {"noise/0 of 1": noise})
    assert noise.tolist() == [0, 1, 2, 3]


def test_a_part_is_read_into_the_tensor_that_is_there(tmp_path: Path) -> None:
    save(tmp_path, {"weights/a": cut(torch.randn(3, 2).bfloat16())}, copied=False).finish()
    like = cut(torch.zeros(3, 2))
    into = sharded_as(like, torch.zeros(3, 2, dtype=torch.bfloat16))
    place = into.to_local().data_ptr()
    read_parts(tmp_path, {"weights/a": into})
    assert into.to_local().data_ptr() == place and into.dtype == torch.bfloat16
    assert torch.equal(into.to_local(), read_whole(tmp_path)["weights/a"])
    (found,) = saved_tensors(tmp_path).values()
    assert (found.is_meta, found.shape, found.dtype) == (True, (3, 2), torch.bfloat16)


def test_a_rank_that_cannot_write_is_named(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").mkdir()
    saving = save(tmp_path, {"weights/a": cut(torch.randn(3, 2))})
    with pytest.raises(CheckpointError, match=r"rank 0 could not write its part of .*IsADirectoryError") as caught:
        saving.finish()
    assert "earlier checkpoints are untouched" in caught.value.remedy


def test_parts_of_another_shape_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"weights/a": cut(torch.randn(3, 2))}).finish()
    with pytest.raises(CheckpointError, match=r"cannot be read: ValueError: .*[Ss]ize"):
        read_parts(tmp_path, {"weights/a": torch.empty(3, 3)})
    with pytest.raises(CheckpointError, match="cannot be read: RuntimeError: Missing key"):
        read_parts(tmp_path, {"weights/b": torch.empty(3, 3)})


def test_an_index_and_what_ranks_are_told_call_nothing(tmp_path: Path) -> None:
    """They are pickles, which can name any function."""

    class Calling:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "called"),)

    (tmp_path / INDEX).write_bytes(pickle.dumps(Calling()))
    with pytest.raises(CheckpointError, match=r"a checkpoint cannot contain posix.mkdir"):
        saved_tensors(tmp_path)
    for received in (lambda: sharded_checkpoint._gathered(Calling()), lambda: sharded_checkpoint._dealt([Calling()])):
        with pytest.raises(pickle.UnpicklingError, match=r"a checkpoint cannot contain posix.mkdir"):
            received()
    assert not (tmp_path / "called").exists()


def test_records_are_classes_and_dtypes_alone() -> None:
    """But for one function of torch, which looks up a memory layout by its name."""
    for module, name in sharded_checkpoint._RECORDS - {
        ("torch.serialization", "_get_layout"),
        ("pathlib._local", "PosixPath"),
    }:
        found = sharded_checkpoint._RecordsUnpickler.find_class(
            pickle.Unpickler.__new__(sharded_checkpoint._RecordsUnpickler), module, name
        )
        assert isinstance(found, type), (module, name)
