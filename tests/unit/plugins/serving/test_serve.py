"""From flags and configurations to the servers they name. Real servers are in the contract suites."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from lachesis import cli
from lachesis.cli import app
from lachesis.common.errors import ConfigError, EngineError
from lachesis.config.load import load_config
from lachesis.engines import build
from lachesis.engines.options import ServeOptions
from lachesis.engines.serving.session import new_session, write_session
from lachesis.plugins.embedded_server import app as embedded_server
from lachesis.plugins.embedded_server.loading import load_causal_lm
from lachesis.plugins.serving import serve
from lachesis.plugins.serving import vllm_launch as launch
from lachesis.plugins.serving.serve import config_options, vllm_arguments
from tests.logs import handlers_kept
from tests.ports import free_port
from tests.unit.engines.fake_server import FakeServer, refusal
from tests.waiting import LONG_S

CANONICAL = """
run: {steps: 3, name: mine}
model: {path: model, dtype: bfloat16}
data: {path: problems.jsonl}
rewards: {functions: [rewards.right]}
"""
AXOLOTL = """
base_model: some/model
rl: grpo
max_steps: 3
gradient_accumulation_steps: 4
adapter: lora
lora_r: 8
lora_target_linear: true
vllm: {host: 0.0.0.0, port: 8100, gpu_memory_utilization: 0.8, dtype: bfloat16, max_model_len: 512,
       tensor_parallel_size: 2}
datasets: [{path: problems.jsonl, type: rewards.transform, split: train}]
trl: {use_vllm: true, vllm_mode: server, vllm_lora_sync: true, vllm_server_port: 8100, num_generations: 4,
      reward_funcs: [rewards.right]}
output_dir: out
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeOptions]:
    monkeypatch.chdir(tmp_path)

    def read(text: str, **settings: Any) -> ServeOptions:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return config_options(path, **settings)[0]

    return read


