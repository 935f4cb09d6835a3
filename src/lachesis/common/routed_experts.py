"""Record of the experts of a mixture that a sequence's tokens used. No torch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Number of experts that a byte can count; vLLM uses the same types.
_MOST_IN_A_BYTE = 256


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts that an engine used for all tokens of a sequence except the last, which does not enter the model.

    Attributes:
        chosen: uint8 (int16 of more than 256 experts) [T, L, K]: for each of T tokens, in each of L decoder layers, the
            K experts that its router chose. A layer without experts has zeros.
    """

    chosen: np.ndarray

    @classmethod
    def of(cls, chosen: np.ndarray) -> RoutedExperts:
        """Make the record from expert indices [T, L, K] of any integer type.

        Raises:
            ValueError: the indices do not have that shape, or are not whole numbers of at least 0.
        """
        if chosen.ndim != 3 or not np.issubdtype(chosen.dtype, np.integer):
            raise ValueError(f"routed experts are {chosen.dtype} {list(chosen.shape)}, not whole numbers [T, L, K]")
        if chosen.size and int(chosen.min()) < 0:
            raise ValueError("a routed expert has a negative number")
        small = not chosen.size or int(chosen.max()) < _MOST_IN_A_BYTE
        return cls(np.ascontiguousarray(chosen, dtype=np.uint8 if small else np.int16))

    def __len__(self) -> int:
        """Return T, the number of tokens."""
        return len(self.chosen)

    def encoded(self) -> dict[str, Any]:
        """Return the record as JSON-safe values."""
        data = base64.b64encode(self.chosen.tobytes()).decode()
        return {"shape": list(self.chosen.shape), "dtype": self.chosen.dtype.name, "data": data}

    @classmethod
    def decoded(cls, fields: Mapping[str, Any]) -> RoutedExperts:
        """Return the record that :meth:`encoded` encoded."""
        flat = np.frombuffer(base64.b64decode(fields["data"]), dtype=fields["dtype"])
        return cls(flat.reshape(fields["shape"]))


def joined_routes(turns: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    """Join the records of a conversation's turns, each of which begins with all tokens before it.

    Each token keeps the experts that it was first computed with: those of the turn that sampled it or first had it
    in its prompt. ``None`` if a turn has no record.
    """
    known = [turn.chosen for turn in turns if turn is not None]
    if len(known) < len(turns) or not known:
        return None
    if len(known) == 1:
        return turns[0]
    starts = [0, *(len(chosen) for chosen in known[:-1])]
    return RoutedExperts(np.concatenate([chosen[start:] for chosen, start in zip(known, starts, strict=True)]))
