"""Tensors of the experts that engines used for the inputs of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lachesis.common.errors import TrainingError
from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import Group

UNKNOWN = -1


class Stretch(NamedTuple):
    """Inputs ``start`` to ``stop`` of a sequence, and the experts of all of its inputs if they are known."""

    routed: RoutedExperts | None
    start: int
    stop: int


def routed_tensor(stretches: Sequence[Stretch]) -> Tensor | None:
    """Return the experts of the inputs, int16 [T, L, K], -1 where unknown; ``None`` if all are.

    Raises:
        TrainingError: sequences have experts of different models.
    """
    shapes = {stretch.routed.chosen.shape[1:] for stretch in stretches if stretch.routed is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise TrainingError(
            f"routed experts of one batch differ in layers and experts: {' and '.join(map(str, sorted(shapes)))}",
            remedy="let all engines serve the same model",
        )
    (shape,) = shapes
    rows = np.full((sum(stop - start for _, start, stop in stretches), *shape), UNKNOWN, dtype=np.int16)
    place = 0
    for routed, start, stop in stretches:
        if routed is not None:
            rows[place : place + stop - start] = routed.chosen[start:stop]
        place += stop - start
    return torch.from_numpy(rows)


def require_routed(groups: Sequence[Group]) -> None:
    """Raise TrainingError if a sample lacks its experts."""
    missing = sum(sample.routed is None for group in groups for sample in group.samples)
    if missing:
        raise TrainingError(
            f"algorithm.router_replay is on, but {missing} of {sum(len(group.samples) for group in groups)} samples "
            "lack the experts with which they were sampled",
            remedy="use an engine that reports them (vllm with --enable-return-routed-experts, embedded or "
            "embedded_server), or set algorithm.router_replay: false",
        )
