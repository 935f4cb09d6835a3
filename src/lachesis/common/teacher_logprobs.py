"""A completion's logprobs under a teacher outside the trainer. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class TeacherLogprobs:
    """Up to K tokens that the teacher finds likeliest at each of the T tokens of a completion.

    Attributes:
        ids: int32 [T, K], the likeliest first; -1 if the teacher named fewer.
        logprobs: float32 [T, K] of these, in nats.
        sampled: float32 [T], of the completion's own tokens; NaN where unknown.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    sampled: np.ndarray

    def encoded(self) -> dict[str, Any]:
        """Return the record as JSON-safe values."""
        sampled = [None if math.isnan(value) else value for value in self.sampled.tolist()]
        return {"ids": self.ids.tolist(), "logprobs": self.logprobs.tolist(), "sampled": sampled}

    @classmethod
    def decoded(cls, fields: Mapping[str, Any]) -> TeacherLogprobs:
        """Return the record that :meth:`encoded` encoded."""
        tokens = len(fields["sampled"])
        return cls(
            ids=np.array(fields["ids"], dtype=np.int32).reshape(tokens, -1),
            logprobs=np.array(fields["logprobs"], dtype=np.float32).reshape(tokens, -1),
            sampled=np.array(fields["sampled"], dtype=np.float32),
        )


def teacher_logprobs(
    tops: Sequence[Mapping[int, float]], tokens: Sequence[int], *, top_k: int | None = None
) -> TeacherLogprobs:
    """Make the record from a teacher's maps of token ids to logprobs.

    Args:
        tops: a map for each token of the completion, [T]; empty if the teacher gave none for it.
        tokens: the completion's token ids, [T].
        top_k: number of likeliest tokens to keep at each place; 0 keeps none, unset all.
    """
    rows = [sorted(top.items(), key=lambda entry: (-entry[1], entry[0]))[:top_k] for top in tops]
    width = max(map(len, rows), default=0)
    ids = np.full((len(rows), width), NO_TOKEN, dtype=np.int32)
    logprobs = np.zeros((len(rows), width), dtype=np.float32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = [token for token, _ in row]
        logprobs[place, : len(row)] = [value for _, value in row]
    own = [top.get(token, np.nan) for top, token in zip(tops, tokens, strict=True)]
    return TeacherLogprobs(ids, logprobs, np.array(own, dtype=np.float32))
