"""What cannot be done by several ranks."""

from __future__ import annotations

from lachesis.common.errors import ConfigError
from lachesis.common.mesh import derive_mesh
from lachesis.config.schema import LachesisConfig, LoraBroadcastBridgeConfig, LoraSwapBridgeConfig, SharedBridgeConfig

# Their states are of whole tensors, rows and columns or blocks, which parts of a tensor have not.
_WHOLE_TENSOR_OPTIMIZERS = ("adamw_8bit", "adafactor")


def require_distributable(config: LachesisConfig, *, ranks: int) -> None:
    """See that a configuration can be trained by that many ranks.

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
    derive_mesh(distributed, ranks=ranks)
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
