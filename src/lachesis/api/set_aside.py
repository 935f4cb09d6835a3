"""Groups that no trainer could use: kept apart with their reason, so that whoever wrote them can look."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass

from lachesis.api.environments import Environment
from lachesis.api.records import ScoredGroup

_KEPT = 50
_KEPT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Misfit:
    """One group set aside. ``at`` is wall-clock time in seconds."""

    at: float
    environment: str
    reason: str
    group: ScoredGroup


class SetAside:
    """Counts all groups set aside; keeps the last 50, or fewer where they take more than 16 MiB."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[Misfit] = deque(maxlen=_KEPT)

    def add(self, group: ScoredGroup, reason: str, environment: Environment | None) -> None:
        """Set a group aside. It counts for its environment, where one registered."""
        self.count += 1
        name = environment.name if environment else "no environment" if group.env_id is None else f"#{group.env_id}"
        if environment is not None:
            environment.set_aside += 1
        self.last.append(Misfit(at=time.time(), environment=name, reason=reason, group=group))
        while sum(len(misfit.group.json) for misfit in self.last) > _KEPT_BYTES and len(self.last) > 1:
            self.last.popleft()

    def reply(self) -> bytes:
        """GET /set_aside: the kept groups with their reasons, newest last."""
        parts = []
        for misfit in self.last:
            head = {"at": misfit.at, "environment": misfit.environment, "reason": misfit.reason}
            parts.append(json.dumps(head)[:-1].encode() + b', "group": ' + misfit.group.json + b"}")
        return b'{"count": %d, "last": [%b]}' % (self.count, b", ".join(parts))
