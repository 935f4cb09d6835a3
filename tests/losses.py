"""Options of the loss as the tests of the trainer have them."""

from __future__ import annotations

from typing import Any

from lachesis.config.schema import AlgorithmConfig


def loss_options(**options: Any) -> AlgorithmConfig:
    """The algorithm section, with the correction for the sampler that TRL has by default."""
    return AlgorithmConfig(**{"sampler_correction": "sequence_mask", **options})
