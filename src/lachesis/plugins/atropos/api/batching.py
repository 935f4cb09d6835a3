"""The queue of groups, and which of them make the next batch.

A *lane* holds the groups of one environment and one size (sequences a group), oldest first, as their positions in the
queue. Neither adding a group nor taking a batch scans the queue: a plan is pure arithmetic on the heads of the lanes
and on their lengths. Sets of reachable sums are integers: bit ``n`` is set where ``n`` sequences can be made up.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lachesis.plugins.atropos.api.entries import HeldGroup

# Once this many batches' worth of sequences is queued, a batch no longer has to add up exactly.
PATIENCE_BATCHES = 2

Key: TypeAlias = tuple[int | None, int]
Lanes: TypeAlias = Mapping[Key, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Demand:
    """Requirements of a batch.

    ``minimums`` are sequences owed by environment id, for connected environments that owe any. ``sizes`` are group
    sizes that may still arrive, besides those in the queue. ``full`` is set if the queue takes no more groups, so
    that waiting for others is pointless. ``long`` is set if :data:`PATIENCE_BATCHES` are queued.
    """

    batch_size: int
    minimums: Mapping[int, int]
    sizes: frozenset[int] = frozenset()
    full: bool = False
    long: bool = False

    def of(self, *, queued: int, full: bool) -> Demand:
        """Return this demand on a queue of ``queued`` sequences."""
        return replace(self, full=full, long=queued >= PATIENCE_BATCHES * self.batch_size)


def plan_batch(lanes: Lanes, demand: Demand) -> tuple[Key, ...] | None:
    """Return the lanes to take a group from, in order, for one batch; None if the queue has to grow first.

    Groups stay whole and the batch has exactly ``batch_size`` sequences, oldest groups first. Each environment that
    owes a minimum has at least one group in it and as much of its share as it has queued. No group size blocks the
    others:

    - Minimums that no number of groups can meet together are dropped.
    - Groups of a size that fits no batch (:func:`stranded`) go out alone, when they are the oldest or when the queue
    allows no exact batch.
    - Once :data:`PATIENCE_BATCHES` batches are queued, or the queue is full with at least one batch, the groups that
      come nearest to ``batch_size`` from below go out. A full queue does not wait for a minimum either.
    """
    alone = _stranded_batch(lanes, demand)
    if alone and _oldest_is_stranded(lanes, demand):
        return alone
    counts = {key: len(lane) for key, lane in lanes.items()}
    return _exact_batch(lanes, counts, demand) or alone or _nearest_batch(lanes, counts, demand) or None


def _exact_batch(lanes: Lanes, counts: Mapping[Key, int], demand: Demand) -> tuple[Key, ...]:
    """Return the lanes of a batch of exactly ``batch_size`` sequences; empty if none is possible yet."""
    minimums = _scaled(demand, lanes)
    if _fits(counts, demand.batch_size, minimums):
        return _oldest_first(lanes, counts, demand.batch_size, minimums)
    if not minimums or not _fits(counts, demand.batch_size, ()):
        return ()
    plenty = {key: demand.batch_size // key[1] for key in lanes if key[1] <= demand.batch_size}
    waits = not demand.full and (_absent(demand, lanes) or _fits(plenty, demand.batch_size, minimums))
    return () if waits else _oldest_first(lanes, counts, demand.batch_size, {})


def _nearest_batch(lanes: Lanes, counts: Mapping[Key, int], demand: Demand) -> tuple[Key, ...]:
    """Return the lanes of the largest batch below ``batch_size`` if waiting for an exact one must end."""
    held_up = demand.full or (demand.long and not _absent(demand, lanes))
    if not held_up or _queued(lanes) < demand.batch_size:
        return ()
    minimums = _scaled(demand, lanes)
    for owed in (minimums, {}):
        nearest = _sums(counts, demand.batch_size, owed).bit_length() - 1
        if nearest > 0:
            return _oldest_first(lanes, counts, nearest, owed)
    return ()


def _absent(demand: Demand, lanes: Lanes) -> set[int]:
    """Return the environments that owe a minimum and have nothing queued."""
    return set(demand.minimums) - {env for env, _ in lanes if env is not None}


def _queued(lanes: Lanes) -> int:
    return sum(size * len(lane) for (_, size), lane in lanes.items())


def stranded(sizes: Collection[int], demand: Demand) -> frozenset[int]:
    """Return the sizes that no sum equal to ``batch_size`` contains, however many groups of each size arrive."""
    known = frozenset(size for size in (*sizes, *demand.sizes) if size <= demand.batch_size)
    sums = _sums_of_plenty(known, demand.batch_size)
    return frozenset(s for s in sizes if s > demand.batch_size or not sums >> (demand.batch_size - s) & 1)


def needs_groups(lanes: Lanes, demand: Demand) -> bool:
    """Return True if no batch can be made before more groups arrive, of whatever size or environment.

    An environment that throttles itself by the queue's length must then continue, or it would wait for itself.
    """
    if _queued(lanes) < demand.batch_size:
        return True
    return not (demand.full or demand.long or _absent(demand, lanes)) and plan_batch(lanes, demand) is None


def released(sizes: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Return the buffered groups of an environment, by index, that now leave for the queue; empty if none can.

    The first that add up to ``group_size`` in order of arrival; else a subset that does, later groups preferred.
    Once ``group_size`` groups are buffered, a run of them that adds up to a multiple of it is enough: there always is
    one (two of their partial sums are equal modulo ``group_size``), so the buffer is bounded.
    """
    total = 0
    chosen: list[int] = []
    for index, size in enumerate(sizes):
        if total + size <= group_size:
            total += size
            chosen.append(index)
            if total == group_size:
                return tuple(chosen)
    exact = _subset(sizes, group_size)
    return exact or (_run(sizes, group_size) if len(sizes) >= group_size else ())


