from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from lachesis.common.errors import EngineError
from lachesis.process.managed import process_exists
from lachesis.transport import bridge_file as module
from lachesis.transport.bridge_file import (
    BRIDGE_FILE,
    check_session,
    default_directory,
    find_bridge_file,
    read_bridge_file,
    search_places,
    write_bridge_file,
    write_channel_file,
)
from lachesis.transport.layout import ReceivedTensor
from lachesis.transport.shared_tensors import FileStorage, SharedTensor
from tests.unit.transport.sharing import SESSION, bridge_file
from tests.unit.transport.test_shared_tensors import CUDA_ENTRY

QKV = SharedTensor.from_json("qkv", CUDA_ENTRY | {"stride": [8, 1], "tensor_offset": 2, "device_uuid": "GPU-1"})
NORM = SharedTensor(FileStorage("/dev/shm/lachesis-weights-1", 64), (4,), (1,), 8, "float32")
DOCUMENTED = {
    "model",
    "tp_degree",
    "dp_shard_degree",
    "param_names",
    "shared_weights_enabled",
    "single_copy_enabled",
    "num_params",
    "param_mappings",
    "ipc_handles",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "run" / BRIDGE_FILE
    write_bridge_file(place, bridge_file({"qkv": QKV, "norm": NORM}))
    return place


def change(path: Path, **fields: object) -> None:
    document = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


class TestWriting:
    def test_it_has_the_documented_fields(self, path):
        document = json.loads(path.read_text())
        assert document.keys() >= DOCUMENTED
        assert document["param_names"] == ["qkv", "norm"]
        assert (document["num_params"], document["tp_degree"], document["dp_shard_degree"]) == (2, 1, 1)
        assert document["shared_weights_enabled"] is document["single_copy_enabled"] is True
        expected = {"vllm_name": "qkv", "shape": [4, 8], "dtype": "bfloat16", "device": "cuda:0"}
        assert document["param_mappings"]["qkv"] == expected
        assert document["param_mappings"]["norm"]["device"] == "cpu"
        assert document["ipc_handles"] == {
            "qkv": CUDA_ENTRY | {"stride": [8, 1], "tensor_offset": 2, "device_uuid": "GPU-1"}
        }
        assert document["shared_files"]["norm"]["path"] == "/dev/shm/lachesis-weights-1"

    def test_it_comes_back_whole(self, path):
        found = read_bridge_file(path)
        assert found.tensors == {"qkv": QKV, "norm": NORM}
        assert (found.model, found.session_id, found.pid, found.engine) == ("tiny", SESSION, os.getpid(), "vllm")
        assert found.path == path

    def test_it_is_the_users_alone_also_under_a_lax_umask(self, path):
        before = os.umask(0)
        try:
            write_bridge_file(path, bridge_file({"qkv": QKV}))
            write_bridge_file(path.parent / "new" / BRIDGE_FILE, bridge_file({"qkv": QKV}))
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((path.parent / "new").stat().st_mode) == 0o700
        assert sorted(p.name for p in path.parent.iterdir()) == ["new", BRIDGE_FILE]

    def test_a_write_that_fails_leaves_the_file_before(self, path, monkeypatch):
        before = path.read_text()

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.replace", full)
        with pytest.raises(EngineError, match="cannot be written: No space left"):
            write_bridge_file(path, bridge_file({"norm": NORM}))
        assert path.read_text() == before
        assert [p.name for p in path.parent.iterdir()] == [BRIDGE_FILE]

    def test_the_documented_line_is_logged(self, path, caplog):
        with caplog.at_level(logging.INFO, logger="lachesis"):
            write_bridge_file(path, bridge_file({"qkv": QKV, "norm": NORM}))
        assert "Exported 2 IPC handles for single-copy mode" in caplog.text


class TestSearching:
    @pytest.fixture(autouse=True)
    def places(self, tmp_path, monkeypatch):
        for name in ("logs", "here", "default"):
            (tmp_path / name).mkdir()
        monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setattr(module, "DEFAULT_DIRECTORY", tmp_path / "default")

    def test_the_order_is_logdir_here_default(self, tmp_path):
        for name in ("default", "here", "logs"):
            (tmp_path / name / BRIDGE_FILE).write_text("{}")
            for auto in (None, "", "auto"):
                assert find_bridge_file(auto) == tmp_path / name / BRIDGE_FILE

    def test_an_explicit_path_is_the_only_place(self, tmp_path):
        (tmp_path / "logs" / BRIDGE_FILE).write_text("{}")
        (tmp_path / "mine.json").write_text("{}")
        assert find_bridge_file(tmp_path / "mine.json") == tmp_path / "mine.json"
        assert find_bridge_file(str(tmp_path / "logs")) == tmp_path / "logs" / BRIDGE_FILE
        with pytest.raises(EngineError, match=r"looked for [^,]*typo") as caught:
            find_bridge_file(tmp_path / "typo.json")
        assert "logs" not in caught.value.message

    def test_without_logdir_the_other_places_remain(self, tmp_path, monkeypatch):
        monkeypatch.delenv("LOGDIR")
        assert search_places() == [tmp_path / "here" / BRIDGE_FILE, tmp_path / "default" / BRIDGE_FILE]
        assert default_directory() == tmp_path / "default"
        monkeypatch.setenv("LOGDIR", str(tmp_path / "here"))
        assert len(search_places()) == 2, "a place is looked at once"
        assert default_directory() == tmp_path / "here"

    def test_the_error_lists_the_places(self, tmp_path):
        with pytest.raises(EngineError, match=r"Could not find vllm_bridge_config\.json") as caught:
            find_bridge_file()
        assert all(str(tmp_path / name / BRIDGE_FILE) in caught.value.message for name in ("logs", "here", "default"))
        assert "VLLM_ENABLE_SHARED_WEIGHTS=1" in caught.value.remedy


class TestReading:
    @pytest.mark.parametrize("flag", [True, False])
    def test_empty_handles(self, path, flag):
        change(path, ipc_handles={}, shared_files={}, single_copy_enabled=flag)
        with pytest.raises(EngineError, match="empty ipc_handles") as caught:
            read_bridge_file(path)
        assert ("single_copy_enabled is false" in caught.value.message) is not flag
        assert caught.value.remedy

    def test_a_parameter_without_a_handle(self, path):
        change(path, shared_files=None)
        with pytest.raises(EngineError, match="lists 2 parameters but has handles for only 1; 'norm'"):
            read_bridge_file(path)

    def test_a_handle_of_seven_items(self, path):
        entry = {key: value for key, value in CUDA_ENTRY.items() if key != "event_sync_required"}
        change(path, ipc_handles={"qkv": entry})
        with pytest.raises(EngineError, match="expected a tuple of 8 items, found 7"):
            read_bridge_file(path)

    @pytest.mark.parametrize(
        "fields", [{"session_id": None}, {"pid": "x"}, {"ipc_handles": [1]}, {"shared_files": {"a": 1}}], ids=str
    )
    def test_fields_that_are_missing_or_wrong(self, path, fields):
        change(path, **fields)
        with pytest.raises(EngineError, match="is damaged, or another version wrote it"):
            read_bridge_file(path)

    @pytest.mark.parametrize("text", ["", "{", "[]", "null"])
    def test_no_json(self, path, text):
        path.write_text(text)
        with pytest.raises(EngineError, match="is damaged"):
            read_bridge_file(path)

    def test_a_file_that_anyone_could_have_written(self, path):
        path.chmod(0o666)
        with pytest.raises(EngineError, match="anyone may write to it"):
            read_bridge_file(path)

    def test_a_file_of_another_user(self, path, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(EngineError, match="belongs to another user"):
            read_bridge_file(path)

    def test_a_file_that_is_gone(self, path):
        path.unlink()
        with pytest.raises(EngineError, match="is gone"):
            read_bridge_file(path)


class TestStale:
    def test_the_file_of_the_server_that_answers_is_good(self, path):
        check_session(read_bridge_file(path), session_id=SESSION)

    def test_another_session_is_refused_and_the_writer_named(self, path):
        with pytest.raises(EngineError, match=rf"process {os.getpid()}, which still runs\), but session new answers"):
            check_session(read_bridge_file(path), session_id="new")

    def test_a_dead_writer_is_said_to_be_gone(self, path):
        change(path, pid=2**22 + 1)  # above every Linux process number
        assert not process_exists(2**22 + 1)
        with pytest.raises(EngineError, match=r"stale: .* which is gone") as caught:
            check_session(read_bridge_file(path), session_id="new")
        assert caught.value.remedy


class TestChannel:
    def test_it_has_the_documented_fields(self, tmp_path):
        path = write_channel_file(
            tmp_path,
            init_method="tcp://127.0.0.1:29500",
            world_size=2,
            tensors=[ReceivedTensor("b", (4,), "float32"), ReceivedTensor("a", (2, 3), "bfloat16")],
            backend="gloo",
            session_id="s",
            url="http://127.0.0.1:9001",
        )
        document = json.loads(path.read_text())
        assert path.name == "nccl_bridge_config.json"
        assert (document["init_method"], document["world_size"]) == ("tcp://127.0.0.1:29500", 2)
        assert document["param_metadata"] == {
            "param_names": ["b", "a"],
            "param_shapes": {"b": [4], "a": [2, 3]},
            "param_dtypes": {"b": "float32", "a": "bfloat16"},
            "num_params": 2,
        }
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
