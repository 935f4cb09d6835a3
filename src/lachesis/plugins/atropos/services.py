"""``lachesis run``: rollout API, engine, environment and trainer in one command, each with its own log.

The trainer is this process. It starts its engine, then the API, then the environment; however it ends, kill -9
included, they end with it. Any of them that dies is restarted a few times: the API loses nothing, thanks to its state
directory, and the engine gets the current weights.
"""

from __future__ import annotations

import logging
import os
import queue
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError, LachesisError
from lachesis.common.hosts import is_this_machine
from lachesis.config.load import LoadedConfig, load_argv, load_config
from lachesis.config.schema import HttpEngineConfig, LachesisConfig, LoraAdapterConfig
from lachesis.engines.build import server_urls
from lachesis.engines.options import command_line
from lachesis.plugins.atropos.api.server import ServerOptions
from lachesis.plugins.atropos.environments.settings import parse_options
from lachesis.plugins.atropos.run import find
from lachesis.plugins.atropos.section import ApiServiceConfig, AtroposSourceConfig, EnvironmentServiceConfig
from lachesis.plugins.atropos.source.client import api_url
from lachesis.plugins.dialects.atropos import ManagedEngine
from lachesis.process.managed import ManagedProcess, check_port_free
from lachesis.run.pulse import Pulse

logger = logging.getLogger("lachesis")

_ENGINES: Mapping[str, ManagedEngine] = {"vllm": "vllm", "embedded": "embedded_server"}
_HEALTH_S = 5.0
# Errors that may not come again: a peer was lost, or time ran out.
_PASSING = (EngineError.exit_code, DeadlineExceeded.exit_code, 70)
# Seconds that the trainer still waits for a batch once its environment has ended normally.
_AFTERMATH_S = 15.0


