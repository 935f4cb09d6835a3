"""A source that is stopped amid a group, and goes on in another process: what it plays then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lachesis.common.deadline import Deadline
from lachesis.common.errors import RewardError
from lachesis.common.types import Group, Sample
from lachesis.rollouts.base import GroupwiseSource
from lachesis.rollouts.partial_rollouts import PartialRollouts
from lachesis.rollouts.record_store import RecordStore


def over_a_restart(
    make: Callable[[], GroupwiseSource], directory: Path, *, count: int, finished: Callable[[int], bool]
) -> tuple[list[Sample], list[Group]]:
    """The samples of the rollouts with ``finished`` numbers, of ``count`` groups; and these groups after a restart."""
    rolled_out(make(), directory / "first.sqlite", count=count)
    store, other = RecordStore(directory / "first.sqlite"), RecordStore(directory / "second.sqlite")
    for entry in store.read()[0]:
        if finished(entry.record["number"]):
            other.append(entry.key, lambda record=entry.record: record)
    store.close()
    other.close()
    kept = PartialRollouts(RecordStore(directory / "second.sqlite"))
    kept.open(version=0)
    samples = [
        sample
        for request in range(count)
        for found in kept._found.get(request, [])
        if found.rollout is not None
        for sample in found.rollout.samples
    ]
    kept.close()
    return samples, rolled_out(make(), directory / "second.sqlite", count=count)


def rolled_out(source: GroupwiseSource, path: Path, *, count: int) -> list[Group]:
    """The first groups of a source that keeps what it finishes in a file."""
    kept = PartialRollouts(RecordStore(path))
    kept.open(version=0)
    source.keep(kept)
    draws = source.draw(count)
    for draw in draws:
        assert kept.admit(draw.request, draw.prompt.id, since=0, oldest=0) is None
    found: dict[int, Group | RewardError] = {}
    source.roll_out(draws, deadline=Deadline("groups over a restart", 200.0), done=found.__setitem__)
    kept.close()
    return [group for _, group in sorted(found.items()) if isinstance(group, Group)]
