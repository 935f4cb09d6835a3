"""Fit of a plan on a card: each process's memory besides its tensors, and the engine's share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lachesis.config.schema import OWN_GPU_UTILIZATION, SPARING, LachesisConfig
from lachesis.plan.memory import GATHERED, Place, kept_aside_bytes, must_keep_aside, sleeps
from lachesis.plan.plan import Plan, plan

GB = 10**9
# Sizes of cards that are asked about, as their vendors call them. They hold a little more, which the driver takes.
CARDS = (24, 40, 48, 80, 141)
# CUDA's context of a process with its libraries: 0.55 GB on an H200 (benchmarks/raw/memory.json).
CONTEXT_BYTES = 6 * 10**8
# What the allocator holds over what tensors take at the worst moment, blocks that do not fit together: 0.3 to 2.1 GB
# on an H200, whatever the model's size (benchmarks/raw/memory.json), and over several ranks as much again as is
# gathered, for that comes and goes: 1.8 to 5.5 GB on two H100s (benchmarks/raw/memory_two_gpus*.json).
FRAGMENTS_BYTES = 10**9
# What a vLLM server takes of its share besides weights and cache: the workspace of a full prefill, and what is not
# torch's. With 8B on an H200 1.3 GiB, with 1.3 billion parameters 0.7 (benchmarks/RESULTS.md, "What a vLLM server takes
# beside its weights").
ENGINE_WORKSPACE_BYTES = 3 * 2**29
# What it takes on top of its share, CUDA graphs: 0.45 to 0.99 GiB there.
ENGINE_GRAPHS_BYTES = 2**30
# As in lachesis.engines.receiver: an update is kept on the GPU where so many times its bytes are free.
ROOM_ASIDE = 1.1
# Of a card, left to nobody where a server's share is chosen for it: what plan counts is some percent off
# (docs/gpu-guide.md), and blocks that do not fit together or graphs of many sizes can take 2 GB.
_SPARE = 0.03
# A server needs a cache for so many sequences at a time to be of use; more are served in turn.
_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class CardUse:
    """Bytes used of one of the trainer's cards, and whether they fit.

    ``engine`` is what servers beside the trainer take, 0 where there is none; ``engine_least`` the least that would do.
    ``engine_fits`` says so of an engine's own card where it has one. ``share`` is each vLLM server's, where there is
    one. ``aside`` is what servers beside the trainer keep of an update on top of their share; ``by_host`` says that
    their card, this one or their own, has no room for it, so updates are staged in host memory. ``room_share`` is the
    largest share of an engine's own card that leaves room for it, where that is enough for the engine.
    """

    card: int
    trainer: int
    engine: int
    engine_least: int
    engine_fits: bool
    share: float | None = None
    aside: int = 0
    by_host: bool = False
    room_share: float | None = None

    @property
    def total(self) -> int:
        return self.trainer + self.engine + self.aside

    @property
    def fits(self) -> bool:
        return self.total <= self.card and self.engine_fits


def card_use(config: LachesisConfig, planned: Plan, *, card_gb: float) -> CardUse:
    """Return the use of a card of ``card_gb`` times 10^9 bytes by trainer and engine; ``planned`` is for ``cuda``."""
    card, least = round(card_gb * GB), engine_least(config, planned)
    if config.engine.place == "trainer":  # one process: the cache is there while it generates
        return CardUse(card, process_bytes(planned, "trainer", "engine"), 0, 0, True)
    trainer = process_bytes(planned, "trainer")
    # A server that sleeps has its share while the trainer holds what it holds while nothing is trained.
    resting = sum(planned.at("generation", "trainer")) + FRAGMENTS_BYTES + CONTEXT_BYTES
    held = resting if sleeps(config) else trainer
    aside = 0 if planned.shape is None else kept_aside_bytes(config, planned.shape)
    must = must_keep_aside(config)
    if not beside_trainer(config):
        share = chosen_share(config, card=card, trainer=held, least=least, devices=planned.devices)
        servers = config.engine.servers_on_own_card if config.engine.kind == "vllm" else 1
        taken = share or OWN_GPU_UTILIZATION
        roomy = share_left(card - math.ceil(servers * ROOM_ASIDE * aside), card=card, servers=servers)
        room = aside == 0 or taken <= roomy
        fits = least <= taken * card and (room or not must)
        largest = roomy if least <= roomy * card else None
        return CardUse(card, trainer, 0, least, fits, share, by_host=not room and not must, room_share=largest)
    servers = servers_on_card(config, devices=planned.devices)
    aside *= servers
    share = chosen_share(config, card=card, trainer=held, least=least, devices=planned.devices, aside=aside)
    engine = servers * (least if share is None else round(share * card) + ENGINE_GRAPHS_BYTES)
    fits = servers * least <= engine
    if sleeps(config):
        engine = max(resting + engine - trainer, servers * (CONTEXT_BYTES + ENGINE_GRAPHS_BYTES))
    # An engine that measures free memory does so before the first step, when training has not allocated its own yet.
    room = must or trainer + engine + aside <= card
    return CardUse(card, trainer, engine, servers * least, fits, share, aside if room else 0, not room)


def decide_activations(config: LachesisConfig, *, card_gb: float, devices: int = 1) -> LachesisConfig:
    """Return the configuration with ``model.activations`` resolved for such a card.

    ``auto`` becomes the first kind that fits, or the one that needs the least.
    """
    if config.model.kept_activations != "auto":
        return config
    for which in ("keep", *SPARING):
        config = config.model_copy(update={"model": config.model.model_copy(update={"activations": which})})
        planned = plan(config, device="cuda", devices=devices)
        if planned.shape is None:
            break
        use = card_use(config, planned, card_gb=card_gb)
        if use.total <= use.card:  # whether an engine fits on a card of its own is no matter of the trainer's
            break
    return config


def process_bytes(planned: Plan, *places: Place) -> int:
    """Return the bytes of a card that the process with these tensors holds at the worst moment of a step."""
    gathered = sum(part.bytes for part in planned.memory if part.name == GATHERED)
    return planned.peak(*places) + FRAGMENTS_BYTES + gathered + CONTEXT_BYTES


def engine_least(config: LachesisConfig, planned: Plan) -> int:
    """Return the least bytes a server needs: weights, a cache for a few sequences, workspace, graphs, context."""
    held = max(sum(part.bytes for part in planned.memory if part.place == "engine" and part.name == "weights"), 0)
    cache = sum(part.bytes for part in planned.memory if part.name == "KV cache")
    sequences = max(1, planned.lengths.in_flight // planned.lengths.longest)
    served = held + cache * min(_SEQUENCES, sequences) // sequences + CONTEXT_BYTES
    return served + (0 if config.engine.kind == "embedded_server" else ENGINE_WORKSPACE_BYTES + ENGINE_GRAPHS_BYTES)


def beside_trainer(config: LachesisConfig) -> bool:
    """Return True if a server is on the card of the trainer."""
    if config.engine.kind == "vllm":
        return config.engine.devices is None or config.shares_weights
    return config.engine.kind == "embedded_server" or config.shares_weights


def servers_on_card(config: LachesisConfig, *, devices: int) -> int:
    """Return how many servers of the engine are on the trainer's card, which is one of ``devices``."""
    return config.engine.servers_on_card(devices=devices) if config.engine.kind == "vllm" else 1


def share_left(left: int, *, card: int, servers: int) -> float:
    """Return the share of a card for each server, if they have ``left`` bytes together, in whole hundredths."""
    return math.floor((left - servers * ENGINE_GRAPHS_BYTES) / card / servers * 100) / 100


def chosen_share(
    config: LachesisConfig, *, card: int, trainer: int, least: int, devices: int, aside: int = 0
) -> float | None:
    """Return the share of a card that each vLLM server of this run takes; None if the run starts none.

    If none is set servers on a card of their own have 0.9 of it together. Beside the trainer all have 0.45 together
    where both fit with that, else what the trainer leaves, in whole hundredths, where that is enough for the engine;
    sizes are in bytes, ``trainer`` what it holds while the engine has its share, ``least`` what each server needs,
    ``aside`` what all of them keep of an update besides, for which room is left if that can be, as for what plan does
    not count. The trainer takes ``devices``, of which the card is one.
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
