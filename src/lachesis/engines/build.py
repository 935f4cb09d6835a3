"""Construction of engines: one in this process, or the servers of ``engine.kind`` with their options."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lachesis.common.contracts import contract, load_part
from lachesis.common.device import resolve_device
from lachesis.common.errors import ConfigError, EngineError
from lachesis.common.hub import config_here, load_errors
from lachesis.common.json_values import is_object, read_json
from lachesis.common.world import launchers_variables, world_size
from lachesis.config.schema import (
    BaseEngineConfig,
    CustomEngineConfig,
    EmbeddedEngineConfig,
    EmbeddedServerConfig,
    HttpEngineConfig,
    LachesisConfig,
    LoraAdapterConfig,
    ModelConfig,
    VllmEngineConfig,
)
from lachesis.engines.addresses import addresses
from lachesis.engines.base import Engine, TrainedModel
from lachesis.engines.gpus import server_environment
from lachesis.engines.options import ServeOptions, command_line
from lachesis.process.managed import ManagedProcess

logger = logging.getLogger("lachesis")

# A scale for each output, not for each fused matrix: closer to the trainer's weights, and each row rounds separately.
_VLLM_QUANTIZATION = {"none": None, "fp8": "fp8_per_channel"}
_DTYPES = ("float32", "bfloat16", "float16")


def embedded_engine(engine: EmbeddedEngineConfig, trained: TrainedModel) -> Engine:
    """Build the embedded engine around the trained model."""
    from lachesis.engines.embedded.engine import EmbeddedEngine  # slow to import, and not needed for addresses

    tokenizer, pad = trained.tokenizer, trained.tokenizer.pad_token_id
    return EmbeddedEngine(
        trained.model,
        eos_token_ids=trained.eos_token_ids,
        pad_token_id=pad if isinstance(pad, int) else 0,
        max_batch_size=engine.max_batch_size,
        max_context=trained.max_context,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
    )


class CustomEngine(Protocol):
    """Signature of a custom engine: the model that it is built around."""

    def __call__(self, trained: TrainedModel, *, section: BaseEngineConfig) -> Engine:
        """Return the engine, which may copy the weights in ``set_version`` if it has its own.

        ``trained`` has the model, whose weights change in place, its tokenizer, end tokens and context; ``section`` is
        ``engine`` of the configuration.
        """
        ...


_METHODS = ("generate", "canary", "set_version", "health", "pause", "resume", "close")
ENGINE = contract("engine", CustomEngine, error=EngineError, makes=Engine, methods=_METHODS)


def custom_engine(engine: BaseEngineConfig, trained: TrainedModel) -> Engine:
    """Build the user's engine, or that of an installed package. Raises ConfigError if there is none."""
    function = engine.function if isinstance(engine, CustomEngineConfig) else engine.builds
    return load_part(function, ENGINE).make(trained, section=engine)


# The engines in the trainer's process, by their sections of the configuration; others are an installed package's.
IN_PROCESS: Mapping[type[BaseEngineConfig], Callable[[Any, TrainedModel], Engine]] = {
    EmbeddedEngineConfig: embedded_engine,
    CustomEngineConfig: custom_engine,
}


def server_urls(config: LachesisConfig) -> list[str]:
    """Return the addresses of the engine's servers; further copies of the model use the ports after the first one's.

    Raises:
        ConfigError, EngineUnreachable: as :func:`~lachesis.engines.addresses.addresses`.
    """
    engine = config.engine
    if isinstance(engine, HttpEngineConfig):
        return addresses(engine.urls)
    assert isinstance(engine, VllmEngineConfig | EmbeddedServerConfig)
    copies = engine.data_parallel_size if isinstance(engine, VllmEngineConfig) else 1
    return [f"http://{engine.host}:{engine.port + number}" for number in range(copies)]


def server_processes(config: LachesisConfig, *, directory: Path, log_path: Path) -> list[ManagedProcess]:
    """Return the servers that the run starts, not started yet; none if ``engine.kind`` is ``http``.

    Args:
        directory: the run's directory, from which they load weights.
        log_path: log of the first server; further ones add their number to its name.
    """
    processes: list[ManagedProcess] = []
    if isinstance(config.engine, HttpEngineConfig):
        return processes
    # While vLLM measures a GPU, it counts memory that other processes allocate there as its own. It measures nothing if
    # it is given the size of its cache.
    told = isinstance(config.engine, VllmEngineConfig) and "--kv-cache-memory-bytes" in config.engine.flags
    one_by_one = shares_gpus(config) and not told
    last_on: dict[str | None, ManagedProcess] = {}
    for number, url in enumerate(server_urls(config)):
        own = server_environment(config, number=number)
        place = own.get("CUDA_VISIBLE_DEVICES")
        process = ManagedProcess(
            server_command(config, number, directory=directory),
            url=url,
            log_path=log_path if number == 0 else log_path.with_stem(f"{log_path.stem}-{number}"),
            # A server is not a rank of this run.
            env=dict.fromkeys(launchers_variables(os.environ)) | own,
            on_death=lambda error: logger.error("%s", error),
            after=last_on.get(place) if one_by_one else None,
        )
        last_on[place] = process
        processes.append(process)
    return processes


