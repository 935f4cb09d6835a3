"""GPUs that each server of a run gets."""

from __future__ import annotations

from lachesis.config.schema import LachesisConfig, VllmEngineConfig


def server_environment(config: LachesisConfig, *, number: int) -> dict[str, str]:
    """Return the environment of a server by number, with its share of the GPUs in ``engine.devices``."""
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig) or engine.devices is None:
        return {}
    devices, size = engine.devices.split(","), engine.tensor_parallel_size
    own = devices if engine.data_parallel_size == 1 else devices[number * size : (number + 1) * size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
