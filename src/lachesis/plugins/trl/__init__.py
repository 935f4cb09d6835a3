"""TRL's ``GRPOTrainer`` and ``RLOOTrainer`` on Lachesis: a script changes its import, and nothing else.

``from lachesis.trl import GRPOConfig, GRPOTrainer``, or ``RLOOConfig, RLOOTrainer``. Other names (``TrlParser``,
``get_peft_config``) are TRL's own, where it is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lachesis.plugins.trl.arguments import GRPOConfig, RLOOConfig
from lachesis.plugins.trl.trainer import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"]


def __getattr__(name: str) -> Any:
    """Return a name that a script imports along with the trainer."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("trl"), name)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        # An AttributeError would lose its words: Python says "cannot import name" in its place.
        raise ImportError(f"{name} is TRL's own, and TRL is not installed -> pip install trl") from error
