"""The environments of this package, by name."""

from __future__ import annotations

from typing import Any

from lachesis.environments.arithmetic import Arithmetic
from lachesis.environments.base import Environment
from lachesis.environments.calculator import Calculator
from lachesis.environments.gsm8k import Gsm8k

SHIPPED: dict[str, type[Environment[Any, Any]]] = {kind.name: kind for kind in (Arithmetic, Calculator, Gsm8k)}
