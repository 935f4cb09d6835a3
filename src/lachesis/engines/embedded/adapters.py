"""Check for a peft adapter on a model that does not import peft: with bitsandbytes the import takes a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from peft import PeftModel


def is_adapted(model: object) -> TypeIs[PeftModel]:
    """Return True if ``model`` is a PeftModel; without importing peft, since nothing is one before peft is imported."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel  # waits, where another thread is at it

    return isinstance(model, PeftModel)
