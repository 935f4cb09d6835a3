"""The course of the learning rate: a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def warmup_length(*, steps: int, ratio: float, total_steps: int) -> int:
    """Steps of warm-up: ``ratio`` of all of them, rounded up, or ``steps`` where no ratio is given."""
    return math.ceil(round(ratio * total_steps, 9)) if ratio else steps


def schedule_factor(
    step: int, *, schedule: Schedule, total_steps: int, warmup_steps: int = 0, min_lr_ratio: float = 0.0
) -> float:
    """The factor on the peak learning rate at the ``step``-th optimizer step, counted from 0.

    Warm-up is linear: ``(step + 1) / warmup_steps``, so that the first step already learns. After it,
    ``linear`` and ``cosine`` fall from 1 to ``min_lr_ratio``, which is reached right after the last step
    (``step == total_steps``), so that no step is spent at a rate of 0. ``cosine`` is half a period, as in
    Loshchilov & Hutter, "SGDR" (2017), eq. 5, without restarts.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining
