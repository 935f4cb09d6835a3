"""``lachesis run``: rollout API, engine, environment and trainer in one command, each with a log of its own.

The trainer is this process. It starts its engine, then the API, then the environment; however it ends, kill -9
included, they end with it. Each that dies on the way is started again a few times: with its state directory the
API loses nothing by it, and the engine gets the weights of now.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError, LachesisError
from lachesis.common.process import EngineProcess, check_port_free
from lachesis.common.types import Say
from lachesis.common.world import World
from lachesis.config.dialects import ManagedEngine
from lachesis.config.load import LoadedConfig, load_argv, load_config
from lachesis.config.schema import (
    ApiServiceConfig,
    AtroposSourceConfig,
    EmbeddedEngineConfig,
    EnvironmentServiceConfig,
    LachesisConfig,
)
from lachesis.environments.flags import parse_options
from lachesis.rollouts.atropos.client import api_url
from lachesis.run.engine import server_urls
from lachesis.run.environments import find
from lachesis.run.grpo import Invocation, split_words, train_as_asked
from lachesis.run.train import RunSummary

logger = logging.getLogger("lachesis")

HELP = """\
Usage: lachesis run CONFIG [--set KEY=VALUE] [--resume] [--overwrite]
       lachesis run --model-name MODEL --environment NAME [FLAGS]

Starts the rollout API, the engine, an environment and the trainer, each with a log of its own in logs/ of the run
directory, and stops them all at the end.

With a configuration, source.kind is atropos, engine says what generates, and services what else is started:
`lachesis explain services` lists its keys.

With flags
  --environment NAME         arithmetic, gsm8k, calculator, FILE.py:CLASS or module.CLASS; none is started if unset
  --environment-args "..."   Its flags; `lachesis env NAME --help` lists them.
  --engine vllm|embedded     What generates; vllm if unset.
  --atropos-url URL          A rollout API that runs already; if unset one is started on port 8002.
  --weight-bridge-mode MODE  How new weights reach the engine; shared_vllm if unset.
  ...                        All other flags of `lachesis grpo --help`."""

_ENGINES: Mapping[str, ManagedEngine] = {"vllm": "vllm", "embedded": "embedded_server"}
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::1")
_HEALTH_S = 2.0
_LOOK_S = 0.1
# Causes that may be gone next time: what was lost is the other side, or time.
_PASSING = (EngineError.exit_code, DeadlineExceeded.exit_code, 70)
# How long the trainer still waits for a batch once its environment has ended in peace.
_AFTERMATH_S = 15.0


class Service(EngineProcess):
    """A process of the run that is no engine. ``up`` is True once it has been started with success.

    Args:
        name: what messages call it.
        url: where it answers ``/healthz`` once it can work; None if it does not listen.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, url: str | None, log_path: Path, on_death: Callable[[Service], None]
    ) -> None:
        # Port 0 is never taken.
        super().__init__(
            command, url=url or "http://127.0.0.1:0", log_path=log_path, on_death=lambda error: on_death(self)
        )
        self.name = name
        self._health = f"{self.url}/healthz" if url else None
        self.up = False
        self.abandoned = threading.Event()

    @property
    def exit_code(self) -> int | None:
        """Of its last life, negative for a signal; None while it runs."""
        return None if self._life is None or not self._life.ended.is_set() else self._life.code

    def wait_ready(self, *, deadline: Deadline) -> None:
        """Return once it can work; at once where it does not listen. Raises as :meth:`start`."""
        while self._health is not None:
            self.check()
            if _answers(self._health):
                self.check()
                return
            deadline.check(f"{self._health} does not answer; its log is {self.log_path}")
            if self.abandoned.wait(_LOOK_S):
                raise EngineError(f"{self.name} is not needed any more")

    def check(self) -> None:
        """Raise EngineError, with the last lines of its log, unless it runs."""
        if self.pid is None:
            raise self.death()

    def death(self) -> EngineError:
        """How it ended, with the last lines of its log."""
        life = self._life
        if life is None:
            return EngineError(f"{self.name} was not started", remedy="start it")
        shown = "".join(f"\n  | {line}" for line in self.last_lines()) or " (nothing)"
        return EngineError(
            f"{self.name} (pid {life.pid}) {life.ending()}; the end of its log {self.log_path}:{shown}",
            remedy=f"read {self.log_path}",
        )


