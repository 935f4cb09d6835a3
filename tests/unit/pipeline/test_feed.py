from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, RewardError
from lachesis.common.types import Group, Prompt
from lachesis.pipeline.collect import Collector
from lachesis.pipeline.feed import Finisher, SynchronousFeed
from lachesis.pipeline.replay import ReplayBuffer
from lachesis.rollouts.base import RolloutSource
from tests.unit.pipeline.sources import ScriptedSource
from tests.waiting import LONG_S


class CountingSource(RolloutSource):
    """Groups numbered from 0; gives at most ``at_once`` of those asked for."""

    def __init__(self, *, at_once: int = 100) -> None:
        self.at_once = at_once
        self.given = 0
        self.asked: list[int] = []
        self.versions: list[int] = []
        self.deadlines: list[Deadline] = []
        self.closed = 0
        self.completed = self.safe = False
        self.error: Exception | None = None

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        self.asked.append(count)
        self.deadlines.append(deadline)
        if self.error is not None:
            raise self.error
        numbers = range(self.given, self.given + min(count, self.at_once))
        self.given = numbers.stop
        return [Group(prompt=Prompt(id=str(n), token_ids=(1,), text=""), samples=()) for n in numbers]

    def report_version(self, version: int) -> None:
        self.versions.append(version)

    def counters(self) -> dict[str, float]:
        return {"given": float(self.given)}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]

    def saved(self) -> None:
        self.safe = True

    def complete(self) -> None:
        self.completed = True

    def close(self) -> None:
        self.closed += 1


def backwards(groups: Sequence[Group]) -> list[Group]:
    """Stands for the advantages: a change that shows they were applied, to the whole batch at once."""
    return list(reversed(groups))


def make_feed(source: RolloutSource, *, prompts_per_step: int = 4, seconds: float = LONG_S) -> SynchronousFeed[str]:
    return SynchronousFeed(
        collector=Collector(source, count=prompts_per_step),
        finisher=Finisher(advantages=backwards, pack=lambda groups: ",".join(group.prompt.id for group in groups)),
        batch_deadline_s=seconds,
    )


def test_a_batch_has_all_its_groups_through_advantages_and_packing():
    feed = make_feed(CountingSource())
    assert feed.next() == "3,2,1,0"
    feed.advance(1)
    assert feed.next() == "7,6,5,4"


def test_a_source_that_gives_fewer_is_asked_for_the_rest():
    source = CountingSource(at_once=3)
    assert make_feed(source, prompts_per_step=8).next() == "7,6,5,4,3,2,1,0"
    assert source.asked == [8, 5, 2]
    assert len({id(deadline) for deadline in source.deadlines}) == 1, "one deadline for the whole batch"


def test_the_source_hears_of_every_version():
    source = CountingSource()
    feed = make_feed(source)
    for step in (1, 2):
        feed.next()
        feed.advance(step)
    assert source.versions == [1, 2]


def test_a_source_that_is_too_slow_names_what_is_there():
    feed = make_feed(CountingSource(at_once=1), seconds=0.0)
    with pytest.raises(DeadlineExceeded, match=r"batch of 4 groups took longer than 0 s.*1 groups are complete"):
        feed.next()


def test_errors_of_the_source_pass_through():
    source = CountingSource()
    source.error = RewardError("it failed")
    with pytest.raises(RewardError, match="it failed"):
        make_feed(source).next()


def test_counters_are_the_sources():
    source = CountingSource()
    feed = make_feed(source)
    feed.next()
    assert feed.counters() == {"given": 4.0}


def test_it_goes_on_where_it_was():
    straight, stopped, resumed = (make_feed(CountingSource()) for _ in range(3))
    for feed in (straight, stopped):
        feed.next()
        feed.advance(1)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.next() == straight.next() == "7,6,5,4"


def test_a_version_is_heard_of_though_no_batch_is_open():
    """As after a restart in the middle of a batch's iterations."""
    source = CountingSource()
    feed = make_feed(source)
    feed.advance(3)
    assert feed.next() == "3,2,1,0"
    feed.advance(4)
    assert feed.next() == "7,6,5,4"
    assert source.versions == [3, 4]


def test_the_source_hears_of_a_checkpoint_and_of_the_end_and_is_closed():
    source = CountingSource()
    feed = make_feed(source)
    feed.saved()
    assert source.safe and not source.completed
    feed.complete()
    feed.close()
    assert source.completed and source.closed == 1


def test_after_an_error_the_feed_can_be_asked_again():
    source = CountingSource()
    source.error = RewardError("the reward hangs")
    feed = make_feed(source, seconds=0.2)
    for _ in range(2):
        with pytest.raises(RewardError):
            feed.next()
    source.error = None
    assert feed.next() == "3,2,1,0"


class OneByOne(ScriptedSource):
    """Hands over one group a call, as they are finished."""

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        return super().next_groups(1, deadline=deadline)


def test_advantages_and_replay_see_the_whole_batch_however_its_groups_come():
    """By the chunk, batch statistics would be those of a chunk, and there would be no group to replace."""
    seen: list[list[str]] = []

    def advantages(groups: Sequence[Group]) -> list[Group]:
        seen.append([group.prompt.id for group in groups])
        return list(groups)

    source = OneByOne(lambda name, _: (0.0, float(int(name) % 2 == 0)))
    feed = SynchronousFeed(
        collector=Collector(source, count=2),
        finisher=Finisher(advantages=advantages, pack=len, replay=ReplayBuffer(size=4, seed=0)),
        batch_deadline_s=LONG_S,
    )
    for step in (1, 2):
        assert feed.next() == 2
        feed.advance(step)
    assert seen == [["0", "1"], ["2", "0"]], "3 has no signal, and what 0 taught is used again"
    assert feed.counters()["replayed_groups"] == 1
