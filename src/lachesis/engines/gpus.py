"""GPUs of the run's engine and of each of its servers: apart from the trainer's, or those of its ranks."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.common.world import world_size
from lachesis.config.schema import LachesisConfig, VllmEngineConfig


def engine_workers(engine: VllmEngineConfig) -> int:
    """Return the number of GPUs that the engine needs: GPUs per copy of the model, times copies."""
    return engine.data_parallel_size * engine.tensor_parallel_size


def is_colocated(config: LachesisConfig, *, ranks: int) -> bool:
    """Return True if the run's engine shares the ranks' GPUs, with one worker beside each rank.

    This requires ``engine.devices`` to be unset. An engine on a single GPU shares only rank 0's and does not count.
    """
    engine = config.engine
    return ranks > 1 and engine.kind == "vllm" and engine.devices is None and engine_workers(engine) > 1


def rank_cards(environment: Mapping[str, str], *, ranks: int) -> list[str]:
    """Return the GPUs of this machine's first ``ranks`` ranks, in order, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return [*map(str, range(ranks))] if visible is None else [card.strip() for card in visible.split(",")][:ranks]


def with_devices(config: LachesisConfig, *, environment: Mapping[str, str]) -> LachesisConfig:
    """Set ``engine.devices`` to the ranks' cards if the engine is on them, so that each copy gets its own."""
    ranks = world_size(environment)
    if config.engine.kind != "vllm" or not is_colocated(config, ranks=ranks):
        return config
    cards = ",".join(rank_cards(environment, ranks=ranks))
    return config.model_copy(update={"engine": config.engine.model_copy(update={"devices": cards})})


def server_environment(config: LachesisConfig, *, number: int) -> dict[str, str]:
    """Return the environment of a server by number, with its share of the GPUs in ``engine.devices``."""
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig) or engine.devices is None:
        return {}
    devices, size = engine.devices.split(","), engine.tensor_parallel_size
    own = devices if engine.data_parallel_size == 1 else devices[number * size : (number + 1) * size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
