"""Which bridges there are: from ``bridge.kind`` to the bridge over servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import assert_never

from lachesis.bridges.adapters import adapter_config
from lachesis.bridges.base import Bridge
from lachesis.bridges.broadcast import BroadcastBridge, full_source, lora_source
from lachesis.bridges.engine_weights import EngineWeights
from lachesis.bridges.extract import Whole, full_weights, lora_tensors
from lachesis.bridges.owned import Command, OwnedEngine
from lachesis.bridges.proofs import ModelPolicyT, remote_proof
from lachesis.bridges.saved import (
    AdapterFiles,
    CheckpointFiles,
    SavedBridge,
    load_adapter,
    load_checkpoint,
    started_on_it,
)
from lachesis.bridges.shared import SharedBridge
from lachesis.common.device import resolve_device
from lachesis.config.schema import (
    BroadcastBridgeConfig,
    EmbeddedServerConfig,
    InProcessBridgeConfig,
    LachesisConfig,
    LoraBroadcastBridgeConfig,
    LoraRestartBridgeConfig,
    LoraSwapBridgeConfig,
    ReloadBridgeConfig,
    RestartBridgeConfig,
    SharedBridgeConfig,
    VllmEngineConfig,
)
from lachesis.engines.http.client import HttpEngine
from lachesis.transport.layout import ChannelBackend


def build_bridge(
    config: LachesisConfig,
    *,
    engine: HttpEngine,
    directory: Path,
    weights: EngineWeights | None,
    owned: OwnedEngine | None,
    command: Command,
    whole_of: Callable[[ModelPolicyT], Whole],
    companions: Callable[[ModelPolicyT, Path], None],
) -> Bridge[ModelPolicyT]:
    """The bridge of ``bridge.kind`` over servers.

    Args:
        directory: the run's.
        weights: the engine's tensors where the policy is built on them, as :func:`engine_weights`.
        owned: the servers' processes, where the run starts them.
        command: serves a checkpoint.
        whole_of: makes a policy's parameters whole before they travel.
        companions: writes what a checkpoint of a policy has besides weights.
    """
    kind = config.bridge
    proof = partial(remote_proof, config, weights=weights, whole_of=whole_of) if kind.proof else None
    sync_s = config.deadlines.sync_s + (config.deadlines.engine_start_s if kind.capabilities.owns_engine else 0.0)
    match kind:
        case SharedBridgeConfig():
            assert weights is not None
            return SharedBridge(
                engine=engine, weights=weights, pause_mode=kind.pause, proof_builder=proof, owned=owned, sync_s=sync_s
            )
        case LoraBroadcastBridgeConfig() | BroadcastBridgeConfig():
            source = lora_source if kind.capabilities.adapter_only else full_source
            return BroadcastBridge(
                engine=engine,
                source=source(lambda policy: policy.model, whole_of),
                backend=channel_backend(config),
                device=resolve_device(config.model.device),
                directory=directory,
                init_method=kind.init_method,
                proof_builder=proof,
                owned=owned,
                trains_in_engine=weights is not None,
                sync_s=sync_s,
                every_steps=kind.every_steps,
            )
        case LoraSwapBridgeConfig():
            load, done = load_adapter, "[LORA] ✓ Hot-swapped adapter: version %d in %.3f s"
        case LoraRestartBridgeConfig():
            load, done = load_adapter, "[LORA] Engine restarted with version %d in %.1f s"
        case RestartBridgeConfig():
            load, done = started_on_it, "[CHECKPOINT] Engine serves version %d after %.1f s"
        case ReloadBridgeConfig():
            load, done = load_checkpoint, "[CHECKPOINT] Engine serves version %d after %.1f s"
        case InProcessBridgeConfig():
            raise AssertionError("an engine in this process has no server")
        case _:
            assert_never(kind)
    save: AdapterFiles[ModelPolicyT] | CheckpointFiles[ModelPolicyT]
    if kind.capabilities.adapter_only:
        save = AdapterFiles(
            tensors=lambda policy: lora_tensors(policy.model, whole=whole_of(policy)),
            config=lambda policy: adapter_config(policy.model),
        )
    else:
        save = CheckpointFiles(
            weights=lambda policy: full_weights(policy.model, whole=whole_of(policy)), companions=companions
        )
    return SavedBridge(
        capabilities=kind.capabilities,
        engine=engine,
        directory=directory / ("adapters" if kind.capabilities.adapter_only else "exports"),
        keep_last=kind.keep_last,
        save=save,
        load=load,
        done=done,
        command=command if load is started_on_it else None,
        proof_builder=proof,
        owned=owned,
        trains_in_engine=weights is not None,
        sync_s=sync_s,
        every_steps=kind.every_steps,
    )


def engine_weights(config: LachesisConfig, *, engine: HttpEngine, owner: str, directory: Path) -> EngineWeights | None:
    """The engine's own tensors, where the policy is to be built on them.

    Args:
        owner: the name under which the run claims the engine.
        directory: the run's; the engine may write its bridge file there.
    """
    bridge = config.bridge
    shares_all = isinstance(bridge, SharedBridgeConfig)
    shares_base = isinstance(bridge, LoraSwapBridgeConfig | LoraBroadcastBridgeConfig) and bridge.share_base
    if not shares_all and not shares_base:
        return None
    return EngineWeights(
        engine.controls[0],
        owner=owner,
        export_directory=directory,
        config_path=bridge.config_path if shares_all else None,
        takeover=config.engine.kind == "http" and config.engine.takeover,
        limit_s=config.deadlines.sync_s,
    )


def channel_backend(config: LachesisConfig) -> ChannelBackend:
    """How tensors travel: as configured, or by where trainer and engine are."""
    bridge, engine = config.bridge, config.engine
    assert isinstance(bridge, LoraBroadcastBridgeConfig | BroadcastBridgeConfig)
    if bridge.transport != "auto":
        return bridge.transport
    if resolve_device(config.model.device).type == "cpu":
        return "gloo"
    managed_here = isinstance(engine, VllmEngineConfig) and engine.devices is None
    return "ipc" if managed_here or isinstance(engine, EmbeddedServerConfig) else "nccl"
