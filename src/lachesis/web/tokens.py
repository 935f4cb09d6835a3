"""Token sequences on pages: the colour scale of probabilities, and the choice of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

T = TypeVar("T")

# Lower ends of the probabilities with the colours p0, p1, ...; lower probabilities have one more colour.
BOUNDS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01)


def colour(logprob: float) -> str:
    """Return the CSS class of a sampled token, equal to that of ``tokenClass`` in tokens.js."""
    probability = math.exp(min(0.0, logprob))
    return f"p{sum(probability < bound for bound in BOUNDS)}"


def token_spans(
    texts: Sequence[str], logprobs: Sequence[float | None], *, given: Iterable[bool], after: int = 0
) -> dict[str, Any]:
    """Return a sequence as JSON-safe values for the viewer in tokens.js.

    Args:
        texts: the text that each token adds.
        logprobs: of the tokens in nats; missing ones at the end are unknown, like ``None``.
        given: True for tokens that were not sampled. after: number of tokens left out after these.
    """
    indices = {index for index, names_object in enumerate(given) if names_object}
    pairs = zip_longest(texts, logprobs[: len(texts)])
    return {
        "pieces": list(texts),
        "logprobs": [
            None if value is None or index in indices else round(value, 3) for index, (_, value) in enumerate(pairs)
        ],
        "given": sorted(indices),
        "after": after,
    }


def best_and_worst(items: Iterable[T], *, score: Callable[[T], float | None], limit: int) -> list[T]:
    """Return the items with the best scores first and unknown ones last, leaving out the middle beyond ``limit``."""
    known = [(item, score(item)) for item in items]
    ranked = [item for item, _ in sorted(known, key=lambda pair: math.inf if pair[1] is None else -pair[1])]
    return ranked if len(ranked) <= limit else [*ranked[: limit - limit // 2], *ranked[-(limit // 2) :]]
