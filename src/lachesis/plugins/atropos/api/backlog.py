"""Backlog of groups not yet handed out: limits, strict checks, buffers for mixed sizes, the queue."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lachesis.plugins.atropos.api.batching import GroupQueue, Key, released
from lachesis.plugins.atropos.api.entries import NOT_QUEUED, Change, HeldGroup, StoredGroup
from lachesis.plugins.atropos.api.environments import Environments, RegisteredEnvironment
from lachesis.plugins.atropos.api.wire import Refusal

RETRY_AFTER_S = 2
_KEPT = 50
_KEPT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Misfit:
    """Group that was set aside. ``at`` is wall-clock time in seconds."""

    at: float
    environment: str
    reason: str
    group: StoredGroup


class SetAside:
    """Record of rejected groups: their count, and the last 50 of them, or fewer if those take more than 16 MiB."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[Misfit] = deque(maxlen=_KEPT)

    def add(self, group: StoredGroup, reason: str, environment: RegisteredEnvironment | None) -> None:
        """Set a group aside, and count it for its environment if that is registered."""
        self.count += 1
        name = environment.name if environment else "no environment" if group.env_id is None else f"#{group.env_id}"
        if environment is not None:
            environment.set_aside += 1
        self.last.append(Misfit(at=time.time(), environment=name, reason=reason, group=group))
        while sum(len(misfit.group.json) for misfit in self.last) > _KEPT_BYTES and len(self.last) > 1:
            self.last.popleft()

    def reply(self) -> bytes:
        """Answer GET /set_aside: the kept groups with their reasons, newest last."""
        parts: list[bytes] = []
        for misfit in self.last:
            head = {"at": misfit.at, "environment": misfit.environment, "reason": misfit.reason}
            parts.append(json.dumps(head)[:-1].encode() + b', "group": ' + misfit.group.json + b"}")
        return b'{"count": %d, "last": [%b]}' % (self.count, b", ".join(parts))


class Backlog:
    """All groups not yet handed out: the queue, and a buffer for each environment."""

    def __init__(self, environments: Environments, *, strict: bool, max_queued_tokens: int | None) -> None:
        self.queue = GroupQueue()
        self.set_aside = SetAside()
        self.latest: HeldGroup | None = None
        self.buffers: dict[int, list[HeldGroup]] = {}
        self.limit = max_queued_tokens
        self._turned_away = False
        self._environments = environments
        self._strict = strict
        self._next_number = 0
        self._next_position = 0

    @property
    def weight(self) -> int:
        """Tokens queued and buffered, as the limit counts them."""
        buffered = sum(held.group.weight for buffer in self.buffers.values() for held in buffer)
        return self.queue.weight + buffered

    @property
    def full(self) -> bool:
        """Return True if the queue is full: at its limit, or without room for the last post since groups left it."""
        return self.limit is not None and (self._turned_away or self.weight >= self.limit)

    def take(self, keys: Iterable[Key]) -> tuple[HeldGroup, ...]:
        """Remove and return the oldest group of each lane named, in that order."""
        self._turned_away = False
        return self.queue.take(keys)

    def post(self, groups: Sequence[StoredGroup], *, now: float) -> tuple[list[dict[str, Any]], Change]:
        """Queue groups, or buffer them if their size is not their environment's; return a reply for each.

        Raises:
            Refusal: 429, the queue is full; 413, it could never hold them. Nothing was queued.
        """
        self._check_room(groups)
        added: list[HeldGroup] = []
        placed: dict[int, int] = {}  # buffered groups that now have a position
        replies = [self._accept(group, added, placed, now) for group in groups]
        return replies, Change(added=tuple(added), placed=tuple(placed.items()))

    def leave(self, environment: RegisteredEnvironment) -> tuple[int, ...]:
        """Set aside the incomplete buffered groups of an environment that has left, and return their numbers."""
        buffer = self.buffers.pop(environment.id, [])
        for held in buffer:
            reason = f"its environment left before a group of {environment.asked.group_size} was complete"
            self.set_aside.add(held.group, reason, environment)
        return tuple(held.number for held in buffer)

    def release_buffers(self) -> tuple[tuple[int, int], ...]:
        """Queue all buffered groups whole, and return their numbers and positions."""
        released = [self._enqueue(held) for buffer in self.buffers.values() for held in buffer]
        self.buffers.clear()
        return tuple((held.number, held.position) for held in released)

    def restore(self, held: Iterable[HeldGroup], *, next_number: int) -> None:
        """Take over the groups of a store; groups without a position go into their buffers."""
        self._next_number = next_number
        for entry in sorted(held, key=lambda entry: (entry.position, entry.number)):
            if entry.position == NOT_QUEUED and entry.group.env_id is not None:
                self.buffers.setdefault(entry.group.env_id, []).append(entry)
            else:
                self._next_position = max(self._next_position, entry.position + 1)
                self.queue.append(entry)
                self.latest = entry

    def _accept(self, group: StoredGroup, added: list[HeldGroup], placed: dict[int, int], now: float) -> dict[str, Any]:
        environment = self._environments.get(group.env_id)
        if environment is not None:
            environment.last_seen = now
        problem = self._problem(group, environment)
        if problem:
            self.set_aside.add(group, problem, environment)
            return {"status": "set_aside", "reason": problem} if self._strict else {"status": "received"}
        held = HeldGroup(number=self._next_number, group=group)
        self._next_number += 1
        if environment is not None:
            environment.note_group(score=group.score, now=now)
            if group.sequences < environment.asked.group_size:
                return self._buffer(held, environment, added, placed)
        added.append(self._enqueue(held))
        return {"status": "received"}

    def _problem(self, group: StoredGroup, environment: RegisteredEnvironment | None) -> str:
        if self._strict and group.env_id is not None and environment is None:
            return f"env_id {group.env_id} was never registered"
        if self._strict and group.problem:
            return group.problem
        # An empty group can enter no batch, and the plain protocol has no reply that says so.
        return "" if group.sequences else "tokens is empty"

    def _buffer(
        self, held: HeldGroup, environment: RegisteredEnvironment, added: list[HeldGroup], placed: dict[int, int]
    ) -> dict[str, Any]:
        buffer = self.buffers.setdefault(environment.id, [])
        buffer.append(held)
        leaving = released([entry.group.sequences for entry in buffer], environment.asked.group_size)
        for index in leaving:
            queued = self._enqueue(buffer[index])
            if queued.number == held.number:
                held = queued
            else:
                placed[queued.number] = queued.position
        added.append(held)
        buffer[:] = [entry for index, entry in enumerate(buffer) if index not in leaving]
        return {"status": "buffered", "buffer_size": sum(entry.group.sequences for entry in buffer)}

    def _enqueue(self, held: HeldGroup) -> HeldGroup:
        queued = replace(held, position=self._next_position)
        self._next_position += 1
        self.queue.append(queued)
        self.latest = queued
        return queued

    def _check_room(self, groups: Sequence[StoredGroup]) -> None:
        if self.limit is None:
            return
        asked = sum(group.weight for group in groups)
        if asked > self.limit:
            raise Refusal(413, f"{asked} tokens in one post are more than the queue can hold ({self.limit})")
        if self.weight + asked > self.limit:
            self._turned_away = True
            raise Refusal(
                429,
                f"the queue holds {self.weight} of at most {self.limit} tokens: post again later",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
