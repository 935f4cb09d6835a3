"""The composition root of the inference servers: options or a configuration in, a server until a signal."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from lachesis.common.deadline import Deadline, Retry, wait_until
from lachesis.common.errors import ConfigError, EngineError, LachesisError
from lachesis.common.http import server_url
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.config import schema
from lachesis.config.load import LoadedConfig, load_document, read_file
from lachesis.config.overrides import apply_overrides
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.options import EngineName, ServeOptions, command_line
from lachesis.engines.serving.session import Session, read_session, session_path
from lachesis.plugins.serving.bounded_end import LIMIT_S, LastWords, bounded_end, heard_output
from lachesis.process.managed import answers, check_port_free
from lachesis.process.watchdog import ended_after_signals

logger = logging.getLogger("lachesis")

OnReady = Callable[[str], None]

# Long enough to compile kernels.
_FIRST_TOKEN_S = 600.0
_VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def serve(options: ServeOptions, *, on_ready: OnReady) -> None:
    """Serve until a signal.

    Args:
        options: what to serve.
        on_ready: called with one line, once the server is able to serve, from any thread.

    Raises:
        ConfigError: an option cannot be used.
        DependencyError: vLLM is not installed, or too old.
        EngineError: the port is taken, or the engine did not start.
        ModelError: the model cannot be loaded.
    """
    if options.max_lora_rank is not None and not options.enable_lora:
        raise ConfigError("--max-lora-rank has no effect without --enable-lora", remedy="add --enable-lora")
    check_port_free(options.url)
    if options.engine == "embedded":
        _serve_embedded(options, on_ready)
    else:
        _serve_vllm(options, on_ready)


def config_options(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    served_by: EngineName | None = None,
    port: int | None = None,
    arguments: Sequence[str] = (),
) -> tuple[ServeOptions, LoadedConfig]:
    """Return the options of the server that a training configuration names, in any dialect.

    Its model and adapter are the configuration's. In Axolotl's keys the server is the section ``vllm:``, in ours
    ``engine``: where that is ``http``, vLLM is served at its address.

    Args:
        path: the configuration.
        overrides: of the form ``a.b=c``.
        served_by: the engine, instead of the configuration's.
        port: to listen on, instead of the configuration's; chooses one if several servers are named.
        arguments: passed on to ``vllm serve``.

    Raises:
        ConfigError: the configuration is wrong, or names no server to start here.
    """
    from lachesis.engines.build import server_options, trainer_dtype

    # A server needs neither problems nor rewards nor the length of a run.
    loaded = load_document(
        read_file(path), base_dir=path.absolute().parent, overrides=overrides, keys={"run": {}}, complete=False
    )
    config, engine = loaded.config, loaded.config.engine
    more: dict[str, Any] = {}
    if not isinstance(engine, schema.EmbeddedServerConfig | schema.VllmEngineConfig | schema.HttpEngineConfig):
        raise ConfigError(
            f"{path}: engine.kind is {engine.kind}, so the trainer generates itself, without a server",
            remedy="set engine.kind to http, vllm or embedded_server",
        )
    if isinstance(engine, schema.HttpEngineConfig):
        theirs = _vllm_section(path, overrides=overrides) if loaded.dialect == "axolotl" else {}
        engine, more = _vllm_at(engine.urls, theirs, port=port)
    run_directory = config.run.directory
    run_directory.mkdir(parents=True, exist_ok=True)  # the server looks into it before the run exists
    options = server_options(config, engine, directory=run_directory.absolute())
    if isinstance(engine, schema.VllmEngineConfig) and engine.data_parallel_size > 1:
        more["data_parallel_size"] = engine.data_parallel_size
    changes: dict[str, Any] = {"arguments": (*command_line(more), *options.arguments, *arguments)}
    if served_by is not None and served_by != options.engine:
        # A share of a GPU and flags of vLLM mean nothing to the embedded engine, and its device nothing to vLLM.
        changes = {
            "engine": served_by,
            "device": config.model.device if served_by == "embedded" else None,
            "dtype": options.dtype if served_by == "embedded" else trainer_dtype(config),
            "gpu_memory_utilization": None,
            "tensor_parallel_size": None,
            "arguments": tuple(arguments),
        }
    if port is not None:
        changes["port"] = port
    return options.model_copy(update=changes), loaded


def _vllm_at(
    urls: Sequence[str], theirs: Mapping[str, Any], *, port: int | None
) -> tuple[schema.VllmEngineConfig, dict[str, Any]]:
    """Return vLLM at one of the addresses by Axolotl's section ``vllm:``, and its flags that are not our keys."""
    host, taken = _address(urls, port=port)
    engine = schema.VllmEngineConfig(host=str(theirs.get("host") or host), port=taken)
    shared = (schema.VllmEngineConfig.model_fields.keys() & theirs.keys()) - {"host", "port"}
    # Unchecked: vLLM knows more values than we do.
    engine = engine.model_copy(update={key: theirs[key] for key in shared if theirs[key] is not None})
    caching = theirs.get("enable_prefix_caching")
    return engine, {
        "reasoning_parser": theirs.get("reasoning_parser"),
        "enable_prefix_caching": caching,
        "no_enable_prefix_caching": caching is False,
    }


