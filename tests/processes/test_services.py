"""`lachesis run`: what is started with which words, and what happens when it dies."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError
from lachesis.config.load import load_argv
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.atropos import services as launch
from lachesis.plugins.atropos.services import Services, api_command, environment_command, load_words, require_server
from lachesis.process.managed import ManagedProcess
from tests.paths import EXAMPLES as FILES
from tests.ports import free_port
from tests.waiting import LONG_S, until

# Answers on the port of its first argument.
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *arguments): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

SLEEP = "import time; time.sleep(600)"


def config(api_port: int = 8002, **sections: Any) -> LachesisConfig:
    return LachesisConfig.model_validate(
        {
            "run": {"steps": 3},
            "model": {"path": "model"},
            "source": {"kind": "atropos", "url": f"http://127.0.0.1:{api_port}"},
            "engine": {"kind": "embedded_server", "port": 9123},
            "bridge": {"kind": "shared_vllm"},
            "services": {"environment": {"name": "arithmetic"}},
            **sections,
        }
    )


def program(text: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", text, *map(str, arguments)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Services whose commands are those given; stopped at the end."""
    started: list[Services] = []
    port = free_port()

    def build(
        *,
        api: str | None = SERVER,
        environment: str = "import time; time.sleep(600)",
        lives: Path | None = None,
        **services: Any,
    ) -> Services:
        section = {"environment": {"name": "arithmetic"}, "start_s": LONG_S, **services}
        if api is None:
            section["api"] = None
        monkeypatch.setattr(launch, "api_command", lambda *a, **k: program(api or "", port, lives))
        chosen = Services(config(port, services=section))
        monkeypatch.setattr(launch, "environment_command", lambda *a: program(environment))
        started.append(chosen)
        chosen.start(tmp_path)
        return chosen

    yield build
    for one in started:
        one.stop()


def failure(services: Services) -> EngineError:
    """What `watch` raises once a service is given up."""
    until(lambda: services._failure is not None)
    with pytest.raises(EngineError) as raised:
        services.watch()
    return raised.value


def test_both_run_with_a_log_each_and_end_together(start: Any, tmp_path: Path):
    services = start()
    api, environment = list(services._services)
    services.watch()
    assert api.pid and environment.pid
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"api.log", "env.log"}
    services.stop()
    assert api.pid is None
    assert environment.pid is None
    services.stop()


def test_one_that_is_killed_is_started_again(start: Any, caplog: pytest.LogCaptureFixture):
    services = start()
    api = services._services[0]
    first = api.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: api.pid not in (None, first) and api in services._up)
    services.watch()
    assert "the rollout API (pid" in caplog.text
    assert "was ended by SIGKILL" in caplog.text
    assert "restarting it (1 of 3)" in caplog.text


def test_one_that_dies_again_and_again_is_given_up(start: Any):
    services = start(environment="import os, signal; os.kill(os.getpid(), signal.SIGKILL)", restarts=1)
    error = failure(services)
    assert "the environment arithmetic has died 2 times" in error.message


