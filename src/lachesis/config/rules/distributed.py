"""Checks of features that do not work with several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lachesis.config.rules.table import refuse
from lachesis.config.schema import LachesisConfig, SharedBridgeConfig
from lachesis.config.schema.mesh import derive_mesh
from lachesis.engines.gpus import is_colocated, rank_cards

_REFUSALS = Path(__file__).with_name("refusals.toml")


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
    refuse(_REFUSALS, "one_engine", config, ranks=ranks)
    refuse(_REFUSALS, "sharing", config, ranks=ranks, mesh=derive_mesh(config.distributed, ranks=ranks))
    if config.distributed.strategy != "replicate":
        refuse(_REFUSALS, "sharded", config, ranks=ranks)


def require_colocatable(config: LachesisConfig, *, ranks: int, here: int) -> None:
    """Raise if a colocated engine does not fit on the GPUs of ``ranks`` ranks, ``here`` of them on this machine.

    Raises:
        ConfigError: it cannot.
    """
    engine = config.engine
    if not is_colocated(config, ranks=ranks) or engine.kind != "vllm":
        return
    copies, ways = engine.data_parallel_size, engine.tensor_parallel_size
    words = f"engine.data_parallel_size {copies} x tensor_parallel_size {ways} takes {copies * ways} GPUs"
    suited = f"set engine.data_parallel_size: {ranks // ways}" if ranks % ways == 0 else f"start {copies * ways} ranks"
    refuse(_REFUSALS, "colocated", config, ranks=ranks, here=here, workers=copies * ways, words=words, suited=suited)
