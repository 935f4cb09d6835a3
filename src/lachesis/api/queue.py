"""The queue of groups, indexed so that neither adding a group nor taking a batch looks at the backlog."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from lachesis.api.batching import Key
from lachesis.api.records import HeldGroup


class GroupQueue:
    """Groups by position, in lanes of one environment and one size each, with running counts."""

    def __init__(self) -> None:
        self._groups: dict[int, HeldGroup] = {}
        self._lanes: dict[Key, deque[int]] = {}
        self._sequences: Counter[int | None] = Counter()
        self.weight = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def lanes(self) -> Mapping[Key, deque[int]]:
        """Positions by (environment id, sequences a group), oldest first; no lane is empty."""
        return self._lanes

    @property
    def sequences(self) -> Mapping[int | None, int]:
        """Queued sequences by environment id, for environments that have any."""
        return self._sequences

    def largest(self, env_id: int | None = None) -> int:
        """Sequences of the largest queued group, of one environment where an id is given; 0 where none is."""
        return max((size for env, size in self._lanes if env_id is None or env == env_id), default=0)

    def append(self, held: HeldGroup) -> None:
        """Queue a group behind all others of its lane; its position is unique."""
        group = held.group
        self._groups[held.position] = held
        self._lanes.setdefault((group.env_id, group.sequences), deque()).append(held.position)
        self._count(held, 1)

    def take(self, keys: Iterable[Key]) -> tuple[HeldGroup, ...]:
        """Remove and return the oldest group of each lane named, in that order; a lane may be named again."""
        taken: list[HeldGroup] = []
        for key in keys:
            lane = self._lanes[key]
            held = self._groups.pop(lane.popleft())
            self._count(held, -1)
            if not lane:
                del self._lanes[key]
            taken.append(held)
        return tuple(taken)

    def put_back(self, groups: Iterable[HeldGroup]) -> None:
        """Queue groups again where they were. Costs a walk over their lanes; for rare events only."""
        keys: set[Key] = set()
        for held in groups:
            self.append(held)
            keys.add((held.group.env_id, held.group.sequences))
        for key in keys:
            self._lanes[key] = deque(sorted(self._lanes[key]))

    def _count(self, held: HeldGroup, sign: int) -> None:
        group = held.group
        self._sequences[group.env_id] += sign * group.sequences
        if not self._sequences[group.env_id]:
            del self._sequences[group.env_id]
        self.weight += sign * group.weight
        self.tokens += sign * group.tokens