class Services:
    """The API and the environment of a run.

    Args:
        config: of the run.

    Raises:
        ConfigError: the configuration is not one for ``lachesis run``, or the environment or its flags are unknown.
        EngineError: the API's port is taken.
    """

    def __init__(self, config: LachesisConfig) -> None:
        check_services(config)
        self._config = config
        self._services: list[ManagedProcess] = []
        self._up: set[ManagedProcess] = set()  # services that were started successfully
        self._stopping = threading.Event()
        self._deaths: queue.SimpleQueue[ManagedProcess | None] = queue.SimpleQueue()
        self._starts: Counter[str] = Counter()
        self._supervisor: threading.Thread | None = None
        self._failure: LachesisError | None = None
        self._ended: tuple[float, ManagedProcess] | None = None

    @property
    def starts_api(self) -> bool:
        """Return True if the API is one of the services; otherwise it runs already."""
        return self._config.services.api is not None

    def pulses(self) -> list[Pulse]:
        """Return the checks that notice a stopped service; the source checks for silent ones."""
        return [Pulse(one.name, None, lambda one=one: one.pid) for one in tuple(self._services)]

    def start(self, run_dir: Path) -> None:
        """Start the API, wait until it answers, start the environment, also after a stop. Logs: ``run_dir/logs``.

        Raises:
            EngineError: one died; with the last lines of its log.
            DeadlineExceeded: the API does not answer in time.
        """
        config, logs = self._config, Path(os.path.abspath(run_dir)) / "logs"
        self._stopping.clear()
        self._ended = self._failure = None
        assert isinstance(config.source, AtroposSourceConfig), "check_services has checked this"
        self._supervisor = threading.Thread(target=self._supervise, name="lachesis-services", daemon=True)
        self._supervisor.start()
        if config.services.api is not None:
            command = api_command(config, config.services.api, state_dir=logs.parent / "api")
            self._start("the rollout API", command, url=config.source.url, log_path=logs / "api.log")
        if config.services.environment is not None:
            chosen = config.services.environment
            command = environment_command(config, chosen)
            self._start(f"the environment {chosen.name}", command, url=None, log_path=logs / "env.log")

    def watch(self) -> None:
        """Raise if a service will not come back, so that waiting is useless."""
        if self._failure is not None:
            raise self._failure
        if self._ended is not None and time.monotonic() - self._ended[0] > _AFTERMATH_S:
            error = self._ended[1].death()
            raise EngineError(f"the trainer waits for a batch and none will come: {error.message}", remedy=error.remedy)

    def stop(self) -> None:
        """Stop the services, the environment first. Idempotent."""
        self._stopping.set()
        if self._supervisor is not None:
            self._deaths.put(None)
            self._supervisor.join()
            self._supervisor = None
        while self._services:
            self._services.pop().stop()

    def _start(self, name: str, command: Sequence[str], *, url: str | None, log_path: Path) -> None:
        service = ManagedProcess(
            command,
            name=name,
            url=url,
            health="/healthz",
            log_path=log_path,
            on_death=lambda error: self._deaths.put(service),
        )
        self._services.append(service)
        logger.info("starting %s; its log is %s", name, log_path)
        self._bring_up(service)

    def _bring_up(self, service: ManagedProcess) -> None:
        """Start a service. Raises as :meth:`start`. The supervisor handles only the death of services that are up."""
        name, limit_s = f"the start of {service.name}", self._config.services.start_s
        self._up.discard(service)
        service.start(deadline=Deadline(name, limit_s, "services.start_s", watch=self._check_needed))
        self._up.add(service)
        if service.pid is None:  # it died before it answered
            self._deaths.put(service)

    def _check_needed(self) -> None:
        if self._stopping.is_set():
            raise EngineError("the run ends: its services are no longer needed")

    def _supervise(self) -> None:
        while (service := self._deaths.get()) is not None:
            if self._stopping.is_set() or service not in self._up or service.pid is not None:
                continue
            try:
                self._revive(service)
            except LachesisError as error:
                self._failure = error

    def _revive(self, service: ManagedProcess) -> None:
        """Restart a service, again if it dies while it starts. Raises EngineError if that is useless."""
        code, error = service.exit_code, service.death()
        if code == 0:
            logger.info("%s has ended", service.name)
            self._ended = time.monotonic(), service
            return
        while True:
            self._count_death(service, error)
            try:
                self._bring_up(service)
                return
            except EngineError as again:
                if self._stopping.is_set():
                    raise
                error = again

    def _count_death(self, service: ManagedProcess, error: EngineError) -> None:
        """Raise ``error`` if a restart would end as the last one did, or the restarts are used up."""
        code = service.exit_code
        if code is not None and code > 0 and code not in _PASSING:
            raise error
        self._starts[service.name] += 1
        most = self._config.services.restarts
        if self._starts[service.name] > most:
            raise EngineError(
                f"{service.name} has died {self._starts[service.name]} times: {error.message}", remedy=error.remedy
            )
        logger.warning("%s\nrestarting it (%d of %d)", error.message, self._starts[service.name], most)


def load_words(
    words: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    engine: str = "vllm",
    environment: str | None = None,
    environment_args: str = "",
    api_port: int | None = None,
) -> LoadedConfig:
    """Load the configuration of ``lachesis run``: from a file, or from flags, with an engine that the run starts.

    Args:
        words: the name of the file, or flags of the Atropos trainer.
        overrides: as ``key=value``.
        engine: vllm or embedded; a file's own settings decide, for this and the next two.
        environment: a name, ``FILE.py:CLASS`` or ``module.CLASS``; none is started if unset.
        environment_args: its flags.
        api_port: of the rollout API that is started, in place of the file's or the default.

    Raises:
        ConfigError: the configuration is wrong.
    """
    flags = list(words)
    overrides = [*overrides, *([] if api_port is None else [f"source.url=http://127.0.0.1:{api_port}"])]
    if flags and not flags[0].startswith("--"):
        if len(flags) > 1:
            raise ConfigError(f"unknown flag {flags[1]}", remedy="change keys of a configuration with --set KEY=VALUE")
        return load_config(flags[0], overrides=overrides)
    names = {flag[2:].partition("=")[0].replace("_", "-") for flag in flags if flag.startswith("--")}
    if not names & {"weight-bridge-mode", "single-copy"}:
        flags += ["--weight-bridge-mode", "shared_vllm"]
    if api_port is not None and "atropos-url" in names:
        raise ConfigError(
            "--atropos-url names a running API, but --api-port is for one that this command starts",
            remedy="give only one of them",
        )
    services = [] if "atropos-url" not in names else ["services.api=null"]
    if environment is not None:
        services.append(f"services.environment.name={environment}")
        services.append(f"services.environment.args={environment_args.split()!r}")
    if engine not in _ENGINES:
        raise ConfigError(f"--engine is {engine!r}", remedy=f"choose {' or '.join(_ENGINES)}")
    return load_argv(flags, overrides=[*services, *overrides], engine=_ENGINES[engine])