class Services:
    """The API and the environment of a run.

    Args:
        config: of the run.

    Raises:
        ConfigError: the configuration is none for ``lachesis run``, or the environment or its flags are unknown.
        EngineError: the API's port is taken.
    """

    def __init__(self, config: LachesisConfig) -> None:
        check_services(config)
        self._config = config
        self._services: list[Service] = []
        self._deaths: queue.SimpleQueue[Service | None] = queue.SimpleQueue()
        self._starts: Counter[str] = Counter()
        self._supervisor: threading.Thread | None = None
        self._failure: LachesisError | None = None
        self._ended: tuple[float, Service] | None = None

    @property
    def starts_api(self) -> bool:
        """Whether the API is one of them; otherwise it runs already."""
        return self._config.services.api is not None

    def start(self, run_dir: Path) -> None:
        """Start the API, wait until it answers, start the environment. Logs go to ``run_dir/logs``.

        Raises:
            EngineError: one died; with the last lines of its log.
            DeadlineExceeded: the API does not answer in time.
        """
        config, logs = self._config, Path(os.path.abspath(run_dir)) / "logs"
        assert isinstance(config.source, AtroposSourceConfig), "check_services saw to it"
        self._supervisor = threading.Thread(target=self._supervise, name="lachesis-services", daemon=True)
        self._supervisor.start()
        if config.services.api is not None:
            command = api_command(config, config.services.api, state_dir=logs.parent / "api")
            self._start(Service("the rollout API", command, url=config.source.url, log_path=logs / "api.log",
                                on_death=self._deaths.put))  # fmt: skip
        if config.services.environment is not None:
            chosen = config.services.environment
            command = environment_command(config, chosen)
            self._start(Service(f"the environment {chosen.name}", command, url=None, log_path=logs / "env.log",
                                on_death=self._deaths.put))  # fmt: skip

    def watch(self) -> None:
        """Raise where one of them is gone for good, so that nothing will come of waiting."""
        if self._failure is not None:
            raise self._failure
        if self._ended is not None and time.monotonic() - self._ended[0] > _AFTERMATH_S:
            error = self._ended[1].death()
            raise EngineError(f"the trainer waits for a batch and none will come: {error.message}", remedy=error.remedy)

    def stop(self) -> None:
        """Stop them, the environment first. Idempotent."""
        for service in self._services:
            service.abandoned.set()
        if self._supervisor is not None:
            self._deaths.put(None)
            self._supervisor.join()
            self._supervisor = None
        while self._services:
            self._services.pop().stop()

    def _start(self, service: Service) -> None:
        self._services.append(service)
        logger.info("starting %s; its log is %s", service.name, service.log_path)
        self._bring_up(service)

    def _bring_up(self, service: Service) -> None:
        """Raises as :meth:`start`. Only the death of what is up is the supervisor's business."""
        deadline = Deadline(f"the start of {service.name}", self._config.services.start_s, "services.start_s")
        service.up = False
        service.start(deadline=deadline)
        service.up = True
        if service.pid is None:  # it died before that
            self._deaths.put(service)

    def _supervise(self) -> None:
        while (service := self._deaths.get()) is not None:
            if service.abandoned.is_set() or not service.up or service.pid is not None:
                continue
            try:
                self._revive(service)
            except LachesisError as error:
                self._failure = error

    def _revive(self, service: Service) -> None:
        """Start a service again. Raises EngineError where that is of no use."""
        code, error = service.exit_code, service.death()
        if code == 0:
            logger.info("%s has ended by itself", service.name)
            self._ended = time.monotonic(), service
            return
        self._starts[service.name] += 1
        most = self._config.services.restarts
        if code is not None and code > 0 and code not in _PASSING:
            raise error
        if self._starts[service.name] > most:
            raise EngineError(
                f"{service.name} has died {self._starts[service.name]} times: {error.message}", remedy=error.remedy
            )
        logger.warning("%s\nstarting it again (%d of %d)", error.message, self._starts[service.name], most)
        self._bring_up(service)


def run_all(
    words: Sequence[str],
    *,
    say: Say,
    console: Console | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    world: World | None = None,
) -> RunSummary | None:
    """Run everything that a configuration or flags ask for. None where help was asked for.

    Args:
        words: the command line after ``lachesis run``.
        say: prints a line.
        console, stop_requested, world: as :func:`lachesis.run.train.train`.

    Raises:
        LachesisError: as :func:`lachesis.run.train.train`; one of the processes died, with the last lines of its log.
    """
    asked = split_words(words, valued=("engine", "environment", "environment-args"))
    if asked.help or not words:
        say(HELP)
        return None
    loaded = load_words(asked)
    return train_as_asked(
        loaded,
        asked,
        say=say,
        console=console,
        stop_requested=stop_requested,
        companions=Services(loaded.config),
        world=world,
    )


