"""Consecutive items in runs of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def runs(items: Iterable[T], *, size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items, in order, in runs whose sizes add up to at most ``limit``; a larger item is a run by itself."""
    run: list[T] = []
    held = 0
    for item in items:
        if run and held + size(item) > limit:
            yield run
            run, held = [], 0
        run.append(item)
        held += size(item)
    if run:
        yield run