# The first life serves, the second is killed before it does, further ones serve.
KILLED_IN_ITS_SECOND_START = """
import os, pathlib, signal, sys
lives = pathlib.Path(sys.argv[2])
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
if lives.read_text() == "xx":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_that_is_killed_while_it_starts_is_started_again(start: Any, tmp_path: Path):
    services = start(api=KILLED_IN_ITS_SECOND_START + SERVER, lives=tmp_path / "lives")
    api = services._services[0]
    first = api.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: api.pid not in (None, first) and api in services._up)
    services.watch()
    assert (tmp_path / "lives").read_text() == "xxx"


def test_one_that_says_why_it_cannot_work_is_not_started_again(start: Any):
    error = failure(start(environment="import sys; print('no such flag'); sys.exit(2)"))
    assert "the environment arithmetic (pid" in error.message
    assert "exit code 2" in error.message
    assert "no such flag" in error.message


def test_an_environment_that_ends_in_peace_ends_the_wait_after_a_while(start: Any, monkeypatch: pytest.MonkeyPatch):
    services = start(environment="print('all problems are done')")
    until(lambda: services._ended is not None)
    services.watch()
    monkeypatch.setattr(launch, "_AFTERMATH_S", 0.0)
    with pytest.raises(EngineError, match="none will come") as raised:
        services.watch()
    assert "all problems are done" in raised.value.message


def test_an_api_that_does_not_come_up_says_its_last_words(start: Any):
    with pytest.raises(EngineError, match="out of luck"):
        start(api="raise SystemExit('out of luck')")


def test_an_api_that_never_answers_has_a_deadline(start: Any):
    with pytest.raises(DeadlineExceeded, match="the start of the rollout API") as raised:
        start(api=SLEEP, start_s=0.3)
    assert "services.start_s" in raised.value.remedy


def test_an_api_that_runs_elsewhere_is_left_alone(start: Any):
    services = start(api=None)
    assert not services.starts_api
    assert [service.name for service in services._services] == ["the environment arithmetic"]


def test_a_service_that_was_not_started_says_so(tmp_path: Path):
    service = ManagedProcess(["true"], name="the thing", log_path=tmp_path / "log")
    with pytest.raises(EngineError, match="the thing was not started"):
        service.check()


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"source": {"kind": "local"}}, "source.kind is local"),
        ({"engine": {"kind": "embedded"}, "bridge": {"kind": "in_process"}}, "generate through a server"),
        ({"source": {"kind": "atropos", "url": "http://10.0.0.1:8002"}}, "source.url is at 10.0.0.1"),
        ({"services": {"environment": {"name": "aritmetic"}}}, "unknown environment"),
        ({"services": {"environment": {"name": "arithmetic", "args": ["--env.groop_size", "4"]}}}, "groop_size"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(sections: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        Services(config(free_port(), **sections))


def test_a_port_that_is_taken_is_said_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EngineError, match="is taken by") as raised:
        Services(config(port := taken.getsockname()[1]))
    assert f"cannot be started at http://127.0.0.1:{port}" in raised.value.message
    assert "--api-port" in raised.value.remedy


def test_an_address_of_the_api_that_is_none_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match="not an address of a rollout API"):
        Services(config(99999))


def test_the_commands_carry_the_addresses(tmp_path: Path):
    chosen = config(services={"api": {"max_queued_tokens": 5}})
    assert chosen.services.api is not None
    words = api_command(chosen, chosen.services.api, state_dir=tmp_path / "api")[3:]
    assert words[:2] == ["run-api", "--strict"]
    pairs = dict(zip(words[2::2], words[3::2], strict=True))
    assert pairs == {
        "--host": "127.0.0.1", "--port": "8002", "--state-dir": str(tmp_path / "api"), "--max-queued-tokens": "5",
        "--max-body-mb": "64.0", "--ack-timeout": "600.0", "--env-timeout": "300.0",
    }  # fmt: skip


def test_an_environment_s_own_flags_come_first():
    chosen = config(
        services={"environment": {"name": "gsm8k", "args": ["--env.tokenizer-name=t", "--env.max_num", "4"]}}
    )
    assert chosen.services.environment is not None
    assert environment_command(chosen, chosen.services.environment)[3:] == [
        "env", "gsm8k", "serve", "--env.rollout_server_url", "http://127.0.0.1:8002", "--openai.base_url",
        "http://127.0.0.1:9123", "--env.tokenizer-name=t", "--env.max_num", "4",
    ]  # fmt: skip


def load(*words: str, **options: Any) -> LachesisConfig:
    return load_words(words, **options).config


def test_flags_start_an_engine_and_share_its_weights():
    chosen = load("--model-name", "m", environment="gsm8k", environment_args="--env.max_num 200")
    assert (chosen.engine.kind, chosen.bridge.kind) == ("vllm", "shared_vllm")
    assert chosen.services.environment is not None
    assert chosen.services.environment.args == ["--env.max_num", "200"]
    assert chosen.services.api is not None


def test_flags_name_the_mode_the_engine_and_an_api_that_runs():
    flags = ["--model-name", "m", "--weight-bridge-mode", "lora_only", "--vllm-port", "9005"]
    chosen = load(*flags, "--atropos-url", "http://localhost:8005", engine="embedded", overrides=["run.steps=3"])
    assert (chosen.engine.kind, chosen.bridge.kind, chosen.run.steps) == ("embedded_server", "lora_only", 3)
    assert chosen.engine.port == 9005  # type: ignore[union-attr]
    assert chosen.services.api is None


def test_the_port_of_the_api_is_a_flag(tmp_path: Path):
    assert load("--model-name", "m", api_port=8102).source.url == "http://127.0.0.1:8102"  # type: ignore[union-attr]
    assert load(str(FILES / "atropos" / "arithmetic_vllm.yaml"), api_port=8102).source.url.endswith(":8102")  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="--api-port is for one that this command starts"):
        load("--model-name", "m", "--atropos-url", "http://localhost:8005", api_port=8102)


def test_an_engine_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--engine is 'sglang'"):
        load("--model-name", "m", engine="sglang")


def test_a_configuration_takes_no_flags_but_set(tmp_path: Path):
    with pytest.raises(ConfigError, match="unknown flag --lr"):
        load("job.yaml", "--lr", "1")


def test_a_server_that_does_not_run_is_named_with_the_command_that_starts_it():
    flags = ["--weight-bridge-mode", "lora_only", "--vllm-port", "9", "--lora-r", "32", "--dtype", "bfloat16"]
    config = load_argv(["--model-name", "m", *flags]).config
    with pytest.raises(EngineError, match="External vLLM server required on port 9: ") as raised:
        require_server(config)
    command = "lachesis serve --model m --port 9 --dtype bfloat16 --enable-lora --max-lora-rank 32"
    assert raised.value.remedy == f"start it with `{command}`"


def test_a_server_for_all_weights_needs_no_adapters():
    config = load_argv(["--model-name", "m", "--single-copy", "--vllm-port", "9"]).config
    with pytest.raises(EngineError) as raised:
        require_server(config)
    assert raised.value.remedy == "start it with `lachesis serve --model m --port 9`"


def test_a_server_of_the_run_s_own_need_not_run_yet():
    require_server(load_argv(["--model-name", "m", "--weight-bridge-mode", "none", "--vllm-port", "9"]).config)
