"""What ``model.activations: auto`` is on the GPU of this run."""

from __future__ import annotations

import logging

import torch

from lachesis.common.device import resolve_device
from lachesis.config.schema import LachesisConfig
from lachesis.plan.cards import GB, decide_activations

logger = logging.getLogger("lachesis")


def with_activations(config: LachesisConfig, *, devices: int) -> LachesisConfig:
    """With ``model.activations`` decided, which is said; ``devices`` train together."""
    if config.model.kept_activations != "auto":
        return config
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return config.model_copy(update={"model": config.model.model_copy(update={"activations": "keep"})})
    card_gb = torch.cuda.get_device_properties(device).total_memory / GB
    decided = decide_activations(config, card_gb=card_gb, devices=devices)
    logger.info("[TRAIN] model.activations auto is %s on %.0f GB", decided.model.activations, card_gb)
    return decided
