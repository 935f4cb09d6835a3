"""Sections of the trackers that a run may log to."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal

from pydantic import Field

from lachesis.config.section import Section

logger = logging.getLogger("lachesis.run.sinks")


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(description="Project name.")
    entity: str | None = Field(default=None, description="Account or team; the account's own default if unset.")
    group: str | None = Field(default=None, description="Group name.")
    name: str | None = Field(default=None, description="Run name; `run.name` if unset.")
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto",
        description="Mode, as in WANDB_MODE, which auto follows. If that is unset too, auto is online with a login "
        "and offline without; without the package wandb it only warns.",
    )

    def is_wanted(self) -> bool:
        """Return False, and log a warning, if mode is auto and the package wandb is not installed."""
        if self.mode != "auto" or importlib.util.find_spec("wandb") is not None:
            return True
        logger.warning(
            "nothing is logged to Weights & Biases: the package wandb is not installed (%s)",
            'pip install "lachesis[wandb]"',
        )
        return False


class TrackioConfig(Section):
    """Trackio, Hugging Face's local dashboard."""

    project: str = Field(description="Project name.")
    name: str | None = Field(default=None, description="Run name; `run.name` if unset.")
    space: str | None = Field(
        default=None, description="Hugging Face Space, as `owner/name`, for the dashboard; on this machine if unset."
    )
