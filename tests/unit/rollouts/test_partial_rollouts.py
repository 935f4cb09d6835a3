"""What was finished before a restart joins its group exactly, or is let go and counted; nothing else does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lachesis.common.types import UNKNOWN_VERSIONS, Group, Prompt, Sample, VersionSpan
from lachesis.rollouts.partial_rollouts import PartialRollout, PartialRollouts
from lachesis.rollouts.record_store import RecordStore

Open = Callable[..., PartialRollouts]


def sample(version: int = 0, **changes: object) -> Sample:
    whole = Sample(
        (1, 2), (3, 4), (-1 / 3, math.nan), "stop", VersionSpan(version, version), "x", (1, 0), 0.7, (0.5, None), 0.5
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def group(name: str, *samples: Sample) -> Group:
    return Group(Prompt(id=name, token_ids=(), text=""), samples, logged={"length": [2] * len(samples)})


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """What is kept in one file: of one process after the other."""
    made: list[PartialRollouts] = []

    def again(*, version: int = 0) -> PartialRollouts:
        for one in made:
            one.close()
        made.append(PartialRollouts(RecordStore(tmp_path / "kept.sqlite")))
        made[-1].open(version=version)
        return made[-1]

    yield again
    made[-1].close()


def admit(kept: PartialRollouts, request: int, name: str = "p", *, since: int = 0, oldest: int | None = None):
    return kept.admit(request, name, since=since, oldest=since if oldest is None else oldest)


def counts(kept: PartialRollouts) -> tuple[float, ...]:
    return tuple(kept.counters().values())


def same(found: Sample, expected: Sample) -> bool:
    return repr(found) == repr(expected)  # NaN is not equal to itself


def test_rollouts_and_groups_come_back_as_they_were(opened: Open):
    first = opened()
    assert admit(first, 0) is None and admit(first, 1) is None and first.counters() == {}
    first.of(0).note(PartialRollout(2, (sample(), sample(reward=1.5)), {"turns": [1, 2]}))
    first.finish(1, group("p", sample(), sample(mask=None)))
    second = opened()
    whole = admit(second, 1)
    assert whole is not None and whole.logged == {"length": [2, 2]}
    assert all(map(same, whole.samples, (sample(), sample(mask=None))))
    assert admit(second, 0) is None
    (rollout,) = second.of(0).rollouts.values()
    assert rollout.number == 2 and rollout.extras == {"turns": [1, 2]}
    assert all(map(same, rollout.samples, (sample(), sample(reward=1.5))))
    assert counts(second) == (1, 1, 0)
    assert admit(second, 0) is None and second.of(0).rollouts and counts(second) == (0, 0, 0), "asked for again"
    assert admit(opened(), 1) is not None, "no step has trained on it yet"


@pytest.mark.parametrize(
    ("changes", "version"),
    [({"name": "q"}, 0), ({"since": 2}, 0), ({"oldest": 2}, 0), ({}, -1)],
    ids=["another prompt", "admitted later", "no step in time", "lost weights"],
)
def test_what_does_not_fit_is_let_go_and_counted(opened: Open, changes: dict, version: int):
    first = opened()
    admit(first, 0, since=1)
    for number in range(3):
        first.of(0).note(PartialRollout(number, (sample(),)))
    second = opened(version=version)
    assert admit(second, 0, **({"since": 1} | changes)) is None
    assert not second.of(0).rollouts and counts(second) == (0, 0, 3)
    assert not opened().of(0).rollouts


def test_of_a_group_with_lost_weights_the_older_rollouts_stay(opened: Open):
    first = opened()
    admit(first, 0)
    first.of(0).note(PartialRollout(0, (sample(3),)))
    first.of(0).note(PartialRollout(1, (sample(4),)))
    first.finish(0, group("p", sample(3), sample(4)))
    second = opened(version=3)
    assert admit(second, 0) is None
    assert list(second.of(0).rollouts) == [0] and counts(second) == (0, 1, 1)


def trained(kept: PartialRollouts, request: int, *, version: int, saved: bool = False) -> None:
    kept.train([request], done=version, version=version)
    if saved:
        kept.checkpoint()


def test_what_was_trained_on_stays_until_a_checkpoint_has_it(opened: Open):
    first = opened()
    admit(first, 0)
    first.finish(0, group("p", sample(0)))
    trained(first, 0, version=1)
    second = opened()  # from the checkpoint before that step
    assert admit(second, 0) is not None
    trained(second, 0, version=1, saved=True)
    assert admit(opened(), 0) is not None, "killed while it was written"
    third = opened()
    admit(third, 0)
    trained(third, 0, version=1, saved=True)
    third.train([], done=2, version=2)
    fourth = opened()
    assert admit(fourth, 0) is not None, "killed while it was written and training went on"
    trained(fourth, 0, version=1, saved=True)
    fourth.saved()
    assert admit(opened(), 0) is None


@pytest.mark.parametrize("versions", [VersionSpan(5, 5), UNKNOWN_VERSIONS])
def test_what_no_checkpoint_could_use_leaves_with_its_step(opened: Open, versions: VersionSpan):
    first = opened()
    first.train([], done=5, version=5)
    admit(first, 0, since=5)
    first.finish(0, group("p", sample(versions=versions)))
    trained(first, 0, version=6)
    second = opened(version=9)
    assert admit(second, 0, since=5) is None and second.counters() == {}


def test_what_a_checkpoint_has_is_not_waited_for(opened: Open):
    first = opened()
    for request in range(5):
        admit(first, request, since=request // 2)
        first.finish(request, group("p", sample()))
    first.leave(4)
    second = opened()
    second.begin(finished=[2], unfinished=[1], done=1)  # 0 was trained on, 3 is still to be drawn
    assert [admit(second, request) is not None for request in range(5)] == [False, True, False, True, False]
    assert counts(second) == (2, 0, 0)


def test_what_is_never_drawn_is_let_go_once_it_is_too_old(opened: Open):
    first = opened()
    admit(first, 7, since=1)
    first.finish(7, group("p", sample(), sample()))
    second = opened()
    second.begin(finished=[], unfinished=[], done=1)
    second.train([], done=1, version=1)
    assert counts(second) == (0, 0, 0)
    second.train([], done=2, version=2)
    assert counts(second) == (0, 0, 2)
