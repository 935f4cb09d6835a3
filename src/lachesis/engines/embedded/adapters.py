"""Whether a model wears an adapter of peft, asked without importing peft: with bitsandbytes it takes a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from peft import PeftModel


def is_adapted(model: object) -> TypeIs[PeftModel]:
    """Return True if ``model`` is a PeftModel, which it can only be once somebody has imported peft."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel  # waits, where another thread is at it

    return isinstance(model, PeftModel)
