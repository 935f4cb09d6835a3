"""Which GPUs a process of a run measures: its own, and those of the servers that it starts on its machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lachesis.config.schema import EmbeddedServerConfig, LachesisConfig, VllmEngineConfig

if TYPE_CHECKING:
    from lachesis.metrics.gpu_meter import GpuMeter

logger = logging.getLogger("lachesis")


def run_meter(config: LachesisConfig, device: torch.device) -> GpuMeter | None:
    """Of the trainer's device and of its engine's; None without a GPU. Close it."""
    visible = [_name(number) for number in range(torch.cuda.device_count())] if device.type == "cuda" else []
    own = [] if device.index is None or not visible else [visible[device.index]]
    return gpu_meter([*own, *_engine_gpus(config, visible)])


def gpu_meter(gpus: Sequence[str], *, machine: str = "") -> GpuMeter | None:
    """A meter of these, named as in ``CUDA_VISIBLE_DEVICES``; None without any, or where nothing is known of them."""
    if not gpus:
        return None
    try:
        from lachesis.metrics.gpu_meter import open_meter  # only runs on a GPU need what it imports
    except ImportError as error:
        logger.warning("what GPUs do is not measured (%s); pip install nvidia-ml-py", error)
        return None
    return open_meter(gpus, machine=machine)


def rank_meter(device: torch.device, *, machine: str) -> GpuMeter | None:
    """Of a follower's own device alone."""
    return gpu_meter([_name(device.index)] if device.type == "cuda" else [], machine=machine)


def _engine_gpus(config: LachesisConfig, visible: Sequence[str]) -> Sequence[str]:
    """Of the servers that the run starts; without ``engine.devices`` each sees what the trainer sees."""
    engine = config.engine
    if isinstance(engine, VllmEngineConfig):
        if engine.devices is not None:
            return [gpu.strip() for gpu in engine.devices.split(",")]
        return visible[: engine.tensor_parallel_size]
    return visible[:1] if isinstance(engine, EmbeddedServerConfig) else ()


def _name(number: int) -> str:
    """That of torch's device of this number, which counts the visible ones only."""
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"
