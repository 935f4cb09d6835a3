"""Which servers a run starts, and on which devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lachesis.common.errors import ConfigError, ModelError
from lachesis.config.schema import LachesisConfig
from lachesis.engines import build
from lachesis.engines.build import server_urls
from lachesis.process.managed import ManagedProcess


def configuration(**engine: Any) -> LachesisConfig:
    return LachesisConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "model", "device": "cpu", "dtype": "float32"},
            "engine": {"kind": "vllm", "port": 9100} | engine,
            "bridge": {"kind": "broadcast"},
        }
    )


def server_processes(config: LachesisConfig, directory: Path) -> list[ManagedProcess]:
    return build.server_processes(config, directory=directory, log_path=directory / "engine.log")


def test_one_copy_is_one_server_that_sees_all_devices(tmp_path: Path):
    config = configuration(tensor_parallel_size=2, devices="2,3")
    (server,) = server_processes(config, tmp_path)
    assert server_urls(config) == ["http://127.0.0.1:9100"] == [server.url]
    assert server._env == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert {"--tensor-parallel-size", "--port"} <= set(server.command)
    assert server.log_path == tmp_path / "engine.log"


def test_each_copy_has_a_port_a_log_and_devices_of_its_own(tmp_path: Path):
    config = configuration(data_parallel_size=2, tensor_parallel_size=2, devices="4,5,6,7")
    servers = server_processes(config, tmp_path)
    assert [server.url for server in servers] == server_urls(config)
    assert server_urls(config) == ["http://127.0.0.1:9100", "http://127.0.0.1:9101"]
    assert [server.command[server.command.index("--port") + 1] for server in servers] == ["9100", "9101"]
    assert [server._env["CUDA_VISIBLE_DEVICES"] for server in servers] == ["4,5", "6,7"]
    assert [server.log_path.name for server in servers] == ["engine.log", "engine-1.log"]
    assert all("--data-parallel-size" not in server.command for server in servers), "each is one engine"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"quantization": "fp8"}, ["--quantization", "fp8_per_channel"]),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
    ],
)
def test_how_it_computes_is_told_to_vllm_by_its_names(keys: dict[str, Any], words: list[str], tmp_path: Path):
    plain, (server,) = server_processes(configuration(), tmp_path)[0], server_processes(configuration(**keys), tmp_path)
    assert [word for word in server.command if word not in plain.command] == words


def test_vllm_on_a_cpu_gets_the_share_of_memory_that_is_set_and_leaves_the_trainer_its_own(tmp_path: Path):
    """Its own default is 0.92 of the machine's, with which it does not start beside anything."""
    shares = []
    for keys in ({}, {"gpu_memory_utilization": 0.2}, {"data_parallel_size": 2}):
        for server in server_processes(configuration(**keys), tmp_path):
            shares.append(server.command[server.command.index("--gpu-memory-utilization") + 1])
    assert shares == ["0.45", "0.2", "0.22", "0.22"], "several servers have as much as one"


def test_a_run_that_replays_routing_asks_vllm_for_it(tmp_path: Path):
    plain = configuration()
    config = plain.model_copy(update={"algorithm": plain.algorithm.model_copy(update={"router_replay": True})})
    (before,), (server,) = server_processes(plain, tmp_path), server_processes(config, tmp_path)
    assert [word for word in server.command if word not in before.command] == ["--enable-return-routed-experts"]


