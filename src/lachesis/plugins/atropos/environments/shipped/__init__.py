"""The environments of this package by name: a new one is a file here and a row in ``SHIPPED``."""

from __future__ import annotations

from typing import Any

from lachesis.plugins.atropos.environments.base import Environment
from lachesis.plugins.atropos.environments.shipped.arithmetic import Arithmetic
from lachesis.plugins.atropos.environments.shipped.gsm8k import Gsm8k
from lachesis.plugins.atropos.environments.shipped.reasoning_gym import ReasoningGym

SHIPPED: dict[str, type[Environment[Any, Any]]] = {
    "arithmetic": Arithmetic,
    "gsm8k": Gsm8k,
    "reasoning_gym": ReasoningGym,
}
