"""Settings of a run whose prompts have images, and the settings that it refuses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lachesis.common.types import Prompt
from lachesis.config.rules.table import refuse
from lachesis.config.schema import LachesisConfig

logger = logging.getLogger(__name__)

_REFUSALS = Path(__file__).with_name("refusals.toml")
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
    why = "prompts have images" if shown else "model.vision is set"
    refuse(_REFUSALS, "images", config, ranks=ranks, why=why)
    held = sum(value.nbytes for one in shown for value in one.inputs.values())
    logger.info("%d of %d prompts have images, whose inputs take %.0f MB", len(shown), len(prompts), held / 1e6)
    vision = config.model.vision or "frozen"
    return config.model_copy(update={"model": config.model.model_copy(update={"vision": vision})})


def placeholders(config: Any) -> tuple[int, ...]:
    """Return the tokens of a model's configuration that stand for images and videos.

    A completion that samples one ends with it: as an input it would need an image that does not exist.
    """
    found = [getattr(config, name, None) for name in _PLACEHOLDERS]
    return tuple(sorted({one for one in found if isinstance(one, int)}))
