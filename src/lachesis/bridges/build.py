"""Construction of the bridge that ``bridge.kind`` names, over servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal

from lachesis.bridges.base import Bridge
from lachesis.bridges.proof import ModelPolicyT
from lachesis.bridges.sent_weights import Whole, as_saved, full_weights, lora_tensors
from lachesis.common.device import resolve_device
from lachesis.config.schema import (
    BroadcastBridgeConfig,
    ChannelBridgeConfig,
    EmbeddedServerConfig,
    InProcessBridgeConfig,
    LachesisConfig,
    LoraBroadcastBridgeConfig,
    LoraSwapBridgeConfig,
    ReloadBridgeConfig,
    RestartBridgeConfig,
    SavedBridgeConfig,
    SharedBridgeConfig,
    VllmEngineConfig,
)
from lachesis.engines.base import PauseMode
from lachesis.transport.layout import ChannelBackend

# The module of a bridge is loaded when the configuration names it.
if TYPE_CHECKING:
    from lachesis.bridges.broadcast import PackBuckets
    from lachesis.bridges.external import Command, OwnedEngine, Servers
    from lachesis.bridges.senders import SenderRanks, SendsTogether
    from lachesis.bridges.shared import EngineWeights
    from lachesis.engines.http.client import HttpEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeParts(Generic[ModelPolicyT]):
    """Parts from which bridges over servers are made.

    Args:
        config: of the run.
        engine: the client of the servers.
        directory: the run's.
        weights: the engine's tensors if the policy is built on them, as :func:`engine_weights`.
        owned: the servers' processes, if the run starts them.
        command: makes the command that serves a checkpoint.
        members: returns the wanted servers, if they may change.
        whole_of: makes a policy's parameters whole before they travel.
        companions: writes a checkpoint's files besides the weights.
        make_room: as in :class:`~lachesis.bridges.external.Servers`.
        pack_buckets: as :class:`BroadcastBridge` takes it, if the engine is on the GPUs of several ranks.
        together: a policy as its ranks send its weights together; without it this process sends them.
        canary_prompt: token ids with which the canary of the proof begins.
    """

    config: LachesisConfig
    engine: HttpEngine
    directory: Path
    weights: EngineWeights | None
    owned: OwnedEngine | None
    command: Command
    members: Callable[[], Sequence[str]] | None
    whole_of: Callable[[ModelPolicyT], Whole]
    companions: Callable[[ModelPolicyT, Path], None]
    make_room: Callable[[ModelPolicyT], None]
    pack_buckets: PackBuckets[ModelPolicyT] | None = None
    together: Callable[[ModelPolicyT], SendsTogether] | None = None
    canary_prompt: Sequence[int] = ()


def build_bridge(parts: BridgeParts[ModelPolicyT]) -> Bridge[ModelPolicyT]:
    """Build the bridge of ``bridge.kind`` over servers."""
    match parts.config.bridge:
        case SharedBridgeConfig() as kind:
            return _shared(parts, pause=kind.pause)
        case BroadcastBridgeConfig() as kind:
            return _broadcast(parts, kind)
        case LoraBroadcastBridgeConfig() as kind:
            return _broadcast(parts, kind)
        case LoraSwapBridgeConfig() as kind:
            return _saved(parts, kind, "[LORA] ✓ Hot-swapped adapter: version %d in %.3f s")
        case RestartBridgeConfig() | ReloadBridgeConfig() as kind:
            return _saved(parts, kind, "[CHECKPOINT] Engine serves version %d after %.1f s")
        case InProcessBridgeConfig():
            raise AssertionError("an engine in this process has no server")


def _servers(
    parts: BridgeParts[ModelPolicyT], *, every_steps: int = 1, pause: PauseMode = "keep"
) -> Servers[ModelPolicyT]:
    from lachesis.bridges.external import Servers
    from lachesis.bridges.fleet_proof import remote_proof

    config, weights = parts.config, parts.weights
    slices_of = None if weights is None else lambda: weights.slices
    proof = partial(remote_proof, config, slices_of=slices_of, whole_of=parts.whole_of, prompt=parts.canary_prompt)
    start_s = config.deadlines.engine_start_s if config.bridge.capabilities.owns_engine else 0.0
    return Servers(
        engine=parts.engine,
        members=parts.members,
        proof_builder=proof if config.bridge.proof else None,
        owned=parts.owned,
        trains_in_engine=weights is not None,
        sleep_level=sleep_level(config),
        make_room=parts.make_room,
        sync_s=config.deadlines.sync_s + start_s,
        every_steps=every_steps,
        pause_mode=pause,
    )


def sleep_level(config: LachesisConfig) -> Literal[0, 1, 2]:
    """Return the engine's sleep level while the trainer computes. It may drop weights if all are sent again."""
    if not isinstance(config.engine, VllmEngineConfig) or not config.engine.enable_sleep_mode:
        return 0
    return 2 if config.forgets_weights else 1


