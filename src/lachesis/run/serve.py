"""The composition root of the inference servers: options or a configuration in, a server until a signal."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from lachesis.common.errors import ConfigError, EngineError, LachesisError
from lachesis.common.http import server_url
from lachesis.common.process import check_port_free
from lachesis.config import schema
from lachesis.config.document import apply_overrides, read_document
from lachesis.config.load import LoadedConfig, load_config
from lachesis.engines.serving.session import Session, read_session, session_path

EngineName = Literal["vllm", "embedded"]
OnReady = Callable[[str], None]

_LOOK_S = 0.25
_VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Options of the section ``vllm:`` that are flags of vLLM by the same name, and no fields below.
_PLAIN_FLAGS = ("data_parallel_size", "reasoning_parser")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve, how, and where. ``None`` leaves it to the engine.

    Args:
        model: directory or hub id.
        engine: vLLM, or the transformers engine under the same contract.
        host: address to listen on.
        port: port to listen on.
        tokenizer: directory or hub id; the model's own if unset.
        dtype: of the weights.
        device: of the embedded engine; vLLM takes those of CUDA_VISIBLE_DEVICES.
        max_model_len: longest prompt and completion together.
        max_num_seqs: most completions at the same time.
        gpu_memory_utilization: share of the GPU memory for vLLM.
        tensor_parallel_size: GPUs that hold one copy of the model together.
        enforce_eager: no CUDA graphs; the embedded engine has none.
        enable_lora: whether adapters may be loaded.
        max_lora_rank: of the adapters.
        adapter_roots: from inside of these directories adapters and checkpoints may be loaded; the current
            directory if none is named.
        served_model_name: what clients call the model.
        arguments: handed on to ``vllm serve`` as they are.
    """

    model: str
    engine: EngineName = "vllm"
    host: str = "127.0.0.1"
    port: int = 9001
    tokenizer: str | None = None
    dtype: str | None = None
    device: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    enforce_eager: bool = False
    enable_lora: bool = False
    max_lora_rank: int | None = None
    adapter_roots: tuple[Path, ...] = ()
    served_model_name: str | None = None
    arguments: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where the server is reached from this machine."""
        return server_url(f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}")


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
    """The server that a training configuration names, in any dialect.

    Its model and adapter are the configuration's. In Axolotl's keys the server is the section ``vllm:``, in ours
    ``engine``: where that is ``http``, vLLM is served at its address.

    Args:
        path: the configuration.
        overrides: of the form ``a.b=c``.
        served_by: what generates, instead of what the configuration says.
        port: to listen on, instead of the configuration's; tells which where several servers are named.
        arguments: handed on to ``vllm serve``.

    Raises:
        ConfigError: the configuration is wrong, or names no server to start here.
    """
    loaded = load_config(path, overrides=overrides)
    config, engine = loaded.config, loaded.config.engine
    theirs = _vllm_section(path, overrides=overrides) if loaded.dialect == "axolotl" else {}
    common = _common_options(config, arguments=arguments)
    match engine:
        case schema.EmbeddedServerConfig():
            options = replace(
                common,
                engine="embedded",
                host=engine.host,
                port=engine.port,
                device=config.model.device,
                max_num_seqs=engine.max_batch_size,
                max_model_len=engine.max_model_len,
            )
        case schema.VllmEngineConfig():
            options = _with_vllm_options(common, engine.model_dump(), host=engine.host, port=engine.port)
        case schema.HttpEngineConfig():
            host, taken = _address(engine.urls, port=port)
            options = _with_vllm_options(common, theirs, host=str(theirs.get("host") or host), port=taken)
        case schema.EmbeddedEngineConfig():
            raise ConfigError(
                f"{path}: engine.kind is embedded, so the trainer generates itself and there is no server to start",
                remedy="set engine.kind to http, vllm or embedded_server",
            )
    if served_by is not None and served_by != options.engine:
        # A share of a GPU and flags of vLLM mean nothing to the embedded engine, and its device nothing to vLLM.
        device = config.model.device if served_by == "embedded" else None
        options = replace(
            options, engine=served_by, device=device, gpu_memory_utilization=None, tensor_parallel_size=None,
            arguments=tuple(arguments),
        )  # fmt: skip
    return (options if port is None else replace(options, port=port)), loaded


def _common_options(config: schema.LachesisConfig, *, arguments: Sequence[str]) -> ServeOptions:
    """What does not depend on the engine: model and adapter, and the run directory, which is made."""
    run_directory = Path(config.run.dir) / config.run.name
    run_directory.mkdir(parents=True, exist_ok=True)  # the server looks into it before the run is there
    common = ServeOptions(
        model=config.model.path,
        tokenizer=config.model.tokenizer,
        dtype=None if config.model.dtype == "auto" else config.model.dtype,
        adapter_roots=(run_directory.absolute(),),
        arguments=tuple(arguments),
    )
    if isinstance(config.adapter, schema.LoraAdapterConfig) and config.bridge.kind.startswith("lora"):
        return replace(common, enable_lora=True, max_lora_rank=config.adapter.r)
    return common


@dataclass(slots=True)
class _Arguments:
    """A command line that is put together."""

    words: list[str] = field(default_factory=list)

    def add(self, flag: str, value: Any) -> None:
        """``None`` and False leave the flag out, True gives it no value."""
        if value is True:
            self.words.append(flag)
        elif value is not None and value is not False:
            self.words += [flag, str(value)]


def vllm_arguments(options: ServeOptions) -> list[str]:
    """The options as arguments of :mod:`lachesis.engines.vllm.launch`; what the user gave beyond them comes last."""
    if options.device not in (None, "auto"):
        raise ConfigError(
            f"--device {options.device} goes with --engine embedded",
            remedy="choose vLLM's GPUs by the environment variable CUDA_VISIBLE_DEVICES",
        )
    if options.max_lora_rank is not None:
        # Slots for adapters come in these sizes only; smaller adapters fit.
        rank = next((rank for rank in _VLLM_LORA_RANKS if rank >= options.max_lora_rank), options.max_lora_rank)
        options = replace(options, max_lora_rank=rank)
    arguments = _Arguments()
    flags = (
        "model", "host", "port", "tokenizer", "dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization",
        "tensor_parallel_size", "enforce_eager", "enable_lora", "max_lora_rank", "served_model_name",
    )  # fmt: skip
    for name in flags:
        arguments.add(f"--{name.replace('_', '-')}", getattr(options, name))
    for root in options.adapter_roots:
        arguments.add("--adapter-root", root)
    return [*arguments.words, *options.arguments]


def ready_line(session: Session, model: str) -> str:
    """What is said once a server is able to serve."""
    where = session_path(session.port)
    return f"serving {model} at {session.url} (session {session.session_id}, token in {where})"


def _serve_embedded(options: ServeOptions, on_ready: OnReady) -> None:
    unused = {
        "--gpu-memory-utilization": options.gpu_memory_utilization,
        "--tensor-parallel-size": options.tensor_parallel_size if options.tensor_parallel_size != 1 else None,
    }
    wrong = [*(flag for flag, value in unused.items() if value is not None), *options.arguments]
    if wrong:
        raise ConfigError(
            f"the embedded engine does not know {' '.join(wrong)}", remedy="leave it out, or serve with --engine vllm"
        )
    from lachesis.engines.embedded.server.app import EmbeddedServerOptions, serve_embedded

    given: dict[str, Any] = {
        "dtype": options.dtype,
        "device": options.device,
        "max_num_seqs": options.max_num_seqs,
        "max_lora_rank": options.max_lora_rank,
    }
    embedded = EmbeddedServerOptions(
        model=options.model,
        tokenizer=options.tokenizer,
        host=options.host,
        port=options.port,
        max_model_len=options.max_model_len,
        enable_lora=options.enable_lora,
        adapter_roots=options.adapter_roots or (Path.cwd(),),
        served_model_name=options.served_model_name,
        **{name: value for name, value in given.items() if value is not None},
    )

    def announce(url: str) -> None:
        session = read_session(server_url(url))
        if session is None:
            raise EngineError(f"the session of {url} is not to be found", remedy="check the session directory")
        _when_healthy(server_url(url), lambda: on_ready(ready_line(session, options.model)))

    serve_embedded(embedded, on_ready=announce)


def _serve_vllm(options: ServeOptions, on_ready: OnReady) -> None:
    if options.port == 0:
        raise ConfigError("vLLM takes no free port by itself", remedy="choose one with --port")
    from lachesis.engines.vllm import launch

    launch.check_installed()

    def announce() -> None:
        session = read_session(options.url)
        # Not that of a server whose place this one has taken.
        if session is not None and session.pid == os.getpid():
            on_ready(ready_line(session, options.model))

    _when_healthy(options.url, announce)
    try:
        launch.main(vllm_arguments(options))
    except LachesisError:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM ended with {type(error).__name__}: {error}", remedy="the cause is in its messages above"
        ) from error


def _when_healthy(url: str, announce: Callable[[], None]) -> None:
    """Call ``announce`` once the server answers; it may take as long as it takes, or the process ends."""

    def wait() -> None:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                try:
                    if client.get(f"{url}/health").is_success:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(_LOOK_S)
        announce()

    threading.Thread(target=wait, name="lachesis-ready", daemon=True).start()


def _vllm_section(path: Path, *, overrides: Sequence[str]) -> dict[str, Any]:
    """The section ``vllm:`` of an Axolotl file, whose keys have been checked."""
    document = read_document(path)
    apply_overrides(document, [override for override in overrides if override.startswith("vllm.")])
    return document.data.get("vllm") or {}


def _with_vllm_options(options: ServeOptions, section: dict[str, Any], *, host: str, port: int) -> ServeOptions:
    """With the options of a section that has vLLM's names; null is as if it were absent."""
    given = {name: value for name, value in section.items() if value is not None}
    fields = ("max_model_len", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager")
    chosen = {name: given[name] for name in fields if name in given}
    if given.get("dtype", "auto") != "auto":
        chosen["dtype"] = given["dtype"]
    arguments = _Arguments()
    for name in _PLAIN_FLAGS:
        arguments.add(f"--{name.replace('_', '-')}", given.get(name))
    arguments.add("--enable-sleep-mode", given.get("enable_sleep_mode"))
    caching = given.get("enable_prefix_caching")
    if caching is not None:
        arguments.add("--enable-prefix-caching" if caching else "--no-enable-prefix-caching", True)
    extra = (*arguments.words, *given.get("extra_args", ()), *options.arguments)
    return replace(options, host=host, port=port, arguments=extra, **chosen)


def _address(urls: Sequence[str], *, port: int | None) -> tuple[str, int]:
    """Host and port of the server to start here, out of those that the trainer is to use."""
    places = [urlsplit(server_url(url)) for url in urls]
    if len(places) > 1 and port is None:
        raise ConfigError(
            f"engine.urls names {len(places)} servers", remedy="say which one is to start here with --port"
        )
    place = next((place for place in places if place.port == port), places[0])
    return place.hostname or "127.0.0.1", place.port or 80
