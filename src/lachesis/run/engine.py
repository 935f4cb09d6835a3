"""The engine of a run, its processes, and the bridge to it, from their sections of the configuration."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import assert_never

import torch
from transformers import AutoConfig

from lachesis.bridges.adapters import adapter_config
from lachesis.bridges.base import Bridge
from lachesis.bridges.broadcast import BroadcastBridge, full_source, lora_source
from lachesis.bridges.engine_weights import EngineWeights
from lachesis.bridges.extract import (
    Whole,
    adapter_digests,
    as_it_is,
    base_parameters,
    full_digests,
    full_weights,
    lora_tensors,
)
from lachesis.bridges.lora_restart import LoraRestartBridge
from lachesis.bridges.lora_swap import LoraSwapBridge
from lachesis.bridges.names import check_same_model, map_parameters
from lachesis.bridges.owned import OwnedEngine
from lachesis.bridges.proof import Digests, SyncProof
from lachesis.bridges.restart import ReloadBridge, RestartBridge, save_companions
from lachesis.bridges.shared import SharedBridge
from lachesis.common.deadline import Deadline
from lachesis.common.errors import ModelError
from lachesis.common.process import ManagedProcess
from lachesis.common.world import VARIABLES
from lachesis.config import schema
from lachesis.config.schema import LachesisConfig
from lachesis.engines.http.client import HttpEngine
from lachesis.train.model.attach import empty_transformer
from lachesis.train.model.loading import resolve_device
from lachesis.train.policy import Policy
from lachesis.transport.records import ChannelBackend

logger = logging.getLogger("lachesis")

# Of one GPU that engine and trainer share, and of one that the engine has for itself.
SHARED_GPU_UTILIZATION, OWN_GPU_UTILIZATION = 0.45, 0.9
_CANARY_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run keeps what engine and trainer exchange, and the name under which it claims engines.

    ``engine_log`` is where the output of servers goes that the run starts.
    """

    directory: Path
    engine_log: Path
    owner: str


@dataclass(frozen=True, slots=True)
class EngineSide:
    """Everything beyond the trainer. ``weights`` are the engine's tensors that the policy is built on, if any.

    ``owned`` are the servers that the run itself started.
    """

    bridge: Bridge[Policy]
    weights: EngineWeights | None = None
    owned: OwnedEngine | None = None

    def keep_log(self, path: Path) -> None:
        """Move the log of the servers to its place in the run directory, which is there by now."""
        if self.owned is not None:
            self.owned.move_log(path)

    def close(self) -> None:
        """Stop what was started. Idempotent."""
        self.bridge.close()
        if self.owned is not None:
            self.owned.stop()


def build_servers(config: LachesisConfig, *, place: RunPlace, watch: Callable[[], None] | None = None) -> EngineSide:
    """The engine in its own process, started if the run manages it and claimed, and the bridge to it.

    While it is waited for, ``watch`` is called; what it raises ends the wait.

    Raises:
        EngineError: a server died, its port is taken, it does not answer, or another run has it.
        DeadlineExceeded: it was not able to serve in time.
        ModelError: a server that runs already serves another model.
    """
    processes = server_processes(config, place=place)
    engine = HttpEngine(server_urls(config), control_s=config.deadlines.sync_s)
    owned = OwnedEngine(engine=engine, processes=processes, owner=place.owner) if processes else None
    try:
        wait_s = config.engine.wait_s if config.engine.kind == "http" else 0.0
        limit_s = config.deadlines.engine_start_s + wait_s
        deadline = Deadline("the start of the engine", limit_s, "deadlines.engine_start_s", watch=watch)
        for process in processes:
            process.log_path.unlink(missing_ok=True)
            process.launch()
        for process in processes:
            process.wait_ready(deadline=deadline)
        engine.connect_when_up(wait_s=wait_s, deadline=deadline)
        takeover = config.engine.kind == "http" and config.engine.takeover
        engine.claim(place.owner, takeover=takeover, deadline=deadline)
        if not processes:
            check_model(config, engine, deadline=deadline)
        bridge, weights = build_external_bridge(config, engine=engine, owned=owned, place=place)
    except BaseException:
        engine.close()
        if owned is not None:
            owned.stop()
        raise
    return EngineSide(bridge=bridge, weights=weights, owned=owned)


