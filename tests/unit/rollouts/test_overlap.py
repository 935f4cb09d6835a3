from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, RewardError
from lachesis.rollouts.overlap import Overlap
from tests.waiting import LONG_S


def soon(seconds: float = LONG_S) -> Deadline:
    return Deadline("test: results", seconds, setting="deadlines.batch_s")


class Work:
    """Keeps what each call got. A call says that it has begun, and waits until it may go on."""

    def __init__(self, *, held: bool = False) -> None:
        self.calls: list[list[int]] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.held = held

    def __call__(self, items: Sequence[int]) -> int:
        self.calls.append(list(items))
        self.begun.release()
        if self.held:
            assert self.go_on.acquire(timeout=LONG_S)
        return sum(items)


def overlap(work: Work, *, at_least: int = 1) -> Overlap[int, int]:
    return Overlap(work, at_least=at_least, name="test-overlap")


def test_work_begins_before_all_items_are_there():
    work = Work()
    with overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        running.put(2)
        assert running.results(deadline=soon()) == [1, 2]


def test_a_call_gets_all_that_has_come_meanwhile_in_order():
    work = Work(held=True)
    with overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        for item in (2, 3, 4):
            running.put(item)
        work.go_on.release(2)
        assert running.results(deadline=soon()) == [1, 9]
    assert work.calls == [[1], [2, 3, 4]]


def test_it_waits_for_enough_items_and_the_last_call_gets_the_rest():
    work = Work()
    with overlap(work, at_least=3) as running:
        for item in (1, 2, 3):
            running.put(item)
        assert work.begun.acquire(timeout=LONG_S)
        running.put(4)
        assert running.results(deadline=soon()) == [6, 4]
    assert work.calls == [[1, 2, 3], [4]]


def test_nothing_gives_no_results_and_no_call():
    work = Work()
    with overlap(work) as running:
        assert running.results(deadline=soon()) == []
    assert work.calls == []


def test_an_error_is_raised_to_whoever_puts_in_more_and_waits():
    failed = threading.Event()

    class Failing(Work):
        def __call__(self, items: Sequence[int]) -> int:
            try:
                raise RewardError("no reward")
            finally:
                failed.set()

    with overlap(Failing()) as running:
        running.put(1)
        assert failed.wait(LONG_S)
        with pytest.raises(RewardError, match="no reward"):
            running.results(deadline=soon())
        with pytest.raises(RewardError, match="no reward"):
            running.put(2)


def test_results_have_a_deadline():
    work = Work(held=True)
    with overlap(work) as running:
        running.put(1)
        with pytest.raises(
            DeadlineExceeded, match=r"test: results took longer than 0.01 s .*0 of 1 are done"
        ) as caught:
            running.results(deadline=soon(0.01))
        assert "deadlines.batch_s" in caught.value.remedy
        work.go_on.release()


def test_leaving_it_early_begins_no_further_call():
    work = Work(held=True)
    before = set(threading.enumerate())
    with pytest.raises(KeyError), overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        running.put(2)
        raise KeyError("what is put in has failed")
    (thread,) = set(threading.enumerate()) - before
    work.go_on.release(2)
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert work.calls == [[1]]


def test_seconds_are_those_of_work_up_to_a_moment():
    work = Work(held=True)
    before = time.monotonic()
    with overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        middle = time.monotonic()
        work.go_on.release(2)
        running.results(deadline=soon())
        running_s = running.seconds()
        assert running.seconds(until=before) == 0.0
        assert 0.0 <= running.seconds(until=middle) <= running_s
        assert running_s <= time.monotonic() - before
        assert running_s > 0.0
