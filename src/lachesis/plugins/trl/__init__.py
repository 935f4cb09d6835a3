"""TRL's ``GRPOConfig`` and ``GRPOTrainer`` on Lachesis: a script changes its import, and nothing else.

``from lachesis.trl import GRPOConfig, GRPOTrainer``
"""

from __future__ import annotations

from lachesis.plugins.trl.arguments import GRPOConfig
from lachesis.plugins.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