def check_model(config: LachesisConfig, engine: HttpEngine, *, deadline: Deadline) -> None:
    """See that servers which others have started serve the model that is trained.

    Nothing can be said of weights that are cut over several GPUs, or quantized.

    Raises:
        ModelError: they serve another one; the message says how the two differ.
    """
    control = engine.controls[0]
    info, held = control.info(deadline=deadline), control.state_dict_info(deadline=deadline)
    if info.model.tensor_parallel_size > 1 or any(tensor.dtype != info.model.dtype for tensor in held.values()):
        return
    model = empty_transformer(config.model, dtype=torch.float32)
    check_same_model(
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        {name: tensor.shape for name, tensor in held.items()},
        model_type=model.config.get_text_config().model_type,
        engine_kind=info.engine,
    )


def server_urls(config: LachesisConfig) -> list[str]:
    """The addresses of the engine's servers; those of further copies of the model follow on the first one's port."""
    engine = config.engine
    if isinstance(engine, schema.HttpEngineConfig):
        return list(engine.urls)
    assert not isinstance(engine, schema.EmbeddedEngineConfig)
    copies = engine.data_parallel_size if isinstance(engine, schema.VllmEngineConfig) else 1
    return [f"http://{engine.host}:{engine.port + number}" for number in range(copies)]


def server_processes(config: LachesisConfig, *, place: RunPlace) -> list[ManagedProcess]:
    """The servers that the run is to start, not started yet; none where they run already."""
    if isinstance(config.engine, schema.HttpEngineConfig):
        return []
    return [
        ManagedProcess(
            server_command(config, number=number, model=config.model.path, place=place),
            url=url,
            log_path=place.engine_log
            if number == 0
            else place.engine_log.with_stem(f"{place.engine_log.stem}-{number}"),
            # A server is no rank of this run.
            env=dict.fromkeys(os.environ.keys() & set(VARIABLES)) | server_environment(config, number=number),
            on_death=lambda error: logger.error("%s", error),
        )
        for number, url in enumerate(server_urls(config))
    ]


