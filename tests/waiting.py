"""Waiting for what happens elsewhere: a limit costs nothing where it does happen, so it is long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lachesis.common.deadline import Deadline

T = TypeVar("T")

LONG_S = 60.0
_POLL_S = 0.005


def until(
    condition: Callable[[], T], what: str | Callable[[], str] = "it did not happen", *, limit_s: float = LONG_S
) -> T:
    """The first value of the condition that is true; ``what`` says what was waited for, or is asked at the end."""
    end = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < end, what if isinstance(what, str) else what()
        time.sleep(_POLL_S)
    return result


@dataclass(frozen=True)
class LateDeadline(Deadline):
    """Its time runs only from when ``begun`` was found true: what comes before may take as long as it likes."""

    begun: Callable[[], object] = bool
    _since: list[float] = field(default_factory=list)

    def elapsed_s(self) -> float:
        if not self._since and self.begun():
            self._since.append(time.monotonic())
        return time.monotonic() - self._since[0] if self._since else 0.0