def vllm_arguments(options: ServeOptions) -> list[str]:
    """Return the options as arguments of :mod:`lachesis.plugins.serving.vllm_launch`; the user's own come last."""
    if options.device not in (None, "auto"):
        raise ConfigError(
            f"--device {options.device} works only with --engine embedded",
            remedy="choose vLLM's GPUs with the environment variable CUDA_VISIBLE_DEVICES",
        )
    if options.max_lora_rank is not None:
        # Slots for adapters come in these sizes only; smaller adapters fit.
        rank = next((rank for rank in _VLLM_LORA_RANKS if rank >= options.max_lora_rank), options.max_lora_rank)
        options = options.model_copy(update={"max_lora_rank": rank})
    return options.command_line(without={"engine", "device"})


def ready_line(session: Session, model: str) -> str:
    """Return the line that announces a server that is ready."""
    where = session_path(session.port)
    return f"serving {model} at {session.url} (session {session.session_id}, token in {where})"


def _serve_embedded(options: ServeOptions, on_ready: OnReady) -> None:
    if options.gpu_memory_utilization is not None:
        logger.warning("--gpu-memory-utilization has no effect: the embedded engine takes the memory that it needs")
    wrong = [*(["--tensor-parallel-size"] if options.tensor_parallel_size not in (None, 1) else []), *options.arguments]
    if wrong:
        raise ConfigError(
            f"the embedded engine does not know {' '.join(wrong)}", remedy="leave it out, or serve with --engine vllm"
        )
    from lachesis.plugins.embedded_server.app import serve_embedded

    def announce(url: str) -> None:
        session = read_session(server_url(url))
        if session is None:
            raise EngineError(f"the session of {url} cannot be found", remedy="check the session directory")
        _when_healthy(server_url(url), lambda: on_ready(ready_line(session, options.model)))

    if not options.adapter_roots:
        options = options.model_copy(update={"adapter_roots": (Path.cwd(),)})
    # The model computes in this process: a call that holds the interpreter would keep it from ending.
    with bounded_end(LastWords()), ended_after_signals(LIMIT_S + 1.0):
        serve_embedded(options, on_ready=announce)


def _serve_vllm(options: ServeOptions, on_ready: OnReady) -> None:
    if options.port == 0:
        raise ConfigError("vLLM cannot choose a free port by itself", remedy="choose one with --port")
    from lachesis.plugins.serving import vllm_launch as launch

    launch.check_installed()

    unable: list[EngineError] = []

    def announce() -> None:
        session = read_session(options.url)
        # Not the session of a server that this one has replaced.
        if session is None or session.pid != os.getpid():
            return
        try:
            check_first_token(options.url, options.model)
        except EngineError as error:
            unable.append(error)
            # vLLM waits for it in the main thread, not in this one.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            on_ready(ready_line(session, options.model))

    _when_healthy(options.url, announce)
    arguments, words = vllm_arguments(options), LastWords()
    try:
        with heard_output(words) as error_output, bounded_end(words, error_output=error_output) as received:
            launch.main(arguments)
    except LachesisError:
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if unable:
            raise unable[0] from error
        if not isinstance(error, Exception):
            raise
        raise EngineError(
            f"vLLM ended with {type(error).__name__}: {words.sentence or error}",
            remedy="the cause is in its messages above",
        ) from error
    if unable:
        raise unable[0]
    if words.sentence or (words.engine_died and not received):
        cause = words.sentence or "its process was killed"
        raise EngineError(f"vLLM's engine has died: {cause}", remedy="see its messages above")


def check_first_token(url: str, model: str) -> None:
    """Have a server generate one token: one that is healthy may still be unable to run its model.

    Raises:
        EngineError: it cannot; the message has the server's reason.
    """
    one = GenerationRequest((1,), SamplingParams(max_tokens=1))
    try:
        with closing(HttpEngine([url])) as engine:
            engine.generate([one], deadline=Deadline("the first token of the server", _FIRST_TOKEN_S))
    except LachesisError as error:
        raise EngineError(
            f"{model} is loaded, but cannot generate a token: {error.message}",
            remedy="the cause is in the engine's messages above; try another dtype, fewer features of the engine, or "
            "--engine embedded",
        ) from error


def _when_healthy(url: str, announce: Callable[[], None]) -> None:
    """Call ``announce`` once the server answers; without a limit, until the process ends."""

    def wait() -> None:
        forever = Deadline("the start of the server", None)
        with httpx.Client(trust_env=False) as client:
            wait_until(lambda: "" if answers(client, f"{url}/health") else "it starts", Retry(forever))
        announce()

    threading.Thread(target=wait, name="lachesis-ready", daemon=True).start()


def _vllm_section(path: Path, *, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the section ``vllm:`` of an Axolotl file, whose keys have been checked."""
    from lachesis.plugins.dialects.axolotl import EARLIER_SERVER_KEYS

    document = read_file(path).take_older()
    apply_overrides(document, [override for override in overrides if override.startswith(("vllm.", "trl.vllm_"))])
    below_trl = document.data.get("trl") or {}
    earlier = {key: below_trl.get(f"vllm_{key}") for key in EARLIER_SERVER_KEYS}
    return earlier | {key: value for key, value in (document.data.get("vllm") or {}).items() if value is not None}


def _address(urls: Sequence[str], *, port: int | None) -> tuple[str, int]:
    """Return host and port of the server to start here, one of those that the trainer will use."""
    places = [urlsplit(server_url(url)) for url in urls]
    if len(places) > 1 and port is None:
        raise ConfigError(f"engine.urls names {len(places)} servers", remedy="choose the one to start here with --port")
    place = next((place for place in places if place.port == port), places[0])
    return place.hostname or "127.0.0.1", place.port or 80
