"""Checks of features that do not work with several ranks."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.common.errors import ConfigError
from lachesis.config.schema import (
    ChannelBridgeConfig,
    LachesisConfig,
    LoraBroadcastBridgeConfig,
    LoraSwapBridgeConfig,
    SharedBridgeConfig,
)
from lachesis.config.schema.mesh import derive_mesh
from lachesis.engines.gpus import is_colocated, rank_cards

# Their steps or states need whole tensors, rows and columns or blocks, which a shard of a tensor does not have.
_WHOLE_TENSOR_OPTIMIZERS = ("adamw_8bit", "adafactor", "muon")


def shared_card(config: LachesisConfig, *, ranks: int, environment: Mapping[str, str]) -> str | None:
    """Describe the conflict if ``engine.devices`` names the GPU of a rank on this machine; None if it does not.

    Bridges that share the weights' memory need the same GPU for both, and are not reported.

    Args:
        ranks: the number of ranks on this machine.
        environment: environment variables, of which CUDA_VISIBLE_DEVICES is used.
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
        f"engine.devices {engine.devices} puts the engine on the GPU of rank {rank} (GPU {both[0]}), and neither "
        "leaves memory for the other; name a GPU on which nothing trains, or leave engine.devices out: the engine then "
        "shares rank 0's GPU (or all ranks' GPUs if it needs as many), with a memory share that fits"
    )


def require_distributable(config: LachesisConfig, *, ranks: int) -> None:
    """Raise if ``ranks`` ranks cannot train a configuration.

    Raises:
        ConfigError: it cannot.
    """
    bridge, distributed = config.bridge, config.distributed
    if isinstance(bridge, SharedBridgeConfig):
        raise ConfigError(
            f"bridge.kind shared_vllm has one copy of the weights, in the engine's memory, but {ranks} devices train",
            remedy="set bridge.kind: broadcast (or lora_nccl, lora_only with an adapter)",
        )
    if isinstance(bridge, LoraSwapBridgeConfig | LoraBroadcastBridgeConfig) and bridge.share_base:
        raise ConfigError(
            f"bridge.share_base builds the model on one engine's memory, but {ranks} devices train",
            remedy="set bridge.share_base: false",
        )
    mesh = derive_mesh(distributed, ranks=ranks)
    if mesh.context > 1 and config.model.packing == "padded":
        raise ConfigError(
            f"model.packing is padded, but {mesh.context} devices can share only the tokens of packed micro-batches",
            remedy="leave model.packing out, or distributed.context_parallel_size",
        )
    if mesh.context > 1 and config.algorithm.router_replay:
        raise ConfigError(
            f"algorithm.router_replay does not work with context parallelism, and {mesh.context} devices share the "
            "tokens of each micro-batch",
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
            f"checkpoint.asynchronous with checkpoint.format: whole would make rank 0 hold the state of all {ranks} "
            "devices twice, once gathered and once copied",
            remedy="leave checkpoint.format out, so that each rank copies and writes its own part",
        )
    if config.optimizer.function is None and config.optimizer.kind in _WHOLE_TENSOR_OPTIMIZERS:
        raise ConfigError(
            f"optimizer.kind {config.optimizer.kind} works on whole tensors, but {ranks} devices hold shards of them",
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
            f"without engine.devices the engine runs on the GPUs of the {ranks} ranks, but only {here} of them are on "
            "the machine that starts it",
            remedy="train on one machine, or start servers by `lachesis serve` and name them in engine.urls",
        )
    if copies * ways != ranks:
        fits = ranks % ways == 0
        suited = f"set engine.data_parallel_size: {ranks // ways}" if fits else f"start {copies * ways} ranks"
        raise ConfigError(
            f"{words}, but {ranks} ranks train: without engine.devices the engine runs on their GPUs, one worker "
            "beside each",
            remedy=f"{suited}, or name GPUs on which nothing trains in engine.devices",
        )
    if isinstance(bridge, ChannelBridgeConfig) and bridge.transport == "nccl":
        raise ConfigError(
            f"bridge.transport is nccl, which needs separate GPUs for each side, but {words}, shared by {ranks} ranks",
            remedy="leave bridge.transport out: each worker then reads the weights packed by the rank on its GPU (ipc)",
        )
