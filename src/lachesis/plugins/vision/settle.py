"""Settings of a run whose prompts have images, and what it refuses."""

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
    """Return the configuration with ``model.vision`` set: the tower is frozen if nothing else is said.

    Args:
        config: of the run.
        prompts: of training and evaluation.
        ranks: that train together.

    Raises:
        ConfigError: something in it does not take images.
    """
    for what, remedy in _refusals(config, ranks=ranks):
        raise ConfigError(f"prompts have images, and {what}", remedy=remedy)
    shown = [prompt.images for prompt in prompts if prompt.images is not None]
    held = sum(value.nbytes for one in shown for value in one.inputs.values())
    logger.info("%d of %d prompts have images, whose inputs take %.0f MiB", len(shown), len(prompts), held / 2**20)
    vision = config.model.vision or "frozen"
    return config.model_copy(update={"model": config.model.model_copy(update={"vision": vision})})


def _refusals(config: LachesisConfig, *, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield what does not take images, and what to do."""
    model, source = config.model, config.source
    if config.engine.kind not in ("embedded", "vllm", "http"):
        yield f"engine.kind is {config.engine.kind}, which is not sent any", "set engine.kind: embedded or vllm"
    if config.sources:
        yield "several sources are mixed (sources), which do not show them", "train on one, by source"
    elif not isinstance(source, LocalSourceConfig):
        yield f"source.kind is {source.kind}, which does not show them", "set source.kind: local"
    elif source.tools or source.rollout_func is not None:
        key = "source.tools" if source.tools else "source.rollout_func"
        yield f"{key} plays turns, which do not show them", f"remove {key}"
    if ranks > 1:
        yield f"{ranks} ranks train together, which do not hand them on", "train on one device"
    if config.algorithm.teacher is not None:
        yield "algorithm.teacher is shown text alone", "remove algorithm.teacher"
    if config.algorithm.router_replay:
        yield "algorithm.router_replay follows text alone", "set algorithm.router_replay: false"
    if config.sft_steps:
        yield "the supervised start (run.stages, sft) is of text alone", "remove it"
    if model.packing == "packed":
        yield "model.packing is packed, where they need a row for each sequence", "remove model.packing"
    if model.vision == "trained" and config.adapter.kind != "none":
        yield "model.vision is trained, which an adapter does not do", "set model.vision: frozen, or adapter.kind: none"
    if model.vision == "trained" and model.train_layers is not None:
        yield "model.vision is trained, and model.train_layers trains decoder layers alone", "remove one of the two"


def placeholders(config: Any) -> tuple[int, ...]:
    """Return the tokens of a model's configuration that stand for images and videos.

    A completion ends with one that it samples: as an input it would ask for an image that is not there.
    """
    found = [getattr(config, name, None) for name in _PLACEHOLDERS]
    return tuple(sorted({one for one in found if isinstance(one, int)}))