def waiting_for(lanes: Lanes, demand: Demand, names: Mapping[int, str]) -> str:
    """Say in a sentence why :func:`plan_batch` returned None."""
    present = {env for env, _ in lanes}
    for env in demand.minimums:
        if env not in present:
            return f"environment {names.get(env, env)} owes {demand.minimums[env]} sequences and has none queued"
    queued = _queued(lanes)
    text = f"{queued} of {demand.batch_size} sequences are queued"
    if queued < demand.batch_size:
        return text
    sizes = ", ".join(str(size) for size in sorted({size for _, size in lanes}))
    return f"{text} in groups of {sizes}, which do not add up to a batch yet"


def _oldest_first(
    lanes: Lanes, counts: Mapping[Key, int], batch_size: int, minimums: Mapping[int, int]
) -> tuple[Key, ...]:
    """Take the oldest group that still lets the rest be filled exactly; minimums first."""
    left, counts, owing = batch_size, dict(counts), set(minimums)
    used = dict.fromkeys(lanes, 0)
    taken: list[Key] = []
    for env, share in [*minimums.items(), (None, batch_size)]:
        first_pass = env is not None
        lanes_open = {key for key in lanes if counts[key] and (not first_pass or key[0] == env)}
        got = 0
        while lanes_open and left and got < share:
            key = min(lanes_open, key=lambda candidate: lanes[candidate][used[candidate]])
            counts[key] -= 1
            rest = owing - {key[0]}
            if key[1] <= left and _fits(counts, left - key[1], rest):
                taken.append(key)
                used[key] += 1
                left -= key[1]
                got += key[1]
                owing = rest
            else:
                # No exact batch has one more of these, nor of later ones in the lane.
                counts[key] += 1
                lanes_open.discard(key)
            if not counts[key]:
                lanes_open.discard(key)
    return tuple(taken)


def _oldest_is_stranded(lanes: Lanes, demand: Demand) -> bool:
    oldest = min(lanes, key=lambda key: lanes[key][0])
    return bool(stranded({oldest[1]}, replace(demand, sizes=demand.sizes | {size for _, size in lanes})))


def _stranded_batch(lanes: Lanes, demand: Demand) -> tuple[Key, ...]:
    """Return as many groups whose size fits no batch as one batch holds, if they fill one; else nothing."""
    odd = stranded({size for _, size in lanes}, demand)
    queued = sum(size * len(lanes[env, size]) for env, size in lanes if size in odd)
    if not odd or queued < demand.batch_size:
        return ()
    used = dict.fromkeys((key for key in lanes if key[1] in odd), 0)
    taken: list[Key] = []
    left = demand.batch_size
    while used:
        key = min(used, key=lambda candidate: lanes[candidate][used[candidate]])
        if key[1] > left and taken:
            del used[key]
            continue
        taken.append(key)
        left -= key[1]
        used[key] += 1
        if used[key] == len(lanes[key]):
            del used[key]
        if left <= 0:
            break
    return tuple(taken)