def require_server(config: LachesisConfig) -> None:
    """Raise EngineError unless the inference servers that should already run answer."""
    if not isinstance(config.engine, HttpEngineConfig):
        return
    for url in server_urls(config):
        try:
            httpx.get(f"{url}/health", timeout=_HEALTH_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            port = urlsplit(url).port or 80
            raise EngineError(
                f"External vLLM server required on port {port}: {url}/health does not answer ({error})",
                remedy=f"start it with `{_serve_command(config, port=port)}`",
            ) from error


def _serve_command(config: LachesisConfig, *, port: int) -> str:
    """Return the command that starts a server for this trainer."""
    words = ["lachesis", "serve", "--model", config.model.path, "--port", str(port)]
    if config.model.dtype != "auto":
        words += ["--dtype", config.model.dtype]
    if isinstance(config.adapter, LoraAdapterConfig) and config.bridge.kind.startswith("lora"):
        words += ["--enable-lora", "--max-lora-rank", str(config.adapter.r)]
    return shlex.join(words)


def check_services(config: LachesisConfig) -> None:
    """Raise ConfigError or EngineError for failures that show before anything is started."""
    check_service_keys(config)
    assert isinstance(config.source, AtroposSourceConfig), "its keys are checked"
    if config.services.api is None:
        return
    url = api_url(config.source.url)
    try:
        check_port_free(url)
    except EngineError as error:
        raise EngineError(
            f"the rollout API cannot be started at {url}: {error.message}",
            remedy="stop that process if it is yours, or choose another port with --api-port (source.url)",
        ) from error


def check_service_keys(config: LachesisConfig) -> None:
    """Raise ConfigError for keys that are wrong on any machine."""
    if not isinstance(config.source, AtroposSourceConfig):
        raise ConfigError(
            f"`lachesis run` is for environments, but source.kind is {config.source.kind}",
            remedy="use `lachesis train`, or set source.kind: atropos",
        )
    if config.engine.place == "trainer":
        raise ConfigError(
            f"environments generate through a server, but engine.kind {config.engine.kind} has none",
            remedy="set engine.kind: vllm or embedded_server, with a bridge such as shared_vllm",
        )
    services = config.services
    if services.api is not None:
        url = api_url(config.source.url)
        if not is_this_machine(url):
            raise ConfigError(
                f"the rollout API would start here, but source.url is at {urlsplit(url).hostname}",
                remedy="set services.api: null if it runs there already",
            )
    if services.environment is not None:
        command = environment_command(config, services.environment)
        parse_options(command[command.index("serve") + 1 :], env_class=find(services.environment.name).config_class)


def api_command(config: LachesisConfig, api: ApiServiceConfig, *, state_dir: Path) -> list[str]:
    """Return the ``lachesis run-api`` command with its section's flags: strict, with its state in the run directory."""
    assert isinstance(config.source, AtroposSourceConfig)
    place = urlsplit(config.source.url)
    options = ServerOptions(
        strict=True,
        host="127.0.0.1" if place.hostname == "localhost" else place.hostname or "",
        port=place.port or 80,
        state_dir=state_dir,
        **api.model_dump(),
    )
    return [sys.executable, "-m", "lachesis", "run-api", *command_line(options.model_dump())]


def environment_command(config: LachesisConfig, environment: EnvironmentServiceConfig) -> list[str]:
    """Return the ``lachesis env NAME serve`` command; its own flags override the addresses of API and engine."""
    assert isinstance(config.source, AtroposSourceConfig)
    given = {arg.partition("=")[0].replace("-", "_") for arg in environment.args if arg.startswith("--")}
    flags = {
        "--env.rollout_server_url": config.source.url,
        "--openai.base_url": ",".join(server_urls(config)),
        "--env.tokenizer_name": config.model.tokenizer or config.model.path,
    }
    words = [word for flag, value in flags.items() if flag.replace("-", "_") not in given for word in (flag, value)]
    return [sys.executable, "-m", "lachesis", "env", environment.name, "serve", *words, *environment.args]
