"""Prefix cache hit rates of engines since the last reading. Pure."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from lachesis.metrics.values import Mean


class PrefixHits:
    """Counts prompt tokens, and those of them that were cached, by engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[str, Mean] = {}

    def add(self, url: str, cached_tokens: Iterable[int | None], *, prompt_tokens: int) -> None:
        """Count an answer: the tokens of a prompt that each completion found in the cache, where known."""
        known = [cached for cached in cached_tokens if cached is not None]
        if not known:
            return
        answer = Mean(sum(known), prompt_tokens * len(known))
        with self._lock:
            before = self._counted.get(url)
            self._counted[url] = answer if before is None else before.merge(answer)

    def take(self) -> dict[str, Mean]:
        """Since the last call, of each engine that said it."""
        with self._lock:
            counted, self._counted = self._counted, {}
        return counted
