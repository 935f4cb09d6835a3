"""The share of a card's memory that each vLLM server gets (``engine.gpu_memory_utilization``)."""

from __future__ import annotations

import math

from lachesis.config.schema import OWN_GPU_UTILIZATION, LachesisConfig

# CUDA graphs, which a server takes on top of its share: 0.45 to 0.99 GiB on an H200 (benchmarks/RESULTS.md, "What a
# vLLM server takes beside its weights").
ENGINE_GRAPHS_BYTES = 2**30
# Share of a card left free when a server's share is chosen: the plan is a few percent off (docs/gpu-guide.md), and
# fragmentation or graphs of many sizes can take 2 GB.
_SPARE = 0.03


def beside_trainer(config: LachesisConfig) -> bool:
    """Return True if a server is on the card of the trainer."""
    if config.engine.kind == "vllm":
        return config.engine.devices is None or config.shares_weights
    return config.engine.kind == "embedded_server" or config.shares_weights


def servers_on_card(config: LachesisConfig, *, devices: int) -> int:
    """Return the number of the engine's servers on the trainer's card, which is one of ``devices``."""
    return config.engine.servers_on_card(devices=devices) if config.engine.kind == "vllm" else 1


def share_left(left: int, *, card: int, servers: int) -> float:
    """Return the share of a card for each server, if they have ``left`` bytes together, in whole hundredths."""
    return math.floor((left - servers * ENGINE_GRAPHS_BYTES) / card / servers * 100) / 100


def chosen_share(
    config: LachesisConfig, *, card: int, trainer: int, least: int, devices: int, aside: int = 0
) -> float | None:
    """Return the share of a card that each vLLM server of this run takes; None if the run starts none.

    If none is set, servers on a separate card have 0.9 of it together. On the trainer's card they have 0.45 together if
    both fit with that, else the memory that the trainer leaves, in whole hundredths, if that is enough for the engine.
    Sizes are in bytes: ``trainer`` is the trainer's while the engine has its share, ``least`` each server's need, and
    ``aside`` the part of an update that all of them keep besides; room for it, and for memory that the plan does not
    count, is left if possible. The trainer takes ``devices``, of which the card is one.
    """
    if config.engine.kind != "vllm":
        return None
    if config.engine.gpu_memory_utilization is not None:
        return config.engine.gpu_memory_utilization
    if not beside_trainer(config):
        return config.engine.own_share
    servers, usual = config.engine.servers_on_card(devices=devices), config.engine.usual_share(devices=devices)
    spare = round(_SPARE * card)
    for kept in (aside + spare, spare, 0):
        left = share_left(card - trainer - kept, card=card, servers=servers)
        if least <= min(left, usual) * card + ENGINE_GRAPHS_BYTES:
            return min(left, usual)
        if least <= left * card + ENGINE_GRAPHS_BYTES:
            return min(left, OWN_GPU_UTILIZATION)
    return usual
