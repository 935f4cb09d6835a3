"""Runs whose engine is a server of its own: they learn as in one process, and survive what happens to servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from lachesis.common.deadline import Deadline
from lachesis.engines.http.control import ServerControl
from tests import warm
from tests.contracts.servers import SOURCE, process
from tests.contracts.vllm_server import ENVIRONMENT, entry_point, needs_vllm
from tests.e2e.runs import Main, Outcome, environment, files, metrics, rewards, state, torchrun, write_reward, write_run
from tests.e2e.test_learning import sharpen
from tests.ports import free_port
from tests.waiting import LONG_S
from tests.warm import FORKING

LORA = {"kind": "lora", "r": 8}
RUN_S = 240.0
NOTICED_S = 60.0


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers and runs of this test look for sessions."""
    directory = tmp_path / "sessions"
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(directory))
    return directory


def write(directory: Path, *, engine: dict[str, Any], bridge: dict[str, Any], **sections: dict[str, Any]) -> Path:
    """A run over an engine at a free port; with LoRA where the bridge needs it, on a model that it can sharpen."""
    lora = {"adapter": LORA} if bridge["kind"].startswith("lora") else {}
    if engine["kind"] != "http":
        engine = {"port": free_port()} | engine
    config = write_run(directory, engine=engine, bridge=bridge, **lora, **sections)
    if lora:
        sharpen(directory)
    return config