def shares_gpus(config: LachesisConfig) -> bool:
    """Return True if several servers that the run starts are on one GPU."""
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig) or not torch.cuda.is_available():
        return False
    return max(engine.servers_on_own_card, engine.servers_on_card(devices=world_size(os.environ))) > 1


def server_command(
    config: LachesisConfig, number: int, checkpoint: Path | None = None, *, directory: Path
) -> Sequence[str]:
    """Return the ``lachesis serve`` command of a server by number, for the model or a checkpoint of it."""
    engine = config.engine
    assert isinstance(engine, VllmEngineConfig | EmbeddedServerConfig)
    options = server_options(config, engine, directory=directory, number=number, checkpoint=checkpoint)
    return [sys.executable, "-m", "lachesis", "serve", *options.command_line()]


def server_options(
    config: LachesisConfig,
    engine: VllmEngineConfig | EmbeddedServerConfig,
    *,
    directory: Path,
    number: int = 0,
    checkpoint: Path | None = None,
) -> ServeOptions:
    """Return the options of a server of the trained model.

    Keys of ``engine`` named like options become them.

    Args:
        engine: the configuration's, or its stand-in if the configuration says only where the server listens.
        directory: of the run; the server loads weights from it.
        number: of the server, if there are several; its port is this far above the first one's.
        checkpoint: served in place of the model.

    Raises:
        ModelError: ``model.path`` has no configuration that tells the dtype.
        ConfigError: vLLM has no kernels for it.
    """
    of_engine: dict[str, Any]
    if isinstance(engine, EmbeddedServerConfig):
        of_engine = {
            "engine": "embedded",
            "dtype": config.model.dtype,
            "device": config.model.device,
            "max_num_seqs": engine.max_batch_size,
        }
    else:
        plain = {
            "enable_sleep_mode": engine.enable_sleep_mode,
            "quantization": _VLLM_QUANTIZATION[engine.quantization],
            "kv_cache_dtype": None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
            "trust_remote_code": config.model.trust_remote_code,
            "enable_return_routed_experts": config.algorithm.router_replay,
        }
        of_engine = {
            "dtype": engine.dtype if engine.dtype != "auto" else trainer_dtype(config),
            "gpu_memory_utilization": _gpu_memory_utilization(config, engine),
            "arguments": (*command_line(plain), *engine.extra_args),
        }
    if config.bridge.capabilities.adapter_only and isinstance(config.adapter, LoraAdapterConfig):
        of_engine |= {"enable_lora": True, "max_lora_rank": config.adapter.r}
        if isinstance(engine, VllmEngineConfig) and of_engine["dtype"] == "float32" and torch.cuda.is_available():
            raise ConfigError(
                "vLLM's GPU kernels for adapters need 16-bit weights, but the engine's dtype is float32",
                remedy="set engine.dtype: bfloat16, or model.dtype: bfloat16 for both sides",
            )
    return ServeOptions(
        **engine.model_dump(include=set(ServeOptions.model_fields) - {"port", *of_engine}),
        **of_engine,
        port=engine.port + number,
        model=str(checkpoint or config.model.path),
        revision=None if checkpoint else config.model.revision,
        tokenizer=config.model.tokenizer or config.model.path,
        adapter_roots=(directory,),
    )


def trainer_dtype(config: LachesisConfig) -> str:
    """Return the dtype of the trainer's weights; vLLM's own ``auto`` would turn a float32 checkpoint into 16 bits."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if resolve_device(config.model.device).type == "cpu":
        return "float32"
    return _stated_dtype(config.model) or _configured_dtype(config.model)


def _stated_dtype(model: ModelConfig) -> str | None:
    """Return the dtype that a model's file states; transformers would read it too, but takes seconds to import."""
    path = config_here(model.path, revision=model.revision)
    try:
        found = None if path is None else read_json(path.read_bytes())
    except (OSError, ValueError):  # transformers will report the problem
        return None
    if not is_object(found):
        return None
    dtype = found.get("dtype") or found.get("torch_dtype")
    return dtype if dtype in _DTYPES else None


def _configured_dtype(model: ModelConfig) -> str:
    from transformers import AutoConfig

    with load_errors(model.path):
        revision = {} if model.revision is None else {"revision": model.revision}
        found = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **revision)
    dtype = found.dtype or found.get_text_config().dtype
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def _gpu_memory_utilization(config: LachesisConfig, engine: VllmEngineConfig) -> float | None:
    """Return vLLM's share of a GPU's memory, computed without access to any GPU.

    One that the run does not start has its own default, and so has one on a GPU beside a trainer on the CPU.
    """
    if engine.gpu_memory_utilization is not None or isinstance(config.engine, HttpEngineConfig):
        return engine.gpu_memory_utilization
    if resolve_device(config.model.device).type != "cuda" and torch.cuda.is_available():
        return None
    if engine.devices is not None:
        return engine.own_share
    return engine.usual_share(devices=world_size(os.environ))
