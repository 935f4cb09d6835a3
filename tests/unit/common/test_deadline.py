from __future__ import annotations

import threading
import time

import pytest

from lachesis.common.deadline import Deadline, Retry, paused, wait_until, waits_now
from lachesis.common.errors import DeadlineExceeded, StopRequested


def names() -> list[str]:
    return [wait.deadline.name for wait in waits_now()]


def test_a_wait_is_known_while_it_lasts_the_outermost_first():
    outer, inner = Deadline("a batch", 10.0), Deadline("generation", None)
    assert names() == []
    with outer.waiting():
        with inner.waiting():
            assert names() == ["a batch", "generation"]
        assert names() == ["a batch"]
    assert names() == []


def test_a_wait_ends_with_an_error_too():
    with pytest.raises(DeadlineExceeded), Deadline("a batch", 1.0, started=time.monotonic() - 2).waiting() as _:
        (wait,) = waits_now()
        wait.deadline.check()
    assert names() == []


def test_a_deadline_that_is_waited_for_twice_is_two_waits():
    deadline = Deadline("a batch", 10.0)
    with deadline.waiting(), deadline.waiting():
        assert names() == ["a batch", "a batch"]
    assert names() == []


def test_progress_begins_the_limit_anew_also_of_the_wait_around_it():
    began = time.monotonic() - 5.0
    outer = Deadline("a batch", 5.2, started=began)
    inner = Deadline("generation", 5.1, started=began, outer=outer)
    inner.progressed()
    time.sleep(0.3)
    inner.check()
    outer.check()
    assert inner.elapsed_s() > 5.2 and outer.counted_s() < 5.0
    short = Deadline("a part", 0.05)
    short.progressed()
    time.sleep(0.1)
    with pytest.raises(DeadlineExceeded, match=r"a part made no progress for 0\.05 s"):
        short.check()


def test_every_thread_has_its_own():
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with Deadline("the other's", None).waiting():
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    with Deadline("mine", None).waiting():
        assert {wait.deadline.name: wait.thread for wait in waits_now()} == {
            "the other's": thread.ident,
            "mine": threading.get_ident(),
        }
    end.set()
    thread.join()
    assert names() == []


def test_waits_may_begin_and_end_while_they_are_read():
    """A dict that is changed while it is gone through raises; none of these may see that, or lose a wait."""
    rounds, errors = 2000, []

    def work(name: str) -> None:
        try:
            for _ in range(rounds):
                with Deadline(name, None).waiting():
                    assert name in names()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"wait {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert names() == []


def test_a_watch_ends_the_wait_before_its_time():
    asked: list[str] = []

    def stop() -> None:
        if asked:
            raise StopRequested(asked[0])

    deadline = Deadline("the engine", 60.0, watch=stop)
    deadline.check()
    asked.append("Ctrl-C")
    with pytest.raises(StopRequested, match="Ctrl-C"):
        deadline.check()


def test_pauses_double_up_to_the_longest_and_one_failure_is_told():
    said: list[str] = []
    retry = Retry(Deadline("it", None), first_s=0.5, longest_s=3.0, say=said.append, told_at=2)
    assert [retry.after(f"reason {number}") for number in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert said == ["reason 1"] and retry.failures == 5


def test_a_retry_ends_with_its_deadline_and_the_reason():
    retry = Retry(Deadline("the wait for it", 0.0, started=0.0))
    with pytest.raises(DeadlineExceeded, match=r"the wait for it took longer than 0 s.*nobody is there"):
        retry.after("nobody is there")


def test_waiting_until_nothing_is_missing():
    reasons, slept = iter(["not yet", "still not", ""]), []
    wait_until(lambda: next(reasons), Retry(Deadline("it", None)), sleep=slept.append)
    assert slept == [0.1, 0.2]


def test_a_pause_counts_towards_no_deadline_in_any_thread():
    before, found = Deadline("a batch", 0.05), list[float | None]()
    with paused():
        time.sleep(0.1)
        before.check()
        during = Deadline("another", 0.05)
        thread = threading.Thread(target=lambda: found.append(before.remaining_s()))
        thread.start(), thread.join()
        assert found[0], "there is time left"
        assert before.elapsed_s() > 0.1 > 0.05 > before.counted_s()
    during.check()
    time.sleep(0.06)
    for deadline in (before, during):
        with pytest.raises(DeadlineExceeded):
            deadline.check()
