"""The environments of this package, by name."""

from __future__ import annotations

from typing import Any

from lachesis.environments.base import Environment
from lachesis.environments.shipped.arithmetic import Arithmetic
from lachesis.environments.shipped.calculator import Calculator
from lachesis.environments.shipped.gsm8k import Gsm8k

SHIPPED: dict[str, type[Environment[Any, Any]]] = {kind.name: kind for kind in (Arithmetic, Calculator, Gsm8k)}
