from __future__ import annotations

import json
import threading
import time

import pytest

from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError
from lachesis.pipeline.collect import Collector
from lachesis.pipeline.feed import Finisher
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.pipeline.replay import ReplayBuffer
from tests.unit.pipeline.sources import ScriptedSource
from tests.waiting import LONG_S, until


def make_feed(
    source, *, depth=1, max_staleness=None, seconds=LONG_S, replay=None, uses=1
) -> AsynchronousFeed[list[str]]:
    return AsynchronousFeed(
        collector=Collector(source, count=2),
        finisher=Finisher(advantages=list, pack=lambda groups: [g.prompt.id for g in groups], replay=replay),
        depth=depth,
        max_staleness=max_staleness,
        batch_deadline_s=seconds,
        uses=uses,
    )


@pytest.fixture
def closing():
    feeds = []
    yield feeds.append
    for feed in feeds:
        feed.close()


def test_batches_come_in_order_and_the_next_is_made_meanwhile(closing):
    source = ScriptedSource()
    feed = make_feed(source)
    closing(feed)
    assert feed.next() == ["0", "1"]
    until(lambda: len(source.taken) == 4)
    feed.advance(1)
    assert feed.next() == ["2", "3"]


@pytest.mark.parametrize("depth", [1, 3])
def test_slots_bound_how_far_generation_runs_ahead(closing, depth):
    source = ScriptedSource()
    feed = make_feed(source, depth=depth)
    closing(feed)
    feed.next()
    until(lambda: len(source.taken) == 2 * (1 + depth))
    time.sleep(0.05)
    assert len(source.taken) == 2 * (1 + depth), "nothing more until the batch was trained on"
    feed.advance(1)
    until(lambda: len(source.taken) == 2 * (2 + depth))


def test_no_sample_is_older_than_the_depth(closing):
    source = ScriptedSource()
    ages = []
    feed = make_feed(source, depth=2)
    feed.finisher = Finisher(
        advantages=list, pack=lambda groups: ages.extend(step - g.samples[0].versions.first for g in groups)
    )
    closing(feed)
    for step in range(12):
        feed.next()
        feed.advance(step + 1)
    assert min(ages) >= 0 and max(ages) <= 2


def test_stale_groups_are_dropped_counted_and_made_up_for(closing):
    gate = threading.Semaphore(2)
    source = ScriptedSource(gate=gate)
    feed = make_feed(source, depth=2, max_staleness=0)
    closing(feed)
    assert feed.next() == ["0", "1"]
    until(lambda: len(source.taken) == 4)
    feed.advance(1)
    gate.release(20)
    assert feed.next() == ["4", "5"], "2 and 3 were sampled under version 0"
    assert feed.counters()["stale_groups"] == 2


@pytest.mark.parametrize(("max_staleness", "second"), [(3, ["2", "3"]), (2, ["4", "5"])])
def test_the_last_use_of_a_batch_is_within_the_limit_too(closing, max_staleness, second):
    """Generated under version 0, first used at version 2, and for the second time at version 3."""
    gate = threading.Semaphore(2)
    source = ScriptedSource(gate=gate)
    feed = make_feed(source, depth=2, max_staleness=max_staleness, uses=2)
    closing(feed)
    assert feed.next() == ["0", "1"]
    until(lambda: len(source.taken) == 4)
    feed.advance(2)
    gate.release(20)
    assert feed.next() == second
    assert feed.counters()["stale_groups"] == (0 if max_staleness == 3 else 2)


def test_batches_that_are_all_stale_do_not_starve_the_producer(closing):
    source = ScriptedSource()
    feed = make_feed(source, depth=1, max_staleness=0)
    closing(feed)
    for step in range(6):
        assert len(feed.next()) == 2
        until(lambda: feed._queue.qsize() == 1)
        feed.advance(step + 1)
    assert feed.counters()["stale_groups"] >= 8


class CountingSource(ScriptedSource):
    """Counts groups, and says the number of the call as if a reward function had logged it."""

    calls = 0

    def next_groups(self, count, *, deadline):
        self.calls += 1
        return super().next_groups(count, deadline=deadline)

    def counters(self):
        counted, self.taken = float(len(self.taken)), []
        return {"sampled": counted, "reward_metrics/call": float(self.calls)}