def test_a_server_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With torchrun's store for its own, vLLM would wait for workers that nobody starts."""
    of_a_rank = ("RANK", "WORLD_SIZE", "ROLE_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    for name in of_a_rank:
        monkeypatch.setenv(name, "1")
    (server,) = server_processes(configuration(devices="1"), tmp_path)
    assert server._env == dict.fromkeys(of_a_rank) | {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("bridge", ["lora_only", "lora_nccl"])
def test_adapters_in_float32_are_refused_for_vllm_on_a_gpu(
    bridge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its kernels take 16 bits, which it says when it is loaded, by an assertion without words."""
    sections = configuration().model_dump(exclude_unset=True)
    sections |= {"bridge": {"kind": bridge}, "adapter": {"kind": "lora", "r": 4}}
    config = LachesisConfig.model_validate(sections)
    assert "--enable-lora" in server_processes(config, tmp_path)[0].command, "a CPU has such kernels"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(
        ConfigError, match="GPU kernels for adapters need 16-bit weights, but the engine's dtype is float32"
    ) as raised:
        server_processes(config, tmp_path)
    assert "engine.dtype: bfloat16" in raised.value.remedy
    half = LachesisConfig.model_validate(sections | {"engine": sections["engine"] | {"dtype": "bfloat16"}})
    assert "--enable-lora" in server_processes(half, tmp_path)[0].command


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
    ],
)
def test_a_model_that_says_its_dtype_is_not_asked_by_transformers(
    written: dict[str, str], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Servers wait for it, and the import takes seconds."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **written}))
    monkeypatch.setattr(build, "resolve_device", lambda _: torch.device("cuda"))
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == getattr(torch, dtype), "what it would say"
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    assert build.trainer_dtype(of_model(tmp_path)) == dtype


@pytest.mark.parametrize("written", [{}, {"text_config": {"dtype": "float16"}}, {"dtype": "int8"}])
def test_of_one_that_does_not_transformers_knows_it(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **written}))
    monkeypatch.setattr(build, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *_, **__: transformers.Qwen2Config(dtype=torch.float64)
    )
    assert build.trainer_dtype(of_model(tmp_path)) == "float64"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_of_a_model_that_is_none_transformers_says_so(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    monkeypatch.setattr(build, "resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(ModelError, match=str(tmp_path)):
        build.trainer_dtype(of_model(tmp_path))


def of_model(path: Path) -> LachesisConfig:
    sections = configuration().model_dump(exclude_unset=True)
    return LachesisConfig.model_validate({**sections, "model": {"path": str(path)}})


def test_without_devices_the_copies_see_what_the_trainer_sees(tmp_path: Path):
    servers = server_processes(configuration(data_parallel_size=2), tmp_path)
    assert [server._env for server in servers] == [{}, {}]


@pytest.mark.parametrize(
    ("keys", "after"),
    [
        ({"devices": "1,1,2,2", "data_parallel_size": 4}, [None, 0, None, 2]),
        ({"data_parallel_size": 3}, [None, 0, 1]),
        ({"devices": "1,2", "data_parallel_size": 2}, [None, None]),
        ({"data_parallel_size": 2, "extra_args": ["--kv-cache-memory-bytes", "1000000000"]}, [None, None]),
        ({"data_parallel_size": 2, "extra_args": ["--kv_cache_memory_bytes=1000000000"]}, [None, None]),
    ],
    ids=["two on each of two GPUs", "all on the trainer's", "one on each", "caches are said", "as one word"],
)
def test_servers_on_one_gpu_start_one_after_another(
    keys: dict[str, Any], after: list[int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM takes for its own what another process comes to hold of a GPU while it looks at what it has of it.

    It does not look where it is told how large its cache is.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    servers = server_processes(configuration(**keys), tmp_path)
    assert [None if one.after is None else servers.index(one.after) for one in servers] == after
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert all(one.after is None for one in server_processes(configuration(**keys), tmp_path)), (
        "a CPU has no share to find"
    )


def test_servers_on_a_gpu_of_their_own_have_nine_tenths_of_it_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shares = []
    for keys in ({"devices": "1"}, {"devices": "1,1", "data_parallel_size": 2}):
        for server in server_processes(configuration(**keys), tmp_path):
            shares.append(server.command[server.command.index("--gpu-memory-utilization") + 1])
    assert shares == ["0.9", "0.45", "0.45"]