def _scaled(demand: Demand, lanes: Lanes) -> dict[int, int]:
    """Return minimums that fit a batch together: scaled down in proportion, but never below one group."""
    total = sum(demand.minimums.values())
    if total <= demand.batch_size:
        return dict(demand.minimums)
    smallest: dict[int | None, int] = {}
    for env, size in lanes:
        smallest[env] = min(size, smallest.get(env, size))
    return {
        env: max(smallest.get(env, 1), share * demand.batch_size // total) for env, share in demand.minimums.items()
    }


def _fits(counts: Mapping[Key, int], target: int, owing: Iterable[int | None]) -> bool:
    """Return True if ``target`` sequences can be made up exactly, with a group of every environment in ``owing``."""
    return bool(_sums(counts, target, owing) >> target & 1)


def _sums(counts: Mapping[Key, int], limit: int, owing: Iterable[int | None]) -> int:
    """Return the sums up to ``limit`` that groups make, with at least one of every environment in ``owing``."""
    mask = (1 << (limit + 1)) - 1
    owed: dict[int | None, dict[int, int]] = {env: {} for env in owing}
    free: dict[int, int] = {}
    for (env, size), count in counts.items():
        sizes = owed.get(env, free)
        sizes[size] = sizes.get(size, 0) + count
    sums = _with_groups(1, free, mask)
    for sizes in owed.values():
        together = 0
        for size, count in sizes.items():
            if count and size <= limit:
                together |= _with_groups((sums << size) & mask, {**sizes, size: count - 1}, mask)
        sums = together
    return sums


def _with_groups(sums: int, sizes: Mapping[int, int], limit: int) -> int:
    """Return ``sums`` plus all sums with up to ``count`` groups of each size; counts are split into powers of 2."""
    target = limit.bit_length() - 1
    for size, count in sizes.items():
        count, part = min(count, target // size), 1
        while count > 0:
            sums |= (sums << size * min(part, count)) & limit
            count -= part
            part *= 2
    return sums


@functools.lru_cache(maxsize=256)
def _sums_of_plenty(sizes: frozenset[int], target: int) -> int:
    return _with_groups(1, {size: target // size for size in sizes}, (1 << (target + 1)) - 1)


def _subset(sizes: Sequence[int], target: int) -> tuple[int, ...]:
    limit = (1 << (target + 1)) - 1
    reachable = [1]
    for size in sizes:
        reachable.append((reachable[-1] | reachable[-1] << size) & limit)
    if not reachable[-1] >> target & 1:
        return ()
    left = target
    chosen: list[int] = []
    for index in range(len(sizes) - 1, -1, -1):
        if left >= sizes[index] and reachable[index] >> (left - sizes[index]) & 1:
            chosen.append(index)
            left -= sizes[index]
    return tuple(reversed(chosen))


def _run(sizes: Sequence[int], group_size: int) -> tuple[int, ...]:
    first_with: dict[int, int] = {0: 0}
    total = 0
    for index, size in enumerate(sizes):
        total = (total + size) % group_size
        start = first_with.setdefault(total, index + 1)
        if start <= index:
            return tuple(range(start, index + 1))
    return ()


class GroupQueue:
    """Groups by position, in lanes of one environment and one size each, with running counts."""

    def __init__(self) -> None:
        self._groups: dict[int, HeldGroup] = {}
        # Positions by (environment id, sequences a group), oldest first; no lane is empty.
        self.lanes: dict[Key, deque[int]] = {}
        # Queued sequences by environment id, for environments that have any.
        self.sequences: Counter[int | None] = Counter()
        self.weight = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._groups)

    def largest(self, env_id: int | None = None) -> int:
        """Return the sequences of the largest queued group, of one environment if its id is given; 0 if none is."""
        return max((size for env, size in self.lanes if env_id is None or env == env_id), default=0)

    def append(self, held: HeldGroup) -> None:
        """Queue a group behind all others of its lane; its position is unique."""
        group = held.group
        self._groups[held.position] = held
        self.lanes.setdefault((group.env_id, group.sequences), deque()).append(held.position)
        self._count(held, 1)

    def take(self, keys: Iterable[Key]) -> tuple[HeldGroup, ...]:
        """Remove and return the oldest group of each lane named, in that order; a lane may be named again."""
        taken: list[HeldGroup] = []
        for key in keys:
            lane = self.lanes[key]
            held = self._groups.pop(lane.popleft())
            self._count(held, -1)
            if not lane:
                del self.lanes[key]
            taken.append(held)
        return tuple(taken)

    def put_back(self, groups: Iterable[HeldGroup]) -> None:
        """Queue groups again where they were. Costs a walk over their lanes; for rare events only."""
        keys: set[Key] = set()
        for held in groups:
            self.append(held)
            keys.add((held.group.env_id, held.group.sequences))
        for key in keys:
            self.lanes[key] = deque(sorted(self.lanes[key]))

    def _count(self, held: HeldGroup, sign: int) -> None:
        group = held.group
        self.sequences[group.env_id] += sign * group.sequences
        if not self.sequences[group.env_id]:
            del self.sequences[group.env_id]
        self.weight += sign * group.weight
        self.tokens += sign * group.tokens
