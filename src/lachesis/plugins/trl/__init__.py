"""TRL's ``GRPOTrainer`` and ``RLOOTrainer`` on Lachesis: a script changes its import, and nothing else.

``from lachesis.trl import GRPOConfig, GRPOTrainer``, or ``RLOOConfig, RLOOTrainer``.
"""

from __future__ import annotations

from lachesis.plugins.trl.arguments import GRPOConfig, RLOOConfig
from lachesis.plugins.trl.trainer import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"]