@contextmanager
def training(config: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """`lachesis train CONFIG`, as a user starts it; it is not left running."""
    run = warm.Popen(
        [sys.executable, "-c", FORKING, "train", str(config), *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield run
    finally:
        if run.poll() is None:
            run.terminate()
            try:
                run.communicate(timeout=LONG_S)
            except subprocess.TimeoutExpired:
                run.kill()
                run.communicate()


def outcome(run: subprocess.Popen[str]) -> Outcome:
    """How it ended."""
    out, err = run.communicate(timeout=RUN_S)
    return Outcome(run.returncode, out, err)


def train(config: Path, *arguments: str, **variables: str) -> Outcome:
    with training(config, *arguments, **variables) as run:
        return outcome(run)


def rise(run_dir: Path) -> float:
    """How far the mean reward of the last three steps is above that of the first three."""
    found = rewards(run_dir)
    return fmean(found[-3:]) - fmean(found[:3])


def ratio(values: Mapping[str, float]) -> float:
    """The mean ratio of a step; once everything is learned there are steps that train on nothing and have none."""
    return values["mean_ratio"] if values["micro_batches"] else 1.0


def wait_for(condition: Callable[[], Any], *, within_s: float, what: str) -> Any:
    """The condition's first true value. Polls: files tell nobody that they have changed."""
    pause, until = threading.Event(), time.monotonic() + within_s
    while time.monotonic() < until:
        if found := condition():
            return found
        pause.wait(0.02)
    raise AssertionError(f"{what} did not happen within {within_s:g} s")


OTHER_BRIDGE = pytest.mark.long(
    "test_a_run_over_a_server_learns[shared, generating ahead]: bridges that test_atropos_run.py and vLLM learn over"
)


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize(
    ("bridge", "sections", "least"),
    [
        pytest.param({"kind": "shared_vllm"}, {}, 0.6, marks=OTHER_BRIDGE),
        ({"kind": "shared_vllm"}, {"pipeline": {"async_prefetch": True}, "run": {"steps": 22}}, 0.6),
        pytest.param({"kind": "lora_only"}, {}, 0.4, marks=OTHER_BRIDGE),
        pytest.param({"kind": "lora_nccl"}, {}, 0.4, marks=OTHER_BRIDGE),
        ({"kind": "none", "every_steps": 4}, {"run": {"steps": 16}}, 0.3),
    ],
    ids=["shared", "shared, generating ahead", "lora_only", "lora_nccl", "none"],
)
def test_a_run_over_a_server_learns(tmp_path: Path, bridge: dict, sections: dict, least: float):
    config = write(tmp_path, engine={"kind": "embedded_server"}, bridge=bridge, **sections)
    done = train(config)
    assert done.code == 0, done.err
    run_dir = tmp_path / "runs" / "proof"
    assert state(run_dir)["status"] == "finished"
    assert rise(run_dir) > least
    every = bridge.get("every_steps", 1)
    for line in metrics(run_dir).steps:
        assert line.values["weight_version"] == line.step - line.step % every
        assert 0 <= line.values["canary_error"] < 1e-3
        if every == 1 and "pipeline" not in sections:
            assert ratio(line.values) == pytest.approx(1.0, abs=1e-3), "sampled under the weights of now"
    assert not list((tmp_path / "sessions").glob("*.json")), "the server was stopped"
    assert (run_dir / "logs" / "engine.log").is_file()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["proof"]


def widen(directory: Path) -> None:
    """vLLM's attention on the CPU knows no heads smaller than 32."""
    before = Qwen2Config.from_pretrained(directory / "model")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(**before.to_dict() | sizes)).save_pretrained(directory / "model")
    sharpen(directory)


@needs_vllm
@pytest.mark.long(
    "test_a_run_over_vllm_learns: with two ranks; the ranks program has workers read what each rank packs"
)
@pytest.mark.usefixtures("sessions")
@pytest.mark.timeout(600)
def test_two_ranks_with_an_engine_beside_each_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each copy of the model reads its own rank's shared memory, in which the CPU stands for a GPU of each."""
    config = write(
        tmp_path,
        engine={"kind": "vllm", "max_model_len": 32, "enforce_eager": True, "data_parallel_size": 2},
        bridge={"kind": "lora_nccl", "transport": "ipc"},
        run={"steps": 12},
    )
    widen(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(entry_point(tmp_path / "plugin")))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    done = torchrun(2, "tests.e2e.forking", "train", config)
    assert done.code == 0, done.err
    run_dir = tmp_path / "runs" / "proof"
    assert rise(run_dir) > 0.4
    for line in metrics(run_dir).steps:
        assert line.values["weight_version"] == line.step
        assert line.values["canary_error"] < 1e-3
        assert {"train_time/0", "train_time/1"} <= line.values.keys()
    assert "in place, on their own GPUs: 1 of rank 0, 2 of rank 1" in (run_dir / "logs" / "trainer.log").read_text()


@needs_vllm
@pytest.mark.usefixtures("sessions")
@pytest.mark.timeout(600)
def test_a_run_over_vllm_learns(tmp_path: Path):
    config = write(
        tmp_path,
        engine={"kind": "vllm", "max_model_len": 32, "enforce_eager": True},
        bridge={"kind": "lora_only"},
        run={"steps": 10},
    )
    widen(tmp_path)
    path = os.pathsep.join([str(SOURCE), str(entry_point(tmp_path / "plugin"))])
    done = train(config, **ENVIRONMENT, PYTHONPATH=path)
    assert done.code == 0, done.err
    assert re.search(r"engine: vLLM is starting.*^engine: ready after \d+ s$", done.out, re.DOTALL | re.MULTILINE)
    run_dir = tmp_path / "runs" / "proof"
    assert rise(run_dir) > 0.4
    for line in metrics(run_dir).steps:
        assert line.values["weight_version"] == line.step
        assert line.values["canary_error"] < 1e-3
        assert ratio(line.values) == pytest.approx(1.0, abs=1e-3)


class TestAnEngineThatIsKilled:
    """`kill -9` of the server in the middle of a run."""

    @pytest.mark.parametrize(
        "bridge",
        [
            pytest.param({"kind": "lora_only"}, id="lora_only"),
            pytest.param(
                {"kind": "none", "every_steps": 4},
                id="none",
                marks=pytest.mark.long(
                    "TestAnEngineThatIsKilled::test_is_started_again_once_with_the_trainers_weights[lora_only]: "
                    "with another bridge"
                ),
            ),
        ],
    )
    def test_is_started_again_once_with_the_trainers_weights(self, tmp_path: Path, sessions: Path, bridge: dict):
        config = self.write(tmp_path, bridge)
        run_dir = tmp_path / "runs" / "proof"
        with training(config) as run:
            killed = self.kill(run_dir, sessions)
            log = self.noticed(run_dir)
            done = outcome(run)
        assert done.code == 0, done.err
        assert f"(pid {killed}," in log and "was ended by SIGKILL" in log
        assert "  | " in log, "the engine's last lines"
        whole = (run_dir / "logs" / "trainer.log").read_text()
        assert whole.count("the engine died; restarting it") == 1
        assert whole.count("was ended by SIGKILL") == 1
        lines = metrics(run_dir).steps
        assert [line.step for line in lines] == list(range(1, 13)), "no step is missing or done twice"
        assert all(line.values["canary_error"] < 1e-3 for line in lines)
        assert state(run_dir)["status"] == "finished"
        assert not list(sessions.glob("*.json"))

    def test_ends_a_run_whose_weights_were_in_its_memory(self, tmp_path: Path, sessions: Path):
        sections = {"checkpoint": {"every_steps": 2}, "services": {"restarts": 0}}
        config = self.write(tmp_path, {"kind": "shared_vllm"}, **sections)
        run_dir = tmp_path / "runs" / "proof"
        with training(config) as run:
            killed = self.kill(run_dir, sessions)
            log = self.noticed(run_dir)
            done = outcome(run)
        assert f"(pid {killed}," in log and "was ended by SIGKILL" in log
        assert done.code == 6
        line = done.err.splitlines()[-1]
        assert line.startswith("error: the engine died, and the weights in its memory are lost: ")
        assert line.endswith("-> continue from the last checkpoint with --resume")
        assert state(run_dir)["status"] == "failed"
        resumed = train(config, "--resume")
        assert resumed.code == 0, resumed.err
        assert [line.step for line in metrics(run_dir).steps] == list(range(1, 13))

    @staticmethod
    def write(directory: Path, bridge: dict[str, Any], **sections: dict[str, Any]) -> Path:
        """A run of twelve steps that is slow enough to be met in its middle."""
        slow = write_reward(directory, "time.sleep(0.25)\nreturn shares")
        return write(
            directory,
            engine={"kind": "embedded_server"},
            bridge=bridge,
            run={"steps": 12},
            rewards={"functions": [slow]},
            **sections,
        )

    @staticmethod
    def kill(run_dir: Path, sessions: Path) -> int:
        """Kill the server once five steps are done; returns its pid."""

        def five_steps() -> bool:
            path = run_dir / "metrics.jsonl"
            return path.is_file() and path.read_text().count('"step": 5') > 0

        wait_for(five_steps, within_s=RUN_S, what="the fifth step")
        (session,) = sessions.glob("*.json")
        pid = json.loads(session.read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    @staticmethod
    def noticed(run_dir: Path) -> str:
        """What the run's log says of it, in time."""
        path = run_dir / "logs" / "trainer.log"
        wait_for(lambda: "SIGKILL" in path.read_text(), within_s=NOTICED_S, what="a line about the engine's end")
        return path.read_text()


@contextmanager
def served(model: Path, *, root: Path, log: Path, **variables: str) -> Iterator[str]:
    """`lachesis serve --engine embedded`; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "lachesis", "serve", "--engine", "embedded", "--model", str(model)]
    command += ["--port", str(port), "--adapter-root", str(root), "--enable-lora", "--device", "cpu"]
    with process(command, url=f"http://127.0.0.1:{port}", log=log, start_s=100, popen=warm.Popen, **variables) as url:
        yield url


class TestServersThatDoNotFit:
    """Each is one sentence, and the run directory is as it was."""

    @pytest.fixture(scope="class")
    def directory(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("servers")

    @pytest.fixture(scope="class")
    def config(self, directory: Path) -> Path:
        config = write(directory, engine={"kind": "http"}, bridge={"kind": "lora_only"}, run={"steps": 2})
        (directory / "runs").mkdir()
        return config

    @pytest.fixture(scope="class")
    def server(self, directory: Path, config: Path) -> Iterator[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LACHESIS_SESSION_DIR", str(directory / "sessions"))
            with served(directory / "model", root=directory, log=directory / "server.log") as url:
                yield url

    @pytest.fixture
    def refused(self, main: Main, config: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
        """Trains over a server, which has to fail before the run directory is touched."""
        monkeypatch.setenv("LACHESIS_SESSION_DIR", str(config.parent / "sessions"))

        def train_over(url: str, *overrides: str) -> Outcome:
            before = files(config.parent / "runs")
            done = main("train", config, f"--set=engine.urls=[{url}]", *overrides)
            assert len(done.errors) == 1, done.err
            assert " -> " in done.errors[0], "it says what to do"
            assert files(config.parent / "runs") == before == {}
            assert not list((config.parent / "runs").iterdir())
            return done

        return train_over

    def test_nothing_listens(self, refused: Callable[..., Outcome]):
        url = f"http://127.0.0.1:{free_port()}"
        done = refused(url)
        assert done.code == 6
        assert f"the inference server at {url} does not answer" in done.errors[0]

    def test_it_is_no_inference_server(self, refused: Callable[..., Outcome]):
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
            thread = threading.Thread(target=other.serve_forever)
            thread.start()
            done = refused(f"http://127.0.0.1:{other.server_port}")
            other.shutdown()
            thread.join()
        assert done.code == 6
        assert f"http://127.0.0.1:{other.server_port}" in done.errors[0]

    def test_another_run_has_it(self, refused: Callable[..., Outcome], server: str, config: Path):
        control = ServerControl(server)
        control.claim("another-run", deadline=Deadline("claiming", LONG_S))
        done = refused(server)
        assert done.code == 6
        assert "another-run" in done.errors[0]
        assert control.info(deadline=Deadline("asking", LONG_S)).owner == "another-run"
        control.close()

    def test_no_token_is_known(self, refused: Callable[..., Outcome], server: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("LACHESIS_SESSION_DIR", "/nowhere")
        done = refused(server)
        assert done.code == 6
        assert f"no token is known for the server at {server}" in done.errors[0]
        assert "LACHESIS_SESSION_TOKEN" in done.errors[0]

    def test_the_token_is_wrong(self, refused: Callable[..., Outcome], server: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("LACHESIS_SESSION_TOKEN", "of another server")
        done = refused(server)
        assert done.code == 6
        assert "401" in done.errors[0]

    @pytest.mark.parametrize(
        "bridge",
        ["lora_only", "lora_nccl", "broadcast", "reload", "shared_vllm"],
    )
    def test_it_serves_another_model(self, refused: Callable[..., Outcome], server: str, directory: Path, bridge: str):
        wider = directory / "wider"
        if not wider.exists():
            config = Qwen2Config.from_pretrained(directory / "model")
            Qwen2ForCausalLM(Qwen2Config(**config.to_dict() | {"intermediate_size": 96})).save_pretrained(wider)
        adapter = "lora" if bridge.startswith("lora") else "none"
        done = refused(
            server,
            f"--set=bridge={{kind: {bridge}}}",
            f"--set=adapter={{kind: {adapter}}}",
            f"--set=model.path={wider}",
            f"--set=model.tokenizer={directory / 'model'}",
            "--set=engine.takeover=true",
        )
        assert done.code in (5, 6)
        assert "another model" in done.errors[0]

    def test_another_run_may_be_told_to_give_way(
        self, main: Main, config: Path, server: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("LACHESIS_SESSION_DIR", str(config.parent / "sessions"))
        done = main("train", config, f"--set=engine.urls=[{server}]", "--set=engine.takeover=true")
        assert done.code == 0, done.err
