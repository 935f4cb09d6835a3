"""Checks of features that several ranks cannot use."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.common.errors import ConfigError
from lachesis.config.colocation import is_colocated, rank_cards
from lachesis.config.schema import (
    ChannelBridgeConfig,
    LachesisConfig,
    LoraBroadcastBridgeConfig,
    LoraSwapBridgeConfig,
    SharedBridgeConfig,
)
from lachesis.config.schema.mesh import derive_mesh

# Their steps or states are of whole tensors, rows and columns or blocks, which parts of a tensor have not.
_WHOLE_TENSOR_OPTIMIZERS = ("adamw_8bit", "adafactor", "muon")


def shared_card(config: LachesisConfig, *, ranks: int, environment: Mapping[str, str]) -> str | None:
    """Return a sentence on the rank of this machine whose card ``engine.devices`` names; None if there is none.

    Bridges that share the weights' memory need one card for both, and are not reported.

    Args:
        ranks: the number of ranks on this machine.
        environment: its CUDA_VISIBLE_DEVICES says which cards they see.
    """
    engine, bridge = config.engine, config.bridge
    shared = isinstance(bridge, SharedBridgeConfig) or getattr(bridge, "share_base", False)
    if engine.kind != "vllm" or engine.devices is None or shared:
        return None
    cards = rank_cards(environment, ranks=ranks)
    named = [device.strip() for device in engine.devices.split(",")]
    both = [card for card in named if card in cards]
    if not both:
        return None
    rank = cards.index(both[0])
    return (
        f"engine.devices {engine.devices} puts the engine on the card of rank {rank} (GPU {both[0]}), and "
        "neither's memory is counted beside the other's; name a card on which nothing trains, or leave engine.devices "
        "out, which puts the engine beside rank 0, or one that takes as many GPUs as there are ranks beside all of "
        "them, with a share that is counted"
    )


def require_distributable(config: LachesisConfig, *, ranks: int) -> None:
    """Raise unless a configuration can be trained by ``ranks`` ranks.

    Raises:
        ConfigError: it cannot.
    """
    bridge, distributed = config.bridge, config.distributed
    if isinstance(bridge, SharedBridgeConfig):
        raise ConfigError(
            f"bridge.kind shared_vllm has one copy of the weights, in the engine's memory, and {ranks} devices train",
            remedy="set bridge.kind: broadcast (or lora_nccl, lora_only with an adapter)",
        )
    if isinstance(bridge, LoraSwapBridgeConfig | LoraBroadcastBridgeConfig) and bridge.share_base:
        raise ConfigError(
            f"bridge.share_base builds the model on one engine's memory, and {ranks} devices train",
            remedy="set bridge.share_base: false",
        )
    mesh = derive_mesh(distributed, ranks=ranks)
    if mesh.context > 1 and config.model.packing == "padded":
        raise ConfigError(
            f"model.packing is padded, and {mesh.context} devices are to share the tokens of a packed micro-batch",
            remedy="leave model.packing out, or distributed.context_parallel_size",
        )
    if mesh.context > 1 and config.algorithm.router_replay:
        raise ConfigError(
            f"algorithm.router_replay gives each token of a micro-batch its experts, and {mesh.context} devices share "
            "the tokens",
            remedy="leave algorithm.router_replay out, or distributed.context_parallel_size",
        )
    if distributed.strategy == "replicate":
        return
    if config.model.quantization != "none":
        raise ConfigError(
            f"weights in {config.model.quantization} cannot be sharded over {ranks} devices",
            remedy="set distributed.strategy: replicate, or model.quantization: none",
        )
    if config.checkpoint.asynchronous and config.checkpoint.format == "whole":
        raise ConfigError(
            f"checkpoint.asynchronous with checkpoint.format: whole would have rank 0 hold what {ranks} devices have "
            "twice, gathered and copied",
            remedy="leave checkpoint.format out, so that each rank copies and writes its own part",
        )
    if config.optimizer.function is None and config.optimizer.kind in _WHOLE_TENSOR_OPTIMIZERS:
        raise ConfigError(
            f"optimizer.kind {config.optimizer.kind} works on whole tensors, and {ranks} devices have parts of them",
            remedy="set optimizer.kind: adamw (sharded, it takes 8 bytes a parameter over all devices), or "
            "distributed.strategy: replicate",
        )


def require_colocatable(config: LachesisConfig, *, ranks: int, here: int) -> None:
    """Raise if a colocated engine does not fit on the GPUs of ``ranks`` ranks, ``here`` of them on this machine.

    Raises:
        ConfigError: it cannot.
    """
    engine, bridge = config.engine, config.bridge
    if not is_colocated(config, ranks=ranks) or engine.kind != "vllm":
        return
    copies, ways = engine.data_parallel_size, engine.tensor_parallel_size
    words = f"engine.data_parallel_size {copies} x tensor_parallel_size {ways} takes {copies * ways} GPUs"
    if here != ranks:
        raise ConfigError(
            f"without engine.devices the engine is on the GPUs of the {ranks} ranks, and {here} of them are on the "
            "machine that starts it",
            remedy="train on one machine, or start servers by `lachesis serve` and name them in engine.urls",
        )
    if copies * ways != ranks:
        fits = ranks % ways == 0
        suited = f"set engine.data_parallel_size: {ranks // ways}" if fits else f"start {copies * ways} ranks"
        raise ConfigError(
            f"{words}, and {ranks} ranks train: without engine.devices the engine is on their GPUs, one worker beside "
            "each",
            remedy=f"{suited}, or name GPUs on which nothing trains in engine.devices",
        )
    if isinstance(bridge, ChannelBridgeConfig) and bridge.transport == "nccl":
        raise ConfigError(
            f"bridge.transport is nccl, which takes a GPU for each side, and {words}, those of the {ranks} ranks",
            remedy="leave bridge.transport out: each worker then reads what the rank on its GPU has packed (ipc)",
        )
