"""Finished parts of groups that no checkpoint has trained on yet, kept in the run directory over a restart."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.common.group_codec import decode_group, encode_group, json_safe
from lachesis.common.types import UNKNOWN_VERSIONS, Group, Prompt, Sample
from lachesis.rollouts.record_store import Entry, RecordStore

logger = logging.getLogger("lachesis")


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A rollout that came to its end: its samples, and what else its source makes of it, as JSON has it.

    ``number`` is its place among the rollouts of its group.
    """

    number: int
    samples: tuple[Sample, ...]
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """Rollouts of one group that an earlier process finished, by number, and a callback for new ones.

    Without arguments nothing is kept.
    """

    rollouts: Mapping[int, PartialRollout] = field(default_factory=dict[int, PartialRollout])
    note: Callable[[PartialRollout], None] = lambda rollout: None


@dataclass(frozen=True, slots=True)
class _Found:
    """A record of an earlier process: a whole group, or one rollout. ``since``: batches done at its admission."""

    prompt_id: str
    since: int
    newest: int
    group: Group | None = None
    rollout: PartialRollout | None = None


@dataclass(slots=True)
class _Place:
    """A group that this process has admitted; with the version of the weights that finished its first part."""

    prompt_id: str
    since: int
    version: float = math.inf


class PartialRollouts:
    """Store that records rollouts and groups as they are finished, and hands them out again after a restart.

    A group is known by its request. An earlier process's record joins it if the prompt is the same, the
    weights that sampled it are still those of the run, and it is no older than its place in line: its group was
    admitted after no fewer batches. Anything else is dropped and counted.

    A record stays until a checkpoint includes the step that trained on its group, and no longer than it can be
    useful: samples of weights newer than the last checkpoint's leave with the step that trained on them, as a run
    that is resumed there would not have these weights. So the file does not grow with the length of a run.
    """

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._lock = threading.Lock()  # sources note in any thread
        self._found: dict[int, list[_Found]] = {}
        self._places: dict[int, _Place] = {}
        self._in_line: set[int] = set()  # of the checkpoint, and not admitted yet
        self._trained: list[int] = []  # kept for the last checkpoint
        self._covered: list[int] = []  # and needed no more once the one that was begun is written
        self._saved = self._version = 0  # weights of the last checkpoint that was begun, and of now
        self._resumed = False
        self._counts: Counter[str] = Counter()

    def open(self, *, version: int) -> None:
        """Read the records of an earlier process. ``version`` is that of the weights with which the run continues."""
        self._saved = self._version = version
        try:
            entries, damaged = self._store.read()
        except OSError as error:
            logger.warning("the records of unfinished groups cannot be read, so they begin anew: %s", error)
            return
        for entry in entries:
            try:
                self._found.setdefault(entry.key, []).append(_read(entry))
            except (KeyError, TypeError, ValueError):  # of another version
                damaged += 1
        if damaged:
            logger.warning("%d records of unfinished groups are damaged: these groups begin anew", damaged)
        self._resumed = bool(entries)

    def begin(self, *, finished: Iterable[int], unfinished: Iterable[int], done: int) -> None:
        """Drop the records that a checkpoint after ``done`` batches covers.

        Args:
            finished: requests of groups that the checkpoint has trained on.
            unfinished: requests of groups that it has in line or in training.
            done: number of batches.
        """
        ended, self._in_line = set(finished), set(unfinished)
        old = {request for request, found in self._found.items() if all(one.since < done for one in found)}
        self._forget((ended | old) - self._in_line)

    def admit(self, request: int, prompt_id: str, *, since: int, oldest: int) -> Group | None:
        """Admit a group, which was drawn after ``since`` batches; return it if it was finished before.

        Args:
            request: of the group.
            prompt_id: of the group.
            since: number of batches before it.
            oldest: least ``since`` of records that can still be trained on in time.
        """
        with self._lock:
            if request in self._places:  # it is asked for again
                return None
            place = self._places[request] = _Place(prompt_id, since)
            self._in_line.discard(request)
            found = self._found.pop(request, [])
            fit = [one for one in found if one.prompt_id == prompt_id and one.since >= oldest]
            fit = [one for one in fit if one.newest <= self._saved]
            group = next((one.group for one in fit if one.group is not None), None)
            self._counts["kept_groups"] += group is not None
            if group is None:
                self._counts["kept_rollouts"] += len(_numbers(fit))
                self._counts["kept_let_go"] += _rollouts_in(found) - len(_numbers(fit))
            if fit:
                self._found[request] = fit
                place.version = min(one.newest for one in fit)
            elif found:
                self._store.drop([request])
            return group

    def of(self, request: int) -> PartialGroup:
        """Return the records of a group, and a callback for new rollouts."""
        with self._lock:
            found = self._found.get(request, [])
            rollouts = {one.rollout.number: one.rollout for one in found if one.rollout is not None}
        return PartialGroup(rollouts, lambda rollout: self._note_rollout(request, rollout))

    def _note_rollout(self, request: int, rollout: PartialRollout) -> None:
        extras = json_safe(dict(rollout.extras))
        self._note(request, rollout.samples, lambda: {"number": rollout.number, "extras": extras})

    def finish(self, request: int, group: Group) -> None:
        """Record a whole group."""
        logged = {name: list(values) for name, values in group.logged.items()}
        self._note(request, group.samples, lambda: {"logged": json_safe(logged)})

    def _note(self, request: int, samples: Sequence[Sample], more: Callable[[], Mapping[str, Any]]) -> None:
        with self._lock:
            place = self._places.get(request)
            if place is None:
                return
            newest = _newest(samples, unknown=self._version)
            place.version = min(place.version, newest)
            prompt = Prompt(id=place.prompt_id, token_ids=(), text="")  # all else is the dataset's
            head = {"since": place.since, "newest": newest}
            group = Group(prompt, tuple(samples))
            self._store.append(request, lambda: {**head, **more(), "group": encode_group(group)})

    def leave(self, request: int) -> None:
        """Nothing comes of a group: it was put aside, or dropped."""
        self._forget([request])

    def train(self, requests: Iterable[int], *, done: int, version: int) -> None:
        """Note that a step has trained on these: the weights are now ``version``, after ``done`` batches."""
        with self._lock:
            self._version = version
            gone: list[int] = []
            for request in requests:
                place = self._places.get(request)
                useful = place is not None and place.version <= self._saved
                (self._trained if useful else gone).append(request)
            drawn = self._in_line.union(self._places)
            late = [
                request
                for request, found in self._found.items()
                if request not in drawn and all(one.since < done for one in found)
            ]
            self._counts["kept_let_go"] += sum(_rollouts_in(self._found[request]) for request in late)
        self._forget([*gone, *late])

    def checkpoint(self) -> None:
        """Note that a checkpoint of the current weights is about to be written, which covers all trained groups."""
        with self._lock:
            self._saved = self._version
            self._covered += self._trained
            self._trained = []

    def saved(self) -> None:
        """Note that the last checkpoint is written, and drop the records that it covers."""
        with self._lock:
            covered, self._covered = self._covered, []
        self._forget(covered)

    def _forget(self, requests: Iterable[int]) -> None:
        gone = list(requests)
        with self._lock:
            for request in gone:
                self._found.pop(request, None)
                self._places.pop(request, None)
        self._store.drop(gone)

    def counters(self) -> dict[str, float]:
        """Return counts since the last call, if an earlier process left records.

        ``kept_groups`` that were whole, ``kept_rollouts`` of groups that were not, and ``kept_let_go``, dropped
        rollouts of both.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        names = ("kept_groups", "kept_rollouts", "kept_let_go")
        return {name: float(counts[name]) for name in names} if self._resumed else {}

    def close(self) -> None:
        """Write pending records. Idempotent."""
        self._store.close()


def _newest(samples: Sequence[Sample], *, unknown: int) -> int:
    known = [sample.versions.last for sample in samples if sample.versions != UNKNOWN_VERSIONS]
    return max(known, default=unknown)


def _numbers(found: Sequence[_Found]) -> set[int]:
    return {one.rollout.number for one in found if one.rollout is not None}


def _rollouts_in(found: Sequence[_Found]) -> int:
    """Return the number of recorded rollouts; for a group that was recorded only as a whole, its samples."""
    whole = max((len(one.group.samples) for one in found if one.group is not None), default=0)
    return len(_numbers(found)) or whole


def _read(entry: Entry) -> _Found:
    record = entry.record
    group = decode_group({**record["group"], "logged": record.get("logged", {})})
    head = (group.prompt.id, int(record["since"]), int(record["newest"]))
    if "number" not in record:
        return _Found(*head, group=group)
    return _Found(*head, rollout=PartialRollout(int(record["number"]), group.samples, record["extras"]))
