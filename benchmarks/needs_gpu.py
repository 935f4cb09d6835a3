"""What scripts that measure a GPU say where there is none."""

from __future__ import annotations

import sys

import torch


def require_gpu(*, tiny: bool) -> None:
    """End the program with a sentence, unless there is a GPU or only ``--tiny`` is asked for."""
    if not tiny and not torch.cuda.is_available():
        sys.exit(
            "this measures a GPU, and torch sees none here; --tiny runs the same code on a CPU, to see that it runs"
        )