class TestArguments:
    def test_only_what_is_given_goes_to_vllm(self):
        assert vllm_arguments(ServeOptions(model="m")) == ["--model", "m", "--host", "127.0.0.1", "--port", "9001"]

    def test_everything(self):
        options = ServeOptions(
            model="m", host="::1", port=1, tokenizer="t", dtype="float16", device="auto", max_model_len=2,
            max_num_seqs=3, gpu_memory_utilization=0.5, tensor_parallel_size=4, enforce_eager=True, enable_lora=True,
            max_lora_rank=5, adapter_roots=(Path("/a"), Path("/b")), served_model_name="s", arguments=("--x", "y"),
        )  # fmt: skip
        assert vllm_arguments(options) == shlex.split(
            "--model m --host ::1 --port 1 --tokenizer t --dtype float16 --max-model-len 2 --max-num-seqs 3 "
            "--gpu-memory-utilization 0.5 --tensor-parallel-size 4 --enforce-eager --enable-lora --max-lora-rank 8 "
            "--served-model-name s --adapter-root /a --adapter-root /b --x y"
        )
        assert options.url == "http://[::1]:1"

    def test_vllm_takes_no_device(self):
        with pytest.raises(ConfigError, match="--device cuda:1") as caught:
            vllm_arguments(ServeOptions(model="m", device="cuda:1"))
        assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy

    @pytest.mark.parametrize(("rank", "slots"), [(1, 1), (4, 8), (8, 8), (17, 32), (512, 512), (1000, 1000)])
    def test_vllm_has_slots_of_some_sizes_only(self, rank: int, slots: int):
        arguments = vllm_arguments(ServeOptions(model="m", enable_lora=True, max_lora_rank=rank))
        assert arguments[arguments.index("--max-lora-rank") + 1] == str(slots)

    @pytest.mark.parametrize(
        ("changes", "flag"),
        [
            ({"arguments": ("--swap-space", "4")}, "--swap-space 4"),
            ({"gpu_memory_utilization": 0.9, "tensor_parallel_size": 2}, "--tensor-parallel-size"),
            ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ],
    )
    def test_the_embedded_engine_does_not_ignore_flags(self, changes: dict[str, Any], flag: str):
        options = ServeOptions(model="m", engine="embedded", port=free_port(), **changes)
        with pytest.raises(ConfigError, match=f"does not know {flag}"):
            serve.serve(options, on_ready=lambda line: None)

    def test_a_taken_port_is_said_before_anything_is_loaded(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(EngineError, match=f"port {port} .* is taken by pid {os.getpid()}"):
                serve.serve(ServeOptions(model="m", port=port), on_ready=lambda line: None)

    def test_vllm_takes_no_free_port(self):
        with pytest.raises(ConfigError, match="cannot choose a free port"):
            serve.serve(ServeOptions(model="m", port=0), on_ready=lambda line: None)


class TestConfigurations:
    def test_a_managed_vllm(self, configured: Callable[..., ServeOptions], tmp_path: Path):
        (tmp_path / "model").mkdir()
        engine = "engine: {kind: vllm, port: 9005, max_model_len: 99, data_parallel_size: 2, extra_args: [--x, '1']}\n"
        options = configured(f"{CANONICAL}{engine}bridge: {{kind: reload}}\n", arguments=["--seed", "3"])
        assert (options.engine, options.model, options.port) == ("vllm", str(tmp_path / "model"), 9005)
        assert (options.dtype, options.max_model_len, options.enable_lora) == ("bfloat16", 99, False)
        assert options.arguments[-4:] == ("--x", "1", "--seed", "3")
        assert "--data-parallel-size" in options.arguments
        (root,) = options.adapter_roots
        assert root.is_dir() and root.name == "mine"

    def test_a_server_elsewhere(self, configured: Callable[..., ServeOptions]):
        text = f"{CANONICAL}bridge: {{kind: lora_only}}\nadapter: {{kind: lora, r: 4}}\n"
        one = configured(text + "engine: {kind: http, urls: ['http://127.0.0.1:9007/v1']}\n")
        assert (one.host, one.port, one.enable_lora, one.max_lora_rank) == ("127.0.0.1", 9007, True, 4)
        two = text + "engine: {kind: http, urls: ['http://127.0.0.1:9007', 'http://127.0.0.2:9008']}\n"
        with pytest.raises(ConfigError, match="names 2 servers") as caught:
            configured(two)
        assert "--port" in caught.value.remedy
        chosen = configured(two, port=9008)
        assert (chosen.host, chosen.port) == ("127.0.0.2", 9008)

    def test_an_embedded_server(self, configured: Callable[..., ServeOptions]):
        text = f"{CANONICAL}engine: {{kind: embedded_server, max_batch_size: 7}}\nbridge: {{kind: reload}}\n"
        options = configured(text, overrides=["engine.port=9009"])
        assert (options.engine, options.port, options.max_num_seqs) == ("embedded", 9009, 7)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("engine", ["kind: vllm, port: 9005", "kind: http, urls: ['http://127.0.0.1:9005']"])
    def test_the_dtype_is_the_trainers(
        self,
        configured: Callable[..., ServeOptions],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        device: str,
        engine: str,
    ):
        """A checkpoint in float32 stays so, which vLLM's own `auto` would round to 16 bits."""
        monkeypatch.setattr(build, "resolve_device", lambda name: torch.device(device))
        (tmp_path / "model").mkdir()
        AutoConfig.for_model("qwen2", dtype="float32").save_pretrained(tmp_path / "model")
        text = CANONICAL.replace("dtype: bfloat16", "dtype: auto") + "bridge: {kind: reload}\n"
        assert configured(f"{text}engine: {{{engine}}}\n").dtype == "float32"
        embedded = f"{text}engine: {{kind: embedded_server}}\n"
        assert configured(embedded).dtype == "auto"
        assert configured(embedded, served_by="vllm").dtype == "float32"

    @pytest.mark.parametrize(
        "engine",
        [
            "{kind: vllm, port: 9005, gpu_memory_utilization: 0.3, max_model_len: 9, enforce_eager: true, "
            "enable_sleep_mode: true, dtype: float16, extra_args: [--seed, '3']}",
            "{kind: vllm}",
            "{kind: embedded_server, port: 9005, max_model_len: 9}",
        ],
    )
    def test_a_run_starts_the_server_that_vllm_serve_starts(
        self, configured: Callable[..., ServeOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
    ):
        asked: list[ServeOptions] = []
        monkeypatch.setattr(serve, "serve", lambda options, *, on_ready: asked.append(options))
        text = f"{CANONICAL}engine: {engine}\nbridge: {{kind: lora_only}}\nadapter: {{kind: lora, r: 4}}\n"
        options = configured(text)
        config = load_config(tmp_path / "config.yaml").config
        command = build.server_command(config, 0, directory=options.adapter_roots[0])
        result = CliRunner().invoke(app, command[3:])
        assert result.exit_code == 0, result.output
        assert asked == [options]

    def test_there_is_no_server(self, configured: Callable[..., ServeOptions]):
        with pytest.raises(ConfigError, match="without a server") as caught:
            configured(CANONICAL)
        assert "embedded_server" in caught.value.remedy

    def test_axolotls_keys(self, configured: Callable[..., ServeOptions]):
        options = configured(AXOLOTL, overrides=["vllm.max_model_len=256"])
        assert (options.model, options.host, options.port, options.dtype) == ("some/model", "0.0.0.0", 8100, "bfloat16")
        assert (options.gpu_memory_utilization, options.max_model_len, options.tensor_parallel_size) == (0.8, 256, 2)
        assert (options.enable_lora, options.max_lora_rank, options.url) == (True, 8, "http://127.0.0.1:8100")

    def test_axolotls_keys_of_earlier_versions(self, configured: Callable[..., ServeOptions]):
        text = AXOLOTL.replace("vllm_mode: server", "vllm_mode: server, vllm_max_model_len: 300, vllm_dtype: float16")
        options = configured(text.replace(" max_model_len: 512,\n", "\n"))
        assert (options.max_model_len, options.dtype) == (300, "bfloat16")  # vllm: says the dtype

    def test_another_engine_than_the_files(self, configured: Callable[..., ServeOptions]):
        options = configured(AXOLOTL, served_by="embedded", overrides=["vllm.enable_prefix_caching=true"])
        assert (options.engine, options.device, options.port, options.max_model_len) == ("embedded", "auto", 8100, 512)
        assert (options.enable_lora, options.max_lora_rank) == (True, 8)
        assert (options.gpu_memory_utilization, options.tensor_parallel_size, options.arguments) == (None, None, ())
        # What was asked for on the command line is not dropped, but refused where it is served.
        assert configured(AXOLOTL, served_by="embedded", arguments=["--x"]).arguments == ("--x",)
        embedded = f"{CANONICAL}engine: {{kind: embedded_server, port: 9009}}\nbridge: {{kind: reload}}\n"
        options = configured(embedded, served_by="vllm")
        assert (options.engine, options.device, options.port) == ("vllm", None, 9009)


class TestStarting:
    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path))
        server = FakeServer()
        yield server
        server.stop()

    @pytest.fixture
    def said(self) -> queue.Queue[str]:
        return queue.Queue()

    def test_the_embedded_engine(
        self, server: FakeServer, said: queue.Queue[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """In whose place a server stands that runs already."""
        asked: list[ServeOptions] = []

        def instead(options: ServeOptions, *, on_ready: Callable[[str], None]) -> None:
            asked.append(options)
            write_session(session)
            on_ready(server.url)

        session = new_session(host="127.0.0.1", port=server.port)
        monkeypatch.setattr(embedded_server, "serve_embedded", instead)
        options = ServeOptions(model="m", engine="embedded", port=0, device="cpu", enable_lora=True, max_num_seqs=5)
        serve.serve(options, on_ready=said.put)
        line = said.get(timeout=LONG_S)
        assert line == (
            f"serving m at {server.url} (session {session.session_id}, token in {tmp_path / f'{server.port}.json'})"
        )
        assert asked == [options.model_copy(update={"adapter_roots": (Path.cwd(),)})]
        serve.serve(options.model_copy(update={"adapter_roots": (tmp_path,), "dtype": "float32"}), on_ready=said.put)
        assert (asked[1].adapter_roots, asked[1].dtype) == ((tmp_path,), "float32")

    def test_vllm(self, said: queue.Queue[str], server: FakeServer, monkeypatch: pytest.MonkeyPatch):
        asked: list[list[str]] = []
        monkeypatch.setattr(launch, "check_installed", lambda: None)
        monkeypatch.setattr(launch, "main", lambda arguments: asked.append(arguments))
        monkeypatch.setattr(serve, "check_port_free", lambda url: None)
        session = new_session(host="127.0.0.1", port=server.port)
        write_session(session)
        serve.serve(ServeOptions(model="m", port=server.port, arguments=("--seed", "1")), on_ready=said.put)
        assert asked == [["--model", "m", "--host", "127.0.0.1", "--port", str(server.port), "--seed", "1"]]
        assert session.session_id in said.get(timeout=LONG_S)
        (body,) = server.state.bodies("/generate")
        assert (body["prompt_token_ids"], body["max_tokens"]) == ([1], 1)

    def test_a_server_that_cannot_run_a_token_serves_nothing(
        self, said: queue.Queue[str], server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ):
        server.state.replies["/generate"] = lambda body: refusal(500, "EngineCore encountered an issue")
        monkeypatch.setattr(launch, "check_installed", lambda: None)
        monkeypatch.setattr(launch, "main", lambda arguments: signal.pause())
        monkeypatch.setattr(serve, "check_port_free", lambda url: None)
        write_session(new_session(host="127.0.0.1", port=server.port))

        def end(number: int, frame: object) -> None:
            raise SystemExit(0)

        before = signal.signal(signal.SIGTERM, end)
        try:
            with pytest.raises(
                EngineError, match=r"m is loaded, but cannot generate a token: .*EngineCore encountered"
            ):
                serve.serve(ServeOptions(model="m", port=server.port), on_ready=said.put)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert said.empty()

    def test_what_vllm_raises_is_ours(self, monkeypatch: pytest.MonkeyPatch):
        def fails(arguments: list[str]) -> None:
            raise RuntimeError("Engine core initialization failed")

        monkeypatch.setattr(launch, "check_installed", lambda: None)
        monkeypatch.setattr(launch, "main", fails)
        with pytest.raises(EngineError, match="Engine core initialization failed"):
            serve.serve(ServeOptions(model="m", port=free_port()), on_ready=lambda line: None)

    def test_a_server_whose_engine_was_killed_does_not_end_as_if_all_were_well(self, monkeypatch: pytest.MonkeyPatch):
        """vLLM's own server ends with code 0 then, and a service manager would not start it again."""
        said = b"ERROR 11-29 22:48:46 [async_llm.py:906] EngineDeadError: EngineCore encountered an issue.\n"
        monkeypatch.setattr(launch, "check_installed", lambda: None)
        monkeypatch.setattr(launch, "main", lambda arguments: os.write(2, said))
        with pytest.raises(EngineError, match="vLLM's engine has died: its process was killed"):
            serve.serve(ServeOptions(model="m", port=free_port()), on_ready=lambda line: None)


class TestCommands:
    @pytest.fixture
    def command(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str]]:
        def run(*arguments: str) -> tuple[int, str]:
            monkeypatch.setattr(sys, "argv", ["lachesis", *arguments])
            with handlers_kept(), pytest.raises(SystemExit) as exit_:
                cli.main()
            return int(exit_.value.code or 0), capsys.readouterr().err

        return run

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
        asked: list[ServeOptions] = []
        monkeypatch.setattr(serve, "serve", lambda options, *, on_ready: asked.append(options))
        return asked

    def test_flags_that_are_ours_and_vllms(self, command: Callable[..., tuple[int, str]], asked: list[ServeOptions]):
        flags = (
            "serve --model m --port 9002 --gpu-memory-utilization 0.4 --swap-space 4 --enable-lora "
            "--no-enable-prefix-caching --adapter-root a --adapter-root b"
        )
        code, _ = command(*shlex.split(flags))
        assert code == 0
        assert asked == [
            ServeOptions(
                model="m",
                port=9002,
                gpu_memory_utilization=0.4,
                enable_lora=True,
                adapter_roots=(Path("a"), Path("b")),
                arguments=("--swap-space", "4", "--no-enable-prefix-caching"),
            )
        ]

    def test_a_configuration(self, command: Callable[..., tuple[int, str]], asked: list[ServeOptions], tmp_path: Path):
        path = tmp_path / "config.yaml"
        path.write_text(f"{CANONICAL}engine: {{kind: vllm}}\nbridge: {{kind: reload}}\n")
        overrides = ["--set", "model.dtype=float16", "--set", f"run.dir={tmp_path / 'runs'}"]
        assert command("vllm-serve", str(path), *overrides, "--port", "9003", "--seed", "1")[0] == 0
        assert command("vllm-serve", str(path), *overrides, "--engine", "embedded")[0] == 0
        options, embedded = asked
        assert (options.port, options.dtype, options.arguments[-2:]) == (9003, "float16", ("--seed", "1"))
        assert (options.engine, embedded.engine) == ("vllm", "embedded")

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (["serve"], 2, "Missing option"),
            (["serve", "--model", "m", "--port", "x"], 2, "--port"),
            (["serve", "--model", "m", "--engine", "other"], 2, "'other'"),
            (["vllm-serve", "no-such-file.yaml"], 2, "no configuration file"),
        ],
    )
    def test_wrong_ones(self, command: Callable[..., tuple[int, str]], arguments: list[str], code: int, said: str):
        assert command(*arguments)[0] == code
        assert said in command(*arguments)[1]

    def test_an_error_has_its_exit_code(self, command: Callable[..., tuple[int, str]]):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            code, err = command("serve", "--model", "m", "--port", str(taken.getsockname()[1]))
        assert code == EngineError.exit_code and "is taken by" in err


@pytest.mark.parametrize("device", ["meta", "bogus", "cpu:x", "cuda:4096"])
def test_a_device_that_is_none_is_refused(device: str):
    with pytest.raises(ConfigError, match=f"--device {device}") as raised:
        load_causal_lm("model", dtype="auto", device=device)
    assert "cuda:N" in raised.value.remedy


def test_a_rank_of_adapters_that_may_not_be_loaded_is_refused():
    with pytest.raises(ConfigError, match="--max-lora-rank has no effect without --enable-lora"):
        serve.serve(ServeOptions(model="m", max_lora_rank=8), on_ready=lambda line: None)


@pytest.mark.parametrize(
    "text",
    [
        "base_model: org/model\nrl: grpo\nvllm: {port: 8003}\ntrl: {use_vllm: true}\n",
        "model: {path: org/model}\nengine: {kind: http, urls: [http://127.0.0.1:8003]}\nbridge: {kind: broadcast}\n",
    ],
)
def test_a_server_needs_neither_problems_nor_rewards(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "serve.yaml"
    file.write_text(f"{text}")
    monkeypatch.setattr("lachesis.engines.build.trainer_dtype", lambda _: "float32")
    assert config_options(file)[0].port == 8003