def test_what_a_step_counts_is_of_its_own_batch_whatever_was_generated_meanwhile(closing):
    feed = make_feed(CountingSource(), depth=2)
    closing(feed)
    for step in range(1, 4):
        assert feed.next() == [str(2 * step - 2), str(2 * step - 1)]
        until(lambda: feed._queue.qsize() == 2)
        counters = feed.counters()
        assert (counters["sampled"], counters["reward_metrics/call"]) == (2.0, step)
        assert feed.counters()["sampled"] == 0.0, "a second use of the batch samples nothing"
        feed.advance(step)


def test_a_step_made_of_several_batches_counts_them_all(closing):
    source = CountingSource()
    feed = make_feed(source, depth=1, max_staleness=0)
    closing(feed)
    feed.next()
    feed.counters()
    until(lambda: feed._queue.qsize() == 1)
    feed.advance(1)
    assert feed.next() == ["4", "5"]
    counters = feed.counters()
    assert (counters["sampled"], counters["stale_groups"]) == (4.0, 2.0)
    assert counters["reward_metrics/call"] == 3.0, "a mean, of which the last stands"


def test_an_error_of_the_producer_is_raised_to_the_trainer(closing):
    source = ScriptedSource()
    source.error = EngineError("the engine died")
    feed = make_feed(source)
    closing(feed)
    with pytest.raises(EngineError, match="died"):
        feed.next()


def test_a_wait_that_takes_too_long_says_who_waits_and_what_is_there(closing):
    gate = threading.Semaphore(0)
    feed = make_feed(ScriptedSource(gate=gate), seconds=0.05)
    closing(feed)
    with pytest.raises(DeadlineExceeded, match=r"generated ahead .* 0 of 2 groups are there, 1 batches are under way"):
        feed.next()
    gate.release(5)


def test_a_checkpoint_goes_on_after_the_last_batch_taken(closing):
    source = ScriptedSource()
    first = make_feed(source, depth=3, replay=ReplayBuffer(size=2, seed=0))
    closing(first)
    first.next()
    first.advance(1)
    until(lambda: len(source.taken) >= 8)
    state = json.loads(json.dumps(first.state_dict()))
    other = ScriptedSource()
    second = make_feed(other, depth=3, replay=ReplayBuffer(size=2, seed=7))
    closing(second)
    second.load_state_dict(state)
    assert other.version == 1, "what it generates from now on is of the policy of now"
    assert second.next() == ["2", "3"]
    assert other.taken[0] == "2"
    with pytest.raises(LachesisError, match="resumed"):
        second.load_state_dict(state)


def test_groups_left_over_are_part_of_the_state(closing):
    source = ScriptedSource()
    feed = make_feed(source)
    closing(feed)
    feed.next()
    feed._left = [source._next()]
    state = json.loads(json.dumps(feed.state_dict()))
    resumed = make_feed(ScriptedSource())
    closing(resumed)
    resumed.load_state_dict(state)
    assert resumed.next() == [feed._left[0].prompt.id, "2"]


def test_closing_ends_the_thread_also_while_it_waits(closing):
    source = ScriptedSource()
    feed = make_feed(source)
    feed.next()
    thread = feed._thread
    assert thread is not None
    feed.close()
    assert not thread.is_alive()
    feed.close()
    assert source.closed == 2


def test_after_an_error_the_feed_can_be_asked_again(closing):
    source = ScriptedSource()
    source.error = EngineError("the engine died")
    feed = make_feed(source, depth=1)
    closing(feed)
    for _ in range(3):
        with pytest.raises(EngineError):
            feed.next()
    source.error = None
    assert feed.next() == ["0", "1"]
    feed.advance(1)
    assert feed.next() == ["2", "3"]


class LaggingSource(ScriptedSource):
    """An engine that gets new weights every third step only."""

    def report_version(self, version: int) -> None:
        super().report_version(version // 3 * 3)


@pytest.mark.parametrize("max_staleness", [None, 2])
def test_age_counts_the_steps_without_a_transfer_too(closing, max_staleness):
    """Depth alone is no bound where weights travel every N steps: up to N - 1 more are between them."""
    ages = []
    feed = make_feed(LaggingSource(), depth=1, max_staleness=max_staleness)
    feed.finisher = Finisher(
        advantages=list, pack=lambda groups: ages.extend(step - g.samples[0].versions.first for g in groups)
    )
    closing(feed)
    dropped = 0.0
    for step in range(9):
        feed.next()
        dropped += feed.counters()["stale_groups"]
        until(lambda: feed._queue.qsize() == 1)
        feed.advance(step + 1)
    assert max(ages) == (3 if max_staleness is None else max_staleness)
    assert (dropped > 0) == (max_staleness is not None)
