"""Fit of a plan on a card, with each process's memory besides its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lachesis.config.schema import OWN_GPU_UTILIZATION, SPARING, LachesisConfig
from lachesis.plan.gpu_share import ENGINE_GRAPHS_BYTES, beside_trainer, chosen_share, servers_on_card, share_left
from lachesis.plan.memory import GATHERED, Place, kept_aside_bytes, must_keep_aside, sleeps
from lachesis.plan.plan import Plan, plan

GB = 10**9
# Sizes of common cards by their vendors' names. Cards have a little more memory, which the driver takes.
CARDS = (24, 40, 48, 80, 141)
# CUDA's context of a process with its libraries: 0.55 GB on an H200 (benchmarks/raw/memory.json).
CONTEXT_BYTES = 6 * 10**8
# The allocator's memory beyond the tensors' peak, from fragmentation: 0.3 to 2.1 GB on an H200, whatever the model's
# size (benchmarks/raw/memory.json). Several ranks also need the size of gathered weights again, as these come and go:
# 1.8 to 5.5 GB on two H100s (benchmarks/raw/memory_two_gpus*.json).
FRAGMENTS_BYTES = 10**9
# Memory of a vLLM server's share besides weights and cache: the workspace of a full prefill, and memory outside torch.
# With 8B on an H200 1.3 GiB, with 1.3 billion parameters 0.7 (benchmarks/RESULTS.md, "What a vLLM server takes beside
# its weights").
ENGINE_WORKSPACE_BYTES = 3 * 2**29
# As in lachesis.engines.receiver: an update is kept on the GPU if this many times its bytes are free.
ROOM_ASIDE = 1.1
# Largest error of a plan in 102 measured steps (benchmarks/RESULTS.md), as a part of the trainer's memory.
PLAN_ERROR = 0.066
TIGHT = f"fits, but tight (plans have been up to {PLAN_ERROR:.1%} off)"
# Sequences that a useful server's cache holds at a time; more are served in turn.
_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class CardUse:
    """Bytes used of one of the trainer's cards, and whether they fit.

    ``engine`` is for servers on the trainer's card, 0 if there are none; ``engine_least`` is the least that is enough.
    ``engine_fits`` is true if an engine fits on its own card, if it has one. ``share`` is each vLLM server's share, if
    there is one. ``aside`` is for the part of an update that servers on the trainer's card keep beyond their share;
    ``by_host`` is true if their card, this one or their own, has no room for it, so that updates are staged in host
    memory. ``room_share`` is the largest share of an engine's own card that leaves room for it, if that is enough for
    the engine.
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

    @property
    def roomy(self) -> bool:
        """True if the card also holds as much more for the trainer as plans have been wrong."""
        return self.total + PLAN_ERROR * self.trainer <= self.card

    @property
    def tight(self) -> bool:
        """True if it fits, but not if the trainer needs as much more as plans have been wrong."""
        return self.fits and not self.roomy


def card_use(config: LachesisConfig, planned: Plan, *, card_gb: float) -> CardUse:
    """Return the use of a card of ``card_gb`` times 10^9 bytes by trainer and engine; ``planned`` is for ``cuda``."""
    card, least = round(card_gb * GB), engine_least(config, planned)
    if config.engine.place == "trainer":  # one process: the cache exists while it generates
        return CardUse(card, process_bytes(planned, "trainer", "engine"), 0, 0, True)
    trainer = process_bytes(planned, "trainer")
    # A server that sleeps has its share only while nothing is trained, so the trainer then holds its resting memory.
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
    # An engine that measures free memory does so before the first step, when training has not allocated its memory yet.
    room = must or trainer + engine + aside <= card
    return CardUse(card, trainer, engine, servers * least, fits, share, aside if room else 0, not room)


def decide_activations(config: LachesisConfig, *, card_gb: float, devices: int = 1) -> LachesisConfig:
    """Return the configuration with ``model.activations`` resolved for such a card.

    ``auto`` becomes the first kind that fits with room for a plan's error, or the one that needs the least.
    """
    if config.model.kept_activations != "auto":
        return config
    for which in ("keep", *SPARING):
        config = config.model_copy(update={"model": config.model.model_copy(update={"activations": which})})
        planned = plan(config, device="cuda", devices=devices)
        if planned.shape is None:
            break
        if card_use(config, planned, card_gb=card_gb).roomy:  # an engine on a separate card does not matter
            break
    return config


def process_bytes(planned: Plan, *places: Place) -> int:
    """Return the bytes of a card that the process with these tensors holds at a step's peak."""
    gathered = sum(part.bytes for part in planned.memory if part.name == GATHERED)
    return planned.peak(*places) + FRAGMENTS_BYTES + gathered + CONTEXT_BYTES


def engine_least(config: LachesisConfig, planned: Plan) -> int:
    """Return the least bytes a server needs: weights, a cache for a few sequences, workspace, graphs, context."""
    held = max(sum(part.bytes for part in planned.memory if part.place == "engine" and part.name == "weights"), 0)
    cache = sum(part.bytes for part in planned.memory if part.name == "KV cache")
    sequences = max(1, planned.lengths.in_flight // planned.lengths.longest)
    served = held + cache * min(_SEQUENCES, sequences) // sequences + CONTEXT_BYTES
    return served + (0 if config.engine.kind == "embedded_server" else ENGINE_WORKSPACE_BYTES + ENGINE_GRAPHS_BYTES)