def load_words(asked: Invocation) -> LoadedConfig:
    """The configuration of a file, or of flags, with an engine that the run starts.

    Raises:
        ConfigError: something in it is wrong.
    """
    flags = list(asked.flags)
    if flags and not flags[0].startswith("--"):
        if len(flags) > 1:
            raise ConfigError(f"unknown flag {flags[1]}", remedy="change keys of a configuration with --set KEY=VALUE")
        return load_config(flags[0], overrides=asked.overrides)
    names = {flag[2:].partition("=")[0].replace("_", "-") for flag in flags if flag.startswith("--")}
    if not names & {"weight-bridge-mode", "single-copy"}:
        flags += ["--weight-bridge-mode", "shared_vllm"]
    overrides = [] if "atropos-url" not in names else ["services.api=null"]
    if (environment := asked.value("environment")) is not None:
        overrides.append(f"services.environment.name={environment}")
        words = (asked.value("environment-args") or "").split()
        overrides.append(f"services.environment.args={words!r}")
    chosen = asked.value("engine") or "vllm"
    if chosen not in _ENGINES:
        raise ConfigError(f"--engine is {chosen!r}", remedy=f"choose {' or '.join(_ENGINES)}")
    return load_argv(flags, overrides=[*overrides, *asked.overrides], engine=_ENGINES[chosen])


def check_services(config: LachesisConfig) -> None:
    """Raise ConfigError or EngineError for what can be known to fail before anything is started."""
    if not isinstance(config.source, AtroposSourceConfig):
        raise ConfigError(
            f"`lachesis run` is for environments, and source.kind is {config.source.kind}",
            remedy="use `lachesis train`, or set source.kind: atropos",
        )
    if isinstance(config.engine, EmbeddedEngineConfig):
        raise ConfigError(
            "environments generate through a server, and engine.kind embedded has none",
            remedy="set engine.kind: vllm or embedded_server, with a bridge such as shared_vllm",
        )
    services = config.services
    url = api_url(config.source.url)
    if services.api is not None:
        host = urlsplit(url).hostname
        if host not in _LOCAL_HOSTS:
            raise ConfigError(
                f"the rollout API is to be started here, and source.url is at {host}",
                remedy="set services.api: null if it runs there already",
            )
        check_port_free(url)
    if services.environment is not None:
        command = environment_command(config, services.environment)
        parse_options(command[command.index("serve") + 1 :], env_class=find(services.environment.name).config_class)


def api_command(config: LachesisConfig, api: ApiServiceConfig, *, state_dir: Path) -> list[str]:
    """``lachesis run-api`` with the flags of its section: strict, and with its state in the run directory."""
    assert isinstance(config.source, AtroposSourceConfig)
    place = urlsplit(config.source.url)
    tokenizer = config.model.tokenizer or config.model.path
    flags: dict[str, object] = {
        "--host": "127.0.0.1" if place.hostname == "localhost" else place.hostname,
        "--port": place.port or 80,
        "--state-dir": state_dir,
        "--max-queued-tokens": api.max_queued_tokens,
        "--max-body-mb": api.max_body_mb,
        "--ack-timeout": api.ack_timeout_s,
        "--env-timeout": api.env_timeout_s,
        "--tokenizer": tokenizer if Path(tokenizer, "tokenizer.json").is_file() else None,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return [sys.executable, "-m", "lachesis", "run-api", "--strict", *words]


def environment_command(config: LachesisConfig, environment: EnvironmentServiceConfig) -> list[str]:
    """``lachesis env NAME serve`` with the addresses of API and engine, unless its own flags say otherwise."""
    assert isinstance(config.source, AtroposSourceConfig)
    given = {arg.partition("=")[0].replace("-", "_") for arg in environment.args if arg.startswith("--")}
    flags = {
        "--env.rollout_server_url": config.source.url,
        "--openai.base_url": ",".join(server_urls(config)),
        "--env.tokenizer_name": config.model.tokenizer or config.model.path,
    }
    words = [word for flag, value in flags.items() if flag.replace("-", "_") not in given for word in (flag, value)]
    return [sys.executable, "-m", "lachesis", "env", environment.name, "serve", *words, *environment.args]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=_HEALTH_S, trust_env=False).is_success
    except httpx.TransportError:
        return False
