"""Settings of a run whose prompts have images, and the settings that it refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Prompt
from lachesis.config.schema import LachesisConfig, LocalSourceConfig

logger = logging.getLogger(__name__)

# Fields of configurations with the tokens that stand for images and videos.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def settle(config: LachesisConfig, prompts: Sequence[Prompt], *, ranks: int) -> LachesisConfig:
    """Return the configuration with ``model.vision`` set: the vision tower is frozen by default.

    Args:
        config: of the run.
        prompts: of training and evaluation.
        ranks: that train together.

    Raises:
        ConfigError: a part of it does not support images.
    """
    shown = [prompt.images for prompt in prompts if prompt.images is not None]
    for what, remedy in _refusals(config, ranks=ranks):
        raise ConfigError(f"{'prompts have images' if shown else 'model.vision is set'}, and {what}", remedy=remedy)
    held = sum(value.nbytes for one in shown for value in one.inputs.values())
    logger.info("%d of %d prompts have images, whose inputs take %.0f MB", len(shown), len(prompts), held / 1e6)
    vision = config.model.vision or "frozen"
    return config.model_copy(update={"model": config.model.model_copy(update={"vision": vision})})


def _refusals(config: LachesisConfig, *, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield each part that does not support images, and a remedy."""
    model, source = config.model, config.source
    if config.engine.kind not in ("embedded", "vllm", "http"):
        yield f"engine.kind is {config.engine.kind}, which takes no images", "set engine.kind: embedded or vllm"
    if config.sources:
        yield "sources mixes several sources, which do not support images", "train on one, with the section source"
    elif not isinstance(source, LocalSourceConfig):
        yield f"source.kind is {source.kind}, which does not support images", "set source.kind: local"
    elif source.rollout_func is not None:
        yield "source.rollout_func plays turns, which do not support images", "remove source.rollout_func"
    if ranks > 1:
        yield f"{ranks} ranks train together, which do not pass images on", "start it with torchrun --nproc-per-node 1"
    if config.algorithm.teacher is not None:
        yield "algorithm.teacher takes only text", "remove algorithm.teacher"
    if config.algorithm.router_replay:
        yield "algorithm.router_replay supports only text", "set algorithm.router_replay: false"
    if config.sft_steps:
        yield "the supervised start (run.stages, sft) supports only text", "remove it"
    if model.packing == "packed":
        yield "model.packing is packed, but images need a row for each sequence", "remove model.packing"
    if model.vision == "trained" and config.adapter.kind != "none":
        yield "model.vision is trained, but adapters exclude it", "set model.vision: frozen, or adapter.kind: none"
    if model.vision == "trained" and model.train_layers is not None:
        yield "model.vision is trained, but model.train_layers trains only decoder layers", "remove one of the two"


def placeholders(config: Any) -> tuple[int, ...]:
    """Return the tokens of a model's configuration that stand for images and videos.

    A completion that samples one ends with it: as an input it would need an image that does not exist.
    """
    found = [getattr(config, name, None) for name in _PLACEHOLDERS]
    return tuple(sorted({one for one in found if isinstance(one, int)}))
