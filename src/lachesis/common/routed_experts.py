"""Which experts of a mixture the tokens of a sequence went through. No torch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# As many as a byte tells apart; vLLM counts in the same types.
_MOST_IN_A_BYTE = 256


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The experts that an engine used, for what goes through the model: all tokens of a sequence but the last.

    Attributes:
        chosen: uint8 (int16 of more than 256 experts) [T, L, K]: for each of T tokens, in each of L decoder layers, the
            K experts that its router chose. A layer without experts has zeros.
    """

    chosen: np.ndarray

    @classmethod
    def of(cls, chosen: np.ndarray) -> RoutedExperts:
        """The record of numbers of experts [T, L, K] in any type.

        Raises:
            ValueError: they are not of that shape, or no whole numbers from 0 on.
        """
        if chosen.ndim != 3 or not np.issubdtype(chosen.dtype, np.integer):
            raise ValueError(f"routed experts are {chosen.dtype} {list(chosen.shape)}, not whole numbers [T, L, K]")
        if chosen.size and int(chosen.min()) < 0:
            raise ValueError("a routed expert has a number below 0")
        small = not chosen.size or int(chosen.max()) < _MOST_IN_A_BYTE
        return cls(np.ascontiguousarray(chosen, dtype=np.uint8 if small else np.int16))

    def __len__(self) -> int:
        """T, the tokens that it tells of."""
        return len(self.chosen)

    def encoded(self) -> dict[str, Any]:
        """As JSON has it."""
        data = base64.b64encode(self.chosen.tobytes()).decode()
        return {"shape": list(self.chosen.shape), "dtype": self.chosen.dtype.name, "data": data}

    @classmethod
    def decoded(cls, fields: Mapping[str, Any]) -> RoutedExperts:
        """The reverse of :meth:`encoded`."""
        flat = np.frombuffer(base64.b64decode(fields["data"]), dtype=fields["dtype"])
        return cls(flat.reshape(fields["shape"]))


def joined_routes(turns: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    """Of the turns of a conversation, each of which goes on with all tokens before it, those of the whole.

    Each token has the experts that it was first computed with: those of the turn that sampled it, or was first told of
    it. ``None`` where a turn has none.
    """
    known = [turn.chosen for turn in turns if turn is not None]
    if len(known) < len(turns) or not known:
        return None
    if len(known) == 1:
        return turns[0]
    starts = [0, *(len(chosen) for chosen in known[:-1])]
    return RoutedExperts(np.concatenate([chosen[start:] for chosen, start in zip(known, starts, strict=True)]))
