"""Proof that tokens which vLLM guessed and verified come with the model's own logprobs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lachesis.engines.serving.bodies import Refused

# Mean difference, in nats, of one logprob computed token by token and at once. In 16 bits a hundredth is usual.
_DRAFTED_TOLERANCE = 0.25


def check_drafted(sampled: Sequence[float], read: Sequence[float], *, kind: str) -> None:
    """Raise Refused unless logprobs [T] that came with sampled tokens are those [T] that the model has for them.

    ``kind`` names the engine.
    """
    off = statistics.fmean(abs(one - other) for one, other in zip(sampled, read, strict=True))
    if not off <= _DRAFTED_TOLERANCE:  # nor where it is NaN
        raise Refused(
            f"with speculative decoding {kind} samples from another policy than the model: logprobs of its tokens are "
            f"{off:.2g} nats off those that the model gives them, where {_DRAFTED_TOLERANCE:g} would do",
            remedy="remove engine.speculative (--speculative-config)",
        )
