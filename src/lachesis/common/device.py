"""Which device a name of the configuration means."""

from __future__ import annotations

import torch

from lachesis.common.errors import ModelError


def resolve_device(device: str) -> torch.device:
    """``auto`` is the current GPU where there is one.

    Raises:
        ModelError: a GPU was asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device is cuda, but torch sees no GPU",
            remedy="set model.device: auto, or install a torch build for your GPU (lachesis doctor tells more)",
        )
    use_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
