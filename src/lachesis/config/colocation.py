"""Colocation: an engine on the GPUs of all ranks, and the cards that those are."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.config.schema import LachesisConfig, VllmEngineConfig


def engine_workers(engine: VllmEngineConfig) -> int:
    """Return the number of GPUs that the engine takes: those of one copy of the model, times the copies."""
    return engine.data_parallel_size * engine.tensor_parallel_size


def is_colocated(config: LachesisConfig, *, ranks: int) -> bool:
    """Return True if the run's engine is on the GPUs of the ranks, with one worker beside each rank.

    That is so if ``engine.devices`` is unset; an engine on a single GPU is beside rank 0 alone and does not count.
    """
    engine = config.engine
    return ranks > 1 and engine.kind == "vllm" and engine.devices is None and engine_workers(engine) > 1


def rank_cards(environment: Mapping[str, str], *, ranks: int) -> list[str]:
    """Return the cards of this machine's first ``ranks`` ranks, in order, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return [*map(str, range(ranks))] if visible is None else [card.strip() for card in visible.split(",")][:ranks]