def _shared(parts: BridgeParts[ModelPolicyT], *, pause: PauseMode) -> Bridge[ModelPolicyT]:
    from lachesis.bridges.shared import SharedBridge

    assert parts.weights is not None
    return SharedBridge(_servers(parts, pause=pause), weights=parts.weights)


def _broadcast(
    parts: BridgeParts[ModelPolicyT], kind: BroadcastBridgeConfig | LoraBroadcastBridgeConfig
) -> Bridge[ModelPolicyT]:
    from lachesis.bridges.broadcast import BroadcastBridge, full_source, lora_source

    source = full_source if isinstance(kind, BroadcastBridgeConfig) else lora_source
    backend = channel_backend(parts.config, kind)
    return BroadcastBridge(
        _servers(parts, every_steps=kind.every_steps),
        source=source(lambda policy: policy.model, parts.whole_of),
        backend=backend,
        device=resolve_device(parts.config.model.device),
        directory=parts.directory,
        init_method=kind.init_method,
        pack_buckets=parts.pack_buckets if backend == "ipc" else None,
        sender_ranks=_sender_ranks(parts, kind, backend),
        staging=kind.staging,
    )


def _sender_ranks(
    parts: BridgeParts[ModelPolicyT], kind: ChannelBridgeConfig, backend: ChannelBackend
) -> SenderRanks[ModelPolicyT] | None:
    """Return the function by which ranks send all weights; None for an adapter, which fits into a bucket."""
    if parts.together is None or backend == "ipc" or not isinstance(kind, BroadcastBridgeConfig) or kind.senders == 1:
        return None
    from lachesis.bridges.senders import SenderRanks

    return SenderRanks(parts.together, most=kind.senders)


def _saved(parts: BridgeParts[ModelPolicyT], kind: SavedBridgeConfig, done: str) -> Bridge[ModelPolicyT]:
    from lachesis.bridges.model_files import adapter_config
    from lachesis.bridges.saved import (
        AdapterWriter,
        CheckpointFiles,
        Load,
        SavedBridge,
        load_adapter,
        load_checkpoint,
        started_on_it,
    )

    whole_of = parts.whole_of
    adapter: AdapterWriter[ModelPolicyT] = AdapterWriter(
        tensors=lambda policy: lora_tensors(policy.model, whole=whole_of(policy)),
        config=lambda policy: adapter_config(policy.model),
    )
    checkpoint: CheckpointFiles[ModelPolicyT] = CheckpointFiles(
        weights=lambda policy: as_saved(policy.model, full_weights(policy.model, whole=whole_of(policy))),
        companions=parts.companions,
    )
    adapter_only = kind.capabilities.adapter_only
    whole: Mapping[type[SavedBridgeConfig], Load] = {
        ReloadBridgeConfig: load_checkpoint,
        RestartBridgeConfig: started_on_it,
    }
    return SavedBridge(
        _servers(parts, every_steps=kind.every_steps),
        capabilities=kind.capabilities,
        directory=parts.directory / ("adapters" if adapter_only else "exports"),
        keep_last=kind.keep_last,
        save=adapter if adapter_only else checkpoint,
        load=load_adapter if adapter_only else whole[type(kind)],
        done=done,
        command=parts.command if isinstance(kind, RestartBridgeConfig) else None,
    )


def engine_weights(config: LachesisConfig, *, engine: HttpEngine, owner: str, directory: Path) -> EngineWeights | None:
    """Return the engine's tensors if the policy is to be built on them, else None.

    Args:
        owner: the name under which the run claims the engine.
        directory: the run's; the engine may write its bridge file there.
    """
    if not config.shares_weights:
        return None
    from lachesis.bridges.shared import EngineWeights

    bridge = config.bridge
    return EngineWeights(
        engine.controls[0],
        owner=owner,
        export_directory=directory,
        config_path=bridge.config_path if isinstance(bridge, SharedBridgeConfig) else None,
        takeover=config.engine.kind == "http" and config.engine.takeover,
        limit_s=config.deadlines.sync_s,
    )


def channel_backend(config: LachesisConfig, bridge: ChannelBridgeConfig) -> ChannelBackend:
    """Return how tensors travel: as configured, or by the devices of trainer and engine."""
    if bridge.transport != "auto":
        return bridge.transport
    if resolve_device(config.model.device).type == "cpu":
        return "gloo"
    engine = config.engine
    if isinstance(engine, EmbeddedServerConfig):
        return "ipc"
    if not isinstance(engine, VllmEngineConfig):
        return "nccl"
    if engine.devices is None:
        return "ipc"
    # NCCL takes one worker a GPU.
    return "gloo" if engine.servers_on_own_card > 1 else "nccl"
