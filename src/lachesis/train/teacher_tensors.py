"""Logprobs of a teacher outside the trainer for the predictions of a micro-batch, as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lachesis.common.teacher_logprobs import NO_TOKEN, TaughtTokens

Said: TypeAlias = tuple[TaughtTokens | None, int]
"""What was said of a completion, and of which of its tokens; ``None`` where nothing was."""


def taught_tensors(said_of: Sequence[Said]) -> dict[str, Tensor]:
    """Return ``taught_ids``, ``taught_logprobs`` [M, K] and ``taught_sampled`` [M]; empty without teacher logprobs.

    K is that of the completion with the most candidates.
    """
    places: dict[int, list[int]] = {}
    records: dict[int, TaughtTokens] = {}
    for number, (taught, _) in enumerate(said_of):
        if taught is not None:
            records[id(taught)] = taught
            places.setdefault(id(taught), []).append(number)
    if not records:
        return {}
    width = max(taught.ids.shape[1] for taught in records.values())
    ids = torch.full((len(said_of), width), NO_TOKEN, dtype=torch.int64)
    logprobs, sampled = torch.zeros(len(said_of), width), torch.full((len(said_of),), math.nan)
    for key, taught in records.items():
        rows = places[key]
        which, known = [said_of[number][1] for number in rows], taught.ids.shape[1]
        ids[rows, :known] = torch.from_numpy(taught.ids[which].astype("int64"))
        logprobs[rows, :known] = torch.from_numpy(taught.logprobs[which])
        sampled[rows] = torch.from_numpy(taught.sampled[which])
    return {"taught_ids": ids, "taught_logprobs": logprobs, "taught_sampled": sampled}