def server_environment(config: LachesisConfig, *, number: int) -> dict[str, str]:
    """Which of ``engine.devices`` the server of that number sees: its own ``tensor_parallel_size`` of them."""
    engine = config.engine
    if not isinstance(engine, schema.VllmEngineConfig) or engine.devices is None:
        return {}
    devices, size = engine.devices.split(","), engine.tensor_parallel_size
    own = devices if engine.data_parallel_size == 1 else devices[number * size : (number + 1) * size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def server_command(config: LachesisConfig, *, number: int, model: str | Path, place: RunPlace) -> list[str]:
    """``lachesis serve`` with the flags of the engine's section, serving ``model``, for the server of that number."""
    engine = config.engine
    flags: dict[str, object] = {
        "--model": model,
        "--tokenizer": config.model.tokenizer or config.model.path,
        "--adapter-root": place.directory,
    }
    if isinstance(config.adapter, schema.LoraAdapterConfig) and config.bridge.kind.startswith("lora"):
        flags |= {"--enable-lora": True, "--max-lora-rank": config.adapter.r}
    if isinstance(engine, schema.EmbeddedServerConfig):
        flags |= {
            "--engine": "embedded",
            "--host": engine.host,
            "--port": engine.port,
            "--dtype": config.model.dtype,
            "--device": config.model.device,
            "--max-num-seqs": engine.max_batch_size,
            "--max-model-len": engine.max_model_len,
        }
    elif isinstance(engine, schema.VllmEngineConfig):
        utilization = engine.gpu_memory_utilization or default_utilization(config)
        flags |= {
            "--host": engine.host,
            "--port": engine.port + number,
            "--dtype": engine.dtype if engine.dtype != "auto" else trainer_dtype(config),
            "--gpu-memory-utilization": utilization if resolve_device(config.model.device).type == "cuda" else None,
            "--max-model-len": engine.max_model_len,
            "--tensor-parallel-size": engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None,
            "--enforce-eager": engine.enforce_eager,
            "--enable-sleep-mode": engine.enable_sleep_mode,
            "--trust-remote-code": config.model.trust_remote_code,
        }
    command = [sys.executable, "-m", "lachesis", "serve"]
    for flag, value in flags.items():
        if value is True:
            command.append(flag)
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command + (engine.extra_args if isinstance(engine, schema.VllmEngineConfig) else [])


def trainer_dtype(config: LachesisConfig) -> str:
    """The dtype that the trainer's weights get; vLLM's own ``auto`` would make 16 bits of a checkpoint in float32."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if resolve_device(config.model.device).type == "cpu":
        return "float32"
    found = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    dtype = found.dtype or found.get_text_config().dtype
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def default_utilization(config: LachesisConfig) -> float:
    """The share of a GPU's memory that an engine gets."""
    own = isinstance(config.engine, schema.VllmEngineConfig) and config.engine.devices is not None
    return OWN_GPU_UTILIZATION if own else SHARED_GPU_UTILIZATION


def build_external_bridge(
    config: LachesisConfig, *, engine: HttpEngine, owned: OwnedEngine | None, place: RunPlace
) -> tuple[Bridge[Policy], EngineWeights | None]:
    """The bridge of ``bridge.kind``, and the engine's tensors where the policy is built on them."""
    kind = config.bridge
    shared = _engine_weights(config, engine=engine, place=place)
    start_s = config.deadlines.sync_s + config.deadlines.engine_start_s
    common = {"proof_builder": partial(build_remote_proof, config, weights=shared) if kind.proof else None}
    lora = {
        "directory": place.directory / "adapters",
        "tensors": lambda policy: lora_tensors(policy.model, whole=whole_of(policy)),
        "config": lambda policy: adapter_config(policy.model),
    }
    full = {
        "directory": place.directory / "exports",
        "weights": lambda policy: full_weights(policy.model, whole=whole_of(policy)),
        "companions": lambda policy, path: save_companions(policy.transformer, policy.loaded.tokenizer, path),
    }
    timed = common | {"sync_s": config.deadlines.sync_s}
    match kind:
        case schema.SharedBridgeConfig():
            assert shared is not None
            return SharedBridge(engine=engine, weights=shared, pause_mode=kind.pause, **timed), shared
        case schema.LoraSwapBridgeConfig():
            steps = {"keep_last": kind.keep_last, "every_steps": kind.every_steps}
            return LoraSwapBridge(engine=engine, **lora, **steps, **timed), shared
        case schema.LoraRestartBridgeConfig():
            assert owned is not None, "config.rules checks it"
            steps = {"keep_last": kind.keep_last, "every_steps": kind.every_steps, "sync_s": start_s}
            return LoraRestartBridge(owned=owned, **lora, **steps, **common), shared
        case schema.LoraBroadcastBridgeConfig() | schema.BroadcastBridgeConfig():
            adapter_only = isinstance(kind, schema.LoraBroadcastBridgeConfig)
            bridge = BroadcastBridge(
                engine=engine,
                source=(lora_source if adapter_only else full_source)(lambda policy: policy.model, whole_of),
                backend=channel_backend(config),
                device=resolve_device(config.model.device),
                directory=place.directory,
                init_method=kind.init_method,
                every_steps=kind.every_steps,
                **timed,
            )
            return bridge, shared
        case schema.RestartBridgeConfig():
            assert owned is not None, "config.rules checks it"
            steps = {"keep_last": kind.keep_last, "every_steps": kind.every_steps, "sync_s": start_s}
            command = partial(_serve_checkpoint, config, place)
            return RestartBridge(owned=owned, command=command, **full, **steps, **common), shared
        case schema.ReloadBridgeConfig():
            steps = {"keep_last": kind.keep_last, "every_steps": kind.every_steps}
            return ReloadBridge(engine=engine, **full, **steps, **timed), shared
        case schema.InProcessBridgeConfig():
            raise AssertionError("an engine in this process has no server")
        case _:
            assert_never(kind)


def _serve_checkpoint(config: LachesisConfig, place: RunPlace, server: int, checkpoint: Path) -> Sequence[str]:
    return server_command(config, number=server, model=checkpoint, place=place)


def _engine_weights(config: LachesisConfig, *, engine: HttpEngine, place: RunPlace) -> EngineWeights | None:
    bridge = config.bridge
    shares_base = (
        isinstance(bridge, schema.LoraSwapBridgeConfig | schema.LoraBroadcastBridgeConfig) and bridge.share_base
    )
    if not isinstance(bridge, schema.SharedBridgeConfig) and not shares_base:
        return None
    return EngineWeights(
        engine.controls[0],
        owner=place.owner,
        export_directory=place.directory,
        config_path=bridge.config_path if isinstance(bridge, schema.SharedBridgeConfig) else None,
        takeover=config.engine.kind == "http" and config.engine.takeover,
        limit_s=config.deadlines.sync_s,
    )


def channel_backend(config: LachesisConfig) -> ChannelBackend:
    """How tensors travel: as configured, or by where trainer and engine are."""
    bridge, engine = config.bridge, config.engine
    assert isinstance(bridge, schema.LoraBroadcastBridgeConfig | schema.BroadcastBridgeConfig)
    if bridge.transport != "auto":
        return bridge.transport
    if resolve_device(config.model.device).type == "cpu":
        return "gloo"
    managed_here = isinstance(engine, schema.VllmEngineConfig) and engine.devices is None
    return "ipc" if managed_here or isinstance(engine, schema.EmbeddedServerConfig) else "nccl"


def build_remote_proof(
    config: LachesisConfig, policy: Policy, engine: HttpEngine, *, weights: EngineWeights | None
) -> SyncProof:
    """Proof of sync with a server: a canary of ordinary tokens, and digests where both sides hold equal tensors."""
    deadline = partial(Deadline, "the proof of sync", config.deadlines.sync_s, "deadlines.sync_s")
    info = engine.controls[0].info(deadline=deadline())
    ours = str(policy.transformer.dtype).removeprefix("torch.")
    mine, theirs = digest_functions(config, policy, engine, weights=weights, deadline=deadline)
    vocab_size = min(policy.transformer.config.get_text_config().vocab_size, info.model.vocab_size)
    return SyncProof(
        token_ids=[(7 * i + 5) % vocab_size for i in range(min(_CANARY_TOKENS, info.model.max_model_len - 1))],
        trainer=policy.canary,
        engine=engine.canary,
        session_id=engine.session_id,
        # The coarser of the two sets what can be expected of them.
        dtype=max((ours, info.model.dtype), key=("float64", "float32", "float16", "bfloat16").index),
        quantization=config.model.quantization,
        trainer_digests=mine,
        engine_digests=theirs,
        concurrent=True,
    )


def digest_functions(
    config: LachesisConfig,
    policy: Policy,
    engine: HttpEngine,
    *,
    weights: EngineWeights | None,
    deadline: Callable[[], Deadline],
) -> tuple[Digests | None, Digests | None]:
    """Exact digests of what travels, on both sides; none where the engine keeps it in another form.

    That is so with weights split over GPUs, with kernels that repack them (as on the CPU), and in another dtype.
    """
    info = engine.controls[0].info(deadline=deadline())
    if info.model.tensor_parallel_size > 1:
        return None, None
    if config.bridge.kind.startswith("lora"):
        dtype = getattr(torch, info.model.dtype)
        return (
            lambda: adapter_digests(policy.model, dtype=dtype, whole=whole_of(policy)),
            lambda: engine.digests({}, adapter=True, deadline=deadline()).digests,
        )
    if getattr(torch, info.model.dtype) != policy.transformer.dtype:
        return None, None
    slices = weights.slices if weights is not None else _parameter_slices(policy, engine, deadline=deadline())
    if slices is None:
        return None, None
    wanted = {name: entry.for_digest() for name, entry in slices.items()}
    return lambda: full_digests(
        policy.model, whole=whole_of(policy)
    ), lambda: engine.digests(wanted, deadline=deadline()).digests


def whole_of(policy: Policy) -> Whole:
    """What makes a parameter of the policy whole before it travels."""
    return policy.whole if policy.strategy.sharded else as_it_is


def _parameter_slices(policy: Policy, engine: HttpEngine, *, deadline: Deadline) -> Mapping | None:
    info = engine.controls[0].info(deadline=deadline)
    there = {name: tensor.shape for name, tensor in engine.controls[0].state_dict_info(deadline=deadline).items()}
    try:
        return map_parameters(
            {name: tuple(p.shape) for name, p in base_parameters(policy.model).items()},
            there,
            model_type=policy.transformer.config.get_text_config().model_type,
            engine_kind=info.engine,
        )
    except ModelError as error:
        logger.info("weights are proved by the canary alone: %s", error.message)
        return None


def engine_log(run_directory: Path) -> Path:
    """Where servers write until the run directory is there: beside it."""
    return Path(os.path.abspath(run_directory.parent)) / f".{run_directory.name}.engine.log"
