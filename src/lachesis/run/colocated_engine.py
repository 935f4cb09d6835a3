"""Defaults for a vLLM server on the trainer's card: its share of the memory, and the staging of updates."""

from __future__ import annotations

import logging
import os

import torch

from lachesis.common.device import resolve_device
from lachesis.common.errors import ConfigError
from lachesis.common.world import world_size
from lachesis.config.schema import LachesisConfig, VllmEngineConfig
from lachesis.engines.gpus import is_colocated
from lachesis.plan.cards import GB, card_use, process_bytes
from lachesis.plan.memory import sleeps
from lachesis.plan.plan import plan
from lachesis.plan.shapes import find_shape

logger = logging.getLogger("lachesis")


def with_share(config: LachesisConfig) -> LachesisConfig:
    """Set ``engine.gpu_memory_utilization`` if it is unset and the server is on the trainer's GPU.

    Raises:
        ConfigError: as :func:`require_room`.
    """
    engine, card = config.engine, _shared_card(config)
    if engine.kind != "vllm" or card is None:
        return config
    ranks = world_size(os.environ)
    if is_colocated(config, ranks=ranks):
        require_room(config, card_bytes=card, ranks=ranks)
    if engine.gpu_memory_utilization is not None:
        return config
    share = share_beside_trainer(config, card_bytes=card, devices=ranks)
    return config.model_copy(update={"engine": engine.model_copy(update={"gpu_memory_utilization": share})})


def with_room_aside(config: LachesisConfig) -> LachesisConfig:
    """Apply :func:`with_staging` if the server is on the trainer's GPU."""
    card = _shared_card(config)
    return config if card is None else with_staging(config, card_bytes=card, devices=world_size(os.environ))


def _shared_card(config: LachesisConfig) -> int | None:
    """Return the bytes of the GPU that trainer and server share; None if they do not share one."""
    engine = config.engine
    if engine.kind != "vllm" or engine.devices is not None or resolve_device(config.model.device).type != "cuda":
        return None
    return torch.cuda.get_device_properties(0).total_memory


def with_staging(config: LachesisConfig, *, card_bytes: int, devices: int = 1) -> LachesisConfig:
    """Set ``bridge.staging: host``, with a warning, if it is ``auto`` and ``plan`` counts no room on the card.

    The engine would look for room at the first update, before the trainer has taken what it trains with.
    """
    bridge, found = config.bridge, find_shape(config.model.path, revision=config.model.revision)
    if bridge.kind != "broadcast" or bridge.staging != "auto" or found is None:
        return config
    use = card_use(config, plan(config, device="cuda", devices=devices, found=found), card_gb=card_bytes / GB)
    if not use.by_host:
        return config
    logger.warning(
        "[ENGINE] each weight update waits in the host's memory (bridge.staging), which takes seconds: of the GPU's "
        "%.1f GB the trainer needs %.1f and the engine %.1f, as lachesis plan counts; lower "
        "engine.gpu_memory_utilization to make room, or set bridge.staging: device to use the GPU anyway",
        card_bytes / GB, use.trainer / GB, use.engine / GB,
    )  # fmt: skip
    return config.model_copy(update={"bridge": bridge.model_copy(update={"staging": "host"})})


def require_room(config: LachesisConfig, *, card_bytes: int, ranks: int) -> None:
    """Raise if an engine on the GPUs of the ranks does not fit beside them, as ``plan`` counts.

    If a share was given, or the engine sleeps, this is only a warning, because ``plan`` may count too much.

    Raises:
        ConfigError: the engine does not fit, and would hold its share while the ranks train.
    """
    found = find_shape(config.model.path, revision=config.model.revision)
    if found is None or config.engine.kind != "vllm":
        return
    use = card_use(config, plan(config, device="cuda", devices=ranks, found=found), card_gb=card_bytes / GB)
    if use.fits:
        return
    words = (
        f"each of {ranks} ranks takes {use.trainer / GB:.1f} GB of its GPU while it trains, and vLLM takes "
        f"{(use.engine + use.aside) / GB:.1f} GB beside it (it needs at least {use.engine_least / GB:.1f} GB"
        f"{f', and keeps {use.aside / GB:.1f} GB for updates' if use.aside else ''}), but the GPU has only "
        f"{use.card / GB:.1f} GB"
    )
    if not sleeps(config) and config.engine.gpu_memory_utilization is None:
        raise ConfigError(
            words, remedy="set engine.enable_sleep_mode: true, or give the engine separate GPUs (engine.devices)"
        )
    logger.warning(
        "%s; use more GPUs, or set model.activations: recompute, or distributed.cpu_offload: true, which keeps weights "
        "and optimizer states off the GPUs",
        words,
    )


def share_beside_trainer(config: LachesisConfig, *, card_bytes: int, devices: int = 1) -> float:
    """Return the usual share if it fits as ``plan`` counts; else the share that the trainer leaves, and log it.

    ``devices`` train together, and the server is beside the first. Several servers on one card divide the usual
    share.
    """
    engine, found = config.engine, find_shape(config.model.path, revision=config.model.revision)
    assert isinstance(engine, VllmEngineConfig), "no other engine has a share"
    usual = engine.usual_share(devices=devices)
    if found is None:
        return usual
    planned = plan(config, device="cuda", devices=devices, found=found)
    share = card_use(config, planned, card_gb=card_bytes / GB).share or usual
    if share != usual:
        logger.info(
            "[ENGINE] vLLM gets %.2f of the GPU (engine.gpu_memory_utilization): the trainer needs %.1f of its %.1f GB",
            share, process_bytes(planned, "trainer") / GB, card_bytes / GB,
        )  # fmt: skip
    return share
