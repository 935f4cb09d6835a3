"""Checks of features that do not work with several ranks."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.common.errors import ConfigError
from lachesis.config.engine_gpus import engine_workers, is_colocated, rank_cards
from lachesis.config.rules.table import holding, names_of, rows
from lachesis.config.schema import LachesisConfig, SharedBridgeConfig
from lachesis.config.schema.mesh import derive_mesh


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
    distributed = config.distributed
    mesh = derive_mesh(distributed, ranks=ranks)
    _require("distributable", config, ranks=ranks, context=mesh.context, sharded=distributed.strategy != "replicate")


def require_colocatable(config: LachesisConfig, *, ranks: int, here: int) -> None:
    """Raise if a colocated engine does not fit on the GPUs of ``ranks`` ranks, ``here`` of them on this machine.

    Raises:
        ConfigError: it cannot.
    """
    if is_colocated(config, ranks=ranks) and config.engine.kind == "vllm":
        _require("colocatable", config, ranks=ranks, here=here, gpus=engine_workers(config.engine))


def _require(name: str, config: LachesisConfig, **more: int) -> None:
    for row, names in holding(rows("distributed")[name], names_of(config) | more):
        raise ConfigError(row["problem"].format(**names), remedy=row["remedy"].format(**names))
