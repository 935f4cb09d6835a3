"""Generation beside training: what is asked for when, what a step gets, and that nothing is lost, whatever happens."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError, RewardError
from lachesis.common.types import Group
from lachesis.pipeline.collect import Collector, Reroll
from lachesis.pipeline.feed import Finisher, SynchronousFeed
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.pipeline.replay import ReplayBuffer
from lachesis.rollouts.base import Done, Draw
from tests.unit.pipeline.sources import ScriptedSource
from tests.waiting import LONG_S, until

Names = list[str]


def names(groups: Sequence[Group]) -> Names:
    return [group.prompt.id for group in groups]


MakeFeed = Callable[..., AsynchronousFeed[Names]]


@pytest.fixture
def make_feed() -> Iterator[MakeFeed]:
    """Feeds of 2 groups a batch, closed in the end."""
    feeds: list[AsynchronousFeed[Names]] = []

    def make(source: ScriptedSource, *, ahead=1, seconds=LONG_S, refills=0, reroll=None, replay=None, **options):
        feed = AsynchronousFeed(
            source=source,
            collector=Collector(source, count=2, refill_rounds=refills, reroll=reroll),
            finisher=Finisher(advantages=list, pack=names, replay=replay),
            ahead=ahead,
            batch_deadline_s=seconds,
            **options,
        )
        feeds.append(feed)
        return feed

    yield make
    for feed in feeds:
        if isinstance(feed.source, ScriptedSource):
            feed.source.let_go()
        feed.close()


def settled(feed: AsynchronousFeed[Names], finished: int) -> None:
    """Wait until so many groups wait for their step."""
    until(lambda: feed.counters()["groups_waiting"] == finished)


def train(feed: AsynchronousFeed[Names], steps: int, *, start: int = 0) -> list[Names]:
    batches = []
    for step in range(start + 1, start + steps + 1):
        batches.append(feed.next())
        feed.advance(step)
    return batches


class TestWhatIsAskedFor:
    @pytest.mark.parametrize("ahead", [1, 3])
    def test_slots_bound_how_far_generation_runs_ahead(self, make_feed: MakeFeed, ahead: int):
        source = ScriptedSource()
        feed = make_feed(source, ahead=ahead)
        feed.next()
        until(lambda: len(source.taken) == 2 * (1 + ahead))
        time.sleep(0.02)
        assert len(source.drawn) == 2 * (1 + ahead), "nothing more until the batch was trained on"
        feed.advance(1)
        until(lambda: len(source.taken) == 2 * (2 + ahead))

    def test_slots_that_are_free_are_used_while_a_slow_group_is_still_generated(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("0")
        feed = make_feed(source)
        assert feed.next() == ["1", "2"]
        assert sorted(source.calls) == [["0", "1"], ["2", "3"]], "at most a batch in one call"
        feed.advance(1)
        until(lambda: source.calls[2:] == [["4", "5"]])
        settled(feed, 3)
        source.let_go("0")
        assert feed.next() == ["0", "3"], "the oldest come first"

    def test_calls_come_one_after_the_other_where_the_engine_does_one(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("2")
        feed = make_feed(source, at_once=1)
        assert feed.next() == ["0", "1"]
        feed.advance(1)
        time.sleep(0.02)
        assert source.calls == [["0", "1"], ["2", "3"]] and feed.counters()["idle_slots"] > 0
        source.let_go("2")
        until(lambda: source.calls[2:] == [["4", "5"]])
        assert feed.next() == ["2", "3"]

    def test_slots_stand_empty_for_no_time_where_the_engine_takes_what_it_can_get(self, make_feed: MakeFeed):
        feed = make_feed(ScriptedSource(), clock=iter(range(10_000)).__next__)
        for step in range(1, 6):
            feed.next()
            settled(feed, 2)
            counts = feed.counters()
            assert counts["idle_slots"] == 0.0
            feed.advance(step)


class TestWhatAStepGets:
    def test_a_slow_group_is_waited_for_when_it_would_become_too_old(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("0")
        feed = make_feed(source)
        feed.next()
        feed.advance(1)
        threading.Timer(0.05, source.let_go).start()
        assert feed.next() == ["0", "3"]

    @pytest.mark.parametrize("ahead", [1, 2])
    def test_no_sample_is_older_than_the_batches_ahead(self, make_feed: MakeFeed, ahead: int):
        source, ages = ScriptedSource(), []
        feed = make_feed(source, ahead=ahead)
        feed.finisher = Finisher(advantages=list, pack=lambda groups: ages.extend(_ages(groups, step)) or [])
        for step in range(12):
            source.hold(str(step * 3))
            threading.Timer(0.005, source.let_go).start()
            feed.next()
            feed.advance(step + 1)
        assert min(ages) >= 0 and max(ages) == ahead

    def test_with_nothing_ahead_batches_are_those_of_a_synchronous_run(self, make_feed: MakeFeed):
        def rewards(name: str, attempt: int) -> tuple[float, float]:
            return (0.0, float(int(name) % 3 > 0))

        plain, other = ScriptedSource(rewards), ScriptedSource(rewards)
        other.hold("0", "2", "6")
        collector = Collector(plain, count=2, reroll=Reroll(start_step=2, max_groups=1))
        synchronous = SynchronousFeed(
            collector=collector, finisher=Finisher(advantages=list, pack=names), batch_deadline_s=LONG_S
        )
        feed = make_feed(other, ahead=0, reroll=Reroll(start_step=2, max_groups=1))
        for step in range(1, 8):
            threading.Timer(0.01, other.let_go).start()
            assert feed.next() == synchronous.next()
            feed.advance(step)
            synchronous.advance(step)
        assert feed.counters()["rerolled_groups"] > 0 < synchronous.counters()["rerolled_groups"]

    def test_groups_without_signal_are_put_aside_so_often_and_others_take_their_places(self, make_feed: MakeFeed):
        dull = {"0", "2", "4", "5", "6"}
        source = ScriptedSource(lambda name, attempt: (1.0, 1.0) if name in dull else (0.0, 1.0))
        feed = make_feed(source, ahead=0, refills=2)
        assert train(feed, 2) == [["1", "3"], ["7", "8"]], "5 and 7 came for 4, 6 and 8 for 5"
        assert feed.counters()["refilled_groups"] == 5
        never = make_feed(ScriptedSource(lambda name, attempt: (1.0, 1.0)), ahead=0, refills=2)
        assert set(never.next()) <= {"3", "4", "5"}, "the last one of each place stands"

    def test_groups_whose_reward_failed_are_replaced(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.failing = {"0", "3"}
        trained = [name for batch in train(make_feed(source), 3) for name in batch]
        assert sorted(trained) == ["1", "2", "4", "5", "6", "7"]

    def test_but_not_without_end(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.failing = {str(n) for n in range(1000)}
        feed = make_feed(source)
        with pytest.raises(RewardError, match="the rewards of 20 groups in a row failed; the last: it failed"):
            feed.next()
        source.failing.clear()
        assert len(feed.next()) == 2


class RaggedSource(ScriptedSource):
    """Log-normal lengths, one of a hundred ten times as long as the median one, which takes less than a step."""

    def __init__(self, *, prompts: int) -> None:
        super().__init__()
        self.waited_for: set[str] = set()
        self.hold(*(str(number) for number in range(prompts) if self.steps(str(number)) > 0))

    def length(self, name: str) -> int:
        """Tokens of each completion of that prompt."""
        return max(1, round(10 * random.Random(int(name)).lognormvariate(0.0, math.log(10) / 2.326)))

    def steps(self, name: str) -> int:
        """For how many steps such a group is generated, if it is not waited for."""
        return self.length(name) // 20

    def end_those_due(self, step: int) -> None:
        """Finish what began as long ago as it takes."""
        self.let_go("", *(name for name in self.drawn if step - int(name) // 2 >= self.steps(name)))

    def end_all(self) -> None:
        """Finish whatever has begun: time passes while it is waited for."""
        self.waited_for |= self._held & set(self.drawn)
        self.let_go("", *self.drawn)

    def _group(self, name: str, version: int) -> Group:
        plain, length = super()._group(name, version), self.length(name)
        longer = [replace(one, completion_ids=(3,) * length, logprobs=(-0.5,) * length) for one in plain.samples]
        return replace(plain, samples=tuple(longer))


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_lengths_trained_on_are_those_generated(make_feed: MakeFeed, ahead: int):
    """Not the short ones sooner, and the long ones never: each prompt is trained on once, soon after its turn."""
    steps = 150
    count = 2 * steps
    source, trained = RaggedSource(prompts=count + 20), list[Group]()
    feed = make_feed(source, ahead=ahead)
    feed.finisher = Finisher(advantages=list, pack=lambda groups: trained.extend(groups) or [])
    for step in range(steps):
        source.end_those_due(step)
        waited = threading.Timer(0.01, source.end_all)
        waited.start()
        feed.next()
        waited.cancel()
        feed.advance(step + 1)
    places = {int(one.prompt.id): place for place, one in enumerate(trained)}
    assert len(places) == len(trained) == count, "none twice"
    assert source.waited_for, "some take longer than the batches ahead"
    assert all(place // 2 <= number // 2 + ahead for number, place in places.items()), "no other is left behind"
    missing = set(range(count)) - places.keys()
    assert all(number // 2 + ahead >= steps for number in missing), "but for those last in line"
    lengths = sorted(len(one.samples[0].completion_ids) for one in trained)
    generated = sorted(source.length(str(number)) for number in range(count))
    assert len(missing) <= 2 * ahead
    for place in (count // 2, count * 9 // 10, count * 99 // 100 - 2 * ahead):
        assert generated[place - 2 * ahead] <= lengths[place] <= generated[place + 2 * ahead]
    assert lengths[count * 98 // 100] > 5 * lengths[count // 2], "they are ragged"


def _ages(groups: Sequence[Group], version: int) -> list[int]:
    return [version - group.samples[0].versions.first for group in groups]


class LateSource(ScriptedSource):
    """The second call hears of an error only ``late``."""

    def __init__(self) -> None:
        super().__init__()
        self.late = threading.Event()

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        try:
            super().roll_out(draws, deadline=deadline, done=done)
        except EngineError:
            assert draws[0].prompt.id != "4" or self.late.wait(LONG_S)
            raise


class TestFailures:
    def test_an_error_is_raised_to_the_trainer_and_what_was_lost_asked_for_again(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("0")
        feed = make_feed(source)
        assert feed.next() == ["1", "2"]
        feed.advance(1)
        until(lambda: len(source.calls) == 3)
        source.fail(EngineError("the engine died"))
        with pytest.raises(EngineError, match="died"):
            feed.next()
        source.error = None
        source.let_go()
        assert train(feed, 3, start=1) == [["0", "3"], ["4", "5"], ["6", "7"]]
        assert sorted(set(source.requests)) == list(range(len(source.drawn))), "with the same seeds"

    def test_one_death_is_told_once_however_many_calls_it_ends(self, make_feed: MakeFeed):
        source = LateSource()
        source.hold("0", "3", "4", "5")
        feed = make_feed(source)
        assert feed.next() == ["1", "2"]
        feed.advance(1)
        until(lambda: len(source.calls) == 3)
        source.fail(EngineError("the engine died"))
        with pytest.raises(EngineError):
            feed.next()
        source.error = None
        source.late.set()
        source.let_go()
        assert train(feed, 2, start=1) == [["0", "3"], ["4", "5"]]

    def test_what_failed_before_the_engine_got_new_weights_is_not_told_any_more(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("2", "3")
        feed = make_feed(source)
        assert feed.next() == ["0", "1"]
        source.fail(EngineError("the engine died"))
        until(lambda: feed._error is not None)
        source.error = None
        source.let_go()
        feed.advance(1)
        assert feed.next() == ["2", "3"]

    def test_what_is_lost_with_an_engine_that_restarts_with_its_weights_is_asked_for_again(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("0", "3")
        feed = make_feed(source)
        assert feed.next() == ["1", "2"]
        feed.advance(1)
        source.fail(EngineError("the engine restarts"), calls=2)
        until(lambda: sorted(name for call in source.calls[3:] for name in call) == ["0", "3"])
        source.let_go()
        assert feed.next() == ["0", "3"]

    def test_a_wait_that_takes_too_long_says_who_waits_and_what_is_there(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("0", "2", "3")
        feed = make_feed(source, seconds=0.05)
        with pytest.raises(DeadlineExceeded, match=r"generated ahead .* 1 of 2 groups are complete, 3 others"):
            feed.next()

    def test_closing_ends_what_is_under_way(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("0", "1")
        feed = make_feed(source)
        assert feed.next() == ["2", "3"]
        (thread,) = {call.thread for call in feed._calls.values()}
        threading.Timer(0.02, source.let_go, args=("0",)).start()
        feed.saved()
        feed.complete()
        feed.close()
        assert source.safe and source.completed
        assert not thread.is_alive(), "at its next group, though another is still to come"
        assert len(source.calls) == 2
        feed.close()
        assert source.closed == 2


class TestCheckpoints:
    def test_who_was_in_line_is_in_line_again_and_nothing_is_lost_or_doubled(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("0", "4", "5")
        first = make_feed(source, ahead=2, replay=ReplayBuffer(size=2, seed=0))
        assert first.next() == ["1", "2"]
        first.advance(1)
        until(lambda: len(source.calls) == 4)
        settled(first, 3)
        state = json.loads(json.dumps(first.state_dict()))
        other = ScriptedSource()
        second = make_feed(other, ahead=2, replay=ReplayBuffer(size=2, seed=7))
        second.load_state_dict(state)
        assert train(second, 3, start=1) == [["0", "3"], ["4", "5"], ["6", "7"]]
        assert [call for call in other.calls if set(call) & set("012345")] == [["0", "4"], ["5"]], (
            "no finished one again"
        )
        assert sorted(other.requests)[:3] == [0, 4, 5]
        with pytest.raises(LachesisError, match="resumed"):
            second.load_state_dict(state)

    def test_a_batch_in_use_holds_its_slots_after_a_restart_too(self, make_feed: MakeFeed):
        source = ScriptedSource()
        first = make_feed(source)
        first.next()
        settled(first, 2)
        other = ScriptedSource()
        second = make_feed(other)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        second.advance(1)
        assert second.next() == ["2", "3"]
        assert other.drawn[4:] == ["4", "5"]

    def test_a_synchronous_run_takes_the_prompts_that_were_in_line(self, make_feed: MakeFeed):
        source = ScriptedSource()
        source.hold("2")
        ahead = make_feed(source)
        ahead.next()
        ahead.advance(1)
        settled(ahead, 3)
        other = ScriptedSource()
        feed = SynchronousFeed(
            collector=Collector(other, count=4),
            finisher=Finisher(advantages=list, pack=names),
            batch_deadline_s=LONG_S,
        )
        feed.load_state_dict(json.loads(json.dumps(ahead.state_dict())))
        assert [feed.next(), feed.next()] == [["2", "3", "4", "5"], ["6", "7", "8", "9"]]
