from __future__ import annotations

import base64
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lachesis.common.errors import EngineError
from lachesis.transport.bridge_file import read_bridge_file
from lachesis.transport.digest import digests
from lachesis.transport.shared_tensors import (
    Attachments,
    CudaStorage,
    FileStorage,
    SharedTensor,
    create_file,
    export_cuda,
    export_from_file,
    share_tensors,
)
from tests.unit.transport.sharing import Exporter, exporter

SHAPES = {"qkv": (8, 6), "norm": (5,), "scale": (), "rest": (3, 2, 2)}
CUDA_ENTRY = {
    "device_index": 0,
    "ipc_handle_b64": base64.b64encode(b"c" + bytes(64)).decode(),
    "storage_size": 4096,
    "storage_offset": 512,
    "ref_counter_handle_b64": base64.b64encode(b"/torch_1_2_3").decode(),
    "ref_counter_offset": 3,
    "event_handle_b64": base64.b64encode(bytes(64)).decode(),
    "event_sync_required": True,
    "shape": [4, 8],
    "dtype": "bfloat16",
}


class TestTwoProcesses:
    @pytest.fixture(scope="class")
    def other(self, tmp_path_factory):
        with exporter(tmp_path_factory.mktemp("shared") / "bridge.json", SHAPES) as running:
            yield running

    def attach(self, other: Exporter) -> tuple[Attachments, dict[str, torch.Tensor]]:
        attachments = Attachments()
        shared = read_bridge_file(other.path).tensors
        return attachments, {name: attachments.tensor(name, entry) for name, entry in shared.items()}

    def test_what_the_exporter_has_is_here(self, other):
        _, tensors = self.attach(other)
        assert {name: tuple(t.shape) for name, t in tensors.items()} == SHAPES
        assert digests(tensors) == other.digests()

    def test_what_is_written_here_is_seen_there(self, other):
        _, tensors = self.attach(other)
        before = other.digests()
        tensors["qkv"][2:5] += 1.0
        after = other.digests()
        assert after == digests(tensors)
        assert {name for name in SHAPES if after[name] != before[name]} == {"qkv"}

    def test_what_is_written_there_is_seen_here(self, other):
        _, tensors = self.attach(other)
        other.fill("norm", 7.0)
        assert tensors["norm"].tolist() == [7.0] * 5

    def test_a_storage_is_mapped_once_and_outlives_the_list_of_it(self, other):
        attachments, tensors = self.attach(other)
        assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 1
        attachments.close()
        attachments.close()
        other.fill("scale", 2.5)
        assert tensors["scale"].item() == 2.5

    def test_the_files_are_the_users_alone(self, other):
        files = list(other.path.parent.iterdir())
        assert len(files) == 2
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_modules_parameters_move_into_one_file_and_stay_what_they_are(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    objects = dict(module.named_parameters())
    file = share_tensors(module.parameters(), tmp_path)
    after = dict(module.named_parameters())
    assert all(after[name] is objects[name] and torch.equal(after[name], before[name]) for name in before)
    assert module[1].weight is module[0].weight, "ties stay"
    assert not module[0].bias.requires_grad and module[0].weight.requires_grad
    assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == 1
    assert not any(b.untyped_storage().data_ptr() == file.storage.data_ptr() for b in module.buffers())
    assert all(p.data_ptr() % 64 == file.storage.data_ptr() % 64 for p in module.parameters())
    module(torch.randn(4, 3)).square().sum().backward()
    with torch.no_grad():
        module[0].weight -= module[0].weight.grad
    there = Attachments().tensor("w", export_from_file(module[0].weight, file))
    assert torch.equal(there, module[0].weight) and not torch.equal(there, before["0.weight"])
    file.close()


def test_mixed_dtypes_and_layouts_keep_their_values(tmp_path):
    tensors = [torch.randn(3, 5).to(torch.bfloat16), torch.randn(4, 6).T, torch.arange(5), torch.zeros(0, 3)]
    before = [t.clone() for t in tensors]
    file = share_tensors(tensors, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    for tensor in tensors:
        shared = SharedTensor.from_json("t", json.loads(json.dumps(export_from_file(tensor, file).to_json())))
        assert torch.equal(Attachments().tensor("t", shared), tensor)
    file.close()


def test_closing_removes_the_file_and_the_memory_stays(tmp_path):
    tensor = torch.ones(4)
    file = share_tensors([tensor], tmp_path)
    assert file.path.exists()
    file.close()
    file.close()
    assert not file.path.exists()
    assert tensor.add_(1).tolist() == [2.0] * 4
    with pytest.raises(EngineError, match="is gone"):
        Attachments().tensor("t", export_from_file(tensor, file))


def test_files_of_dead_processes_are_removed_and_those_of_living_ones_are_not(tmp_path):
    living = create_file(10, tmp_path)
    orphan = tmp_path / "lachesis-weights-orphan"
    orphan.write_bytes(b"x" * 10)
    other = tmp_path / "not-ours"
    other.write_bytes(b"x")
    create_file(10, tmp_path).close()
    assert living.path.exists() and other.exists()
    assert not orphan.exists()
    living.close()


def test_memory_that_is_not_there_is_an_error_at_once(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"3\.0 MiB of shared memory cannot be allocated.*No space left") as caught:
        create_file(3 << 20, tmp_path)
    assert "--shm-size" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="no shared memory can be created"):
        create_file(1, tmp_path / "file" / "below")


def test_only_tensors_on_the_cpu_go_into_files_and_only_cuda_tensors_through_ipc():
    with pytest.raises(EngineError, match="a shared file cannot hold a tensor on meta"):
        share_tensors([torch.empty(3, device="meta")])
    with pytest.raises(EngineError, match="CUDA IPC cannot share a tensor on cpu"):
        export_cuda(torch.ones(3))


class TestMapping:
    @pytest.fixture
    def shared(self, tmp_path):
        tensor = torch.ones(4, 4)
        file = share_tensors([tensor], tmp_path)
        yield export_from_file(tensor, file)
        file.close()

    def test_a_file_of_another_size_is_refused(self, shared: SharedTensor):
        assert isinstance(shared.storage, FileStorage)
        with Path(shared.storage.path).open("ab") as file:
            file.write(b"more")
        with pytest.raises(EngineError, match=r"size mismatch: .* has 68 bytes, not 64"):
            Attachments().tensor("t", shared)

    def test_a_file_that_no_engine_made_is_never_mapped(self, shared: SharedTensor, tmp_path):
        target = tmp_path / "thesis.txt"
        target.write_bytes(b"x" * 64)
        with pytest.raises(EngineError, match="was not made by an engine of this user"):
            Attachments().tensor("t", replace(shared, storage=FileStorage(str(target), 64)))
        link = tmp_path / "lachesis-weights-link"
        link.symlink_to(target)
        with pytest.raises(EngineError, match="was not made by an engine of this user"):
            Attachments().tensor("t", replace(shared, storage=FileStorage(str(link), 64)))
        assert target.read_bytes() == b"x" * 64

    def test_a_gpu_that_this_process_does_not_see_is_named(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        shared = SharedTensor.from_json("w", CUDA_ENTRY | {"device_uuid": "GPU-1234"})
        with pytest.raises(
            EngineError, match="GPU GPU-1234, which is not among the 0 GPUs that this process sees"
        ) as caught:
            Attachments().tensor("w", shared)
        assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy

    @pytest.mark.parametrize(
        ("handle", "cause"), [(b"e" + bytes(64), "expandable segments"), (b"c" + bytes(64), "CUDA refused")]
    )
    def test_memory_that_cuda_will_not_open_is_an_error(self, monkeypatch, handle, cause):
        def refuse(*_):
            raise RuntimeError("invalid device context\nand a trace")

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
        entry = CUDA_ENTRY | {"ipc_handle_b64": base64.b64encode(handle).decode()}
        with pytest.raises(EngineError, match=rf"'w' cannot be mapped: .*{cause}.*: invalid device context"):
            Attachments().tensor("w", SharedTensor.from_json("w", entry))


class TestJson:
    def test_the_documented_form_needs_neither_stride_nor_offset(self):
        shared = SharedTensor.from_json("w", CUDA_ENTRY)
        assert isinstance(shared.storage, CudaStorage)
        assert (shared.stride, shared.tensor_offset) == ((8, 1), 0)
        assert SharedTensor.from_json("w", CUDA_ENTRY | {"dtype": "torch.bfloat16"}) == shared

    def test_it_comes_back_whole(self):
        entry = CUDA_ENTRY | {"stride": [16, 2], "tensor_offset": 5, "device_uuid": "GPU-1"}
        shared = SharedTensor.from_json("w", entry)
        assert json.loads(json.dumps(shared.to_json())) == entry

    @pytest.mark.parametrize("lacking", [["event_sync_required"], ["ref_counter_offset", "event_handle_b64"]])
    def test_a_handle_of_fewer_than_8_items_says_which_are_missing(self, lacking):
        entry = {key: value for key, value in CUDA_ENTRY.items() if key not in lacking}
        with pytest.raises(EngineError, match=f"'w' lacks {', '.join(lacking)}: expected a tuple of 8 items") as caught:
            SharedTensor.from_json("w", entry)
        assert caught.value.remedy

    @pytest.mark.parametrize(
        "change",
        [{"shape": [40, 80]}, {"storage_size": 63}, {"tensor_offset": 2040}, {"stride": [4096, 1]}],
        ids=lambda change: next(iter(change)),
    )
    def test_a_tensor_that_does_not_fit_its_storage_is_a_size_mismatch(self, change):
        with pytest.raises(
            EngineError, match=r"size mismatch: the shared tensor 'w' \[.*\] in bfloat16 needs \d+ bytes"
        ):
            SharedTensor.from_json("w", CUDA_ENTRY | change)

    @pytest.mark.parametrize(
        "change",
        [{"dtype": "bfloat17"}, {"dtype": "nn"}, {"shape": None}, {"shape": "ab"}, {"storage_size": "big"}],
        ids=str,
    )
    def test_wrong_values_are_errors(self, change):
        with pytest.raises(EngineError, match="description of the shared tensor 'w' is wrong"):
            SharedTensor.from_json("w", CUDA_ENTRY | change)

    @pytest.mark.parametrize("change", [{"stride": [8, -1]}, {"stride": [1]}, {"tensor_offset": -1}], ids=str)
    def test_what_describes_no_tensor_is_refused(self, change):
        with pytest.raises(EngineError, match="cannot be a tensor's"):
            SharedTensor.from_json("w", CUDA_ENTRY | change)
