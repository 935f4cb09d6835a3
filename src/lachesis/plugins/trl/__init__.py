"""TRL's ``GRPOTrainer`` and ``RLOOTrainer`` on Lachesis: a script changes only its import.

``from lachesis.trl import GRPOConfig, GRPOTrainer``, or ``RLOOConfig, RLOOTrainer``. Other names (``TrlParser``,
``get_peft_config``) come from TRL, if it is installed.
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
        # Python would replace an AttributeError's message with "cannot import name".
        raise ImportError(f"{name} belongs to TRL, which is not installed -> pip install trl") from error
