"""A check for peft models without importing peft, which takes a second with bitsandbytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from peft import PeftModel


def is_adapted(model: object) -> TypeIs[PeftModel]:
    """Return True if ``model`` is a PeftModel. No model can be one before peft is imported."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel  # waits if another thread is importing it

    return isinstance(model, PeftModel)
