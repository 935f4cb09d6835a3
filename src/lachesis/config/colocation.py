"""An engine on the GPUs of all ranks: which configuration that is, and which cards they are."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.config.schema import LachesisConfig, VllmEngineConfig


def engine_workers(engine: VllmEngineConfig) -> int:
    """How many GPUs the engine takes: each copy of the model as many as hold it."""
    return engine.data_parallel_size * engine.tensor_parallel_size


def is_colocated(config: LachesisConfig, *, ranks: int) -> bool:
    """Whether the run's engine is on the GPUs of the ranks, each of which has a worker of it beside it.

    It is on their GPUs without ``engine.devices``; one that takes a single GPU is beside rank 0 alone.
    """
    engine = config.engine
    return ranks > 1 and engine.kind == "vllm" and engine.devices is None and engine_workers(engine) > 1


def rank_cards(environment: Mapping[str, str], *, ranks: int) -> list[str]:
    """The cards of so many ranks of this machine, in order, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return [*map(str, range(ranks))] if visible is None else [card.strip() for card in visible.split(",")][:ranks]
