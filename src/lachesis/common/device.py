"""The torch device that a name in the configuration means."""

from __future__ import annotations

import torch

from lachesis.common.errors import ModelError


def resolve_device(device: str) -> torch.device:
    """Return the torch device of a name; ``auto`` is the current GPU if there is one, else the CPU.

    Raises:
        ModelError: the name is ``cuda``, and torch sees no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device is cuda, but torch sees no GPU",
            remedy="set model.device: auto, or install a torch build for your GPU (see lachesis doctor)",
        )
    use_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
