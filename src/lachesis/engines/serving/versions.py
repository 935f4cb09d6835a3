"""Which weights were in force when."""

from __future__ import annotations

import time
from bisect import bisect_right

from lachesis.common.types import VersionSpan


class VersionClock:
    """The weight version over time. Starts at version 0, the weights that the server was started with."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._versions = [0]

    @property
    def current(self) -> int:
        """The version in force now."""
        return self._versions[-1]

    def record(self, version: int) -> None:
        """From now on the weights are those of ``version``."""
        self._times.append(time.monotonic())
        self._versions.append(version)

    def at(self, moment: float) -> int:
        """The version in force at ``moment``, a reading of ``time.monotonic()``."""
        return self._versions[bisect_right(self._times, moment)]

    def span(self, first: float, last: float) -> VersionSpan:
        """The versions in force at two moments."""
        return VersionSpan(self.at(first), self.at(last))
