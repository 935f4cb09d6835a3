"""Record of a prompt's images as a model takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt as its model's processor made them, once for the engine and for training.

    ``inputs`` holds numpy arrays by the name of the model's argument, such as ``pixel_values`` and ``image_grid_thw``.
    ``token_types`` holds, by argument too, a number for each token of the prompt, such as ``mm_token_type_ids``.
    """

    inputs: Mapping[str, Any]
    token_types: Mapping[str, Any] = field(default_factory=dict)
