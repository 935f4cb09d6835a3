"""Memory of the results of a function that takes many values at once, often the same ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

V = TypeVar("V")
R = TypeVar("R")


class Remembered(Generic[V, R]):
    """A cached function of many values: each new value is passed once, all new values in one call. Thread-safe.

    Args:
        function: returns a result for each value, which depends only on the value.
        most: maximum number of kept results; older ones are dropped.
    """

    def __init__(self, function: Callable[[list[V]], Sequence[R]], *, most: int) -> None:
        self._function = function
        self._most = most
        self._known: dict[Hashable, R] = {}

    def __call__(self, values: Sequence[V], *, keys: Sequence[Hashable] | None = None) -> list[R]:
        """Return the results in the order of the values; ``keys`` stand for values that cannot be hashed."""
        keys = keys or values  # pyright: ignore[reportAssignmentType]
        known = self._known
        if new := {key: value for key, value in zip(keys, values, strict=True) if key not in known}:
            found = dict(zip(new, self._function([*new.values()]), strict=True))
            if len(known) + len(found) > self._most:
                # A new dictionary, because other threads may be reading this one.
                known = self._known = {key: known[key] for key in keys if key in known}
            known.update(found)
        return [known[key] for key in keys]
