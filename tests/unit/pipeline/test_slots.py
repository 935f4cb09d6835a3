from __future__ import annotations

import threading

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded
from lachesis.pipeline.slots import Slots
from tests.waiting import LONG_S

FOREVER = Deadline("test", None)


def test_slots_are_taken_up_to_the_capacity_and_given_back():
    slots = Slots(2)
    slots.acquire(deadline=FOREVER)
    slots.acquire(deadline=FOREVER)
    assert slots.taken == 2
    slots.release()
    assert slots.taken == 1
    slots.acquire(deadline=FOREVER)
    assert (slots.taken, slots.capacity) == (2, 2)


@pytest.mark.parametrize("capacity", [0, -1])
def test_there_is_at_least_one_slot(capacity):
    with pytest.raises(ValueError, match="at least 1"):
        Slots(capacity)


def test_waiting_for_a_slot_ends_at_the_deadline():
    slots = Slots(1)
    slots.acquire(deadline=FOREVER)
    with pytest.raises(DeadlineExceeded, match=r"producer took longer than 0\.05 s.*all 1 slots are taken") as caught:
        slots.acquire(deadline=Deadline("the producer", 0.05, setting="deadlines.batch_s"))
    assert "deadlines.batch_s" in caught.value.remedy
    assert slots.taken == 1


def test_a_wait_that_failed_holds_nothing():
    slots = Slots(1)
    slots.acquire(deadline=FOREVER)
    with pytest.raises(DeadlineExceeded):
        slots.acquire(deadline=Deadline("test", 0.0))
    slots.release()
    slots.acquire(deadline=FOREVER)
    assert slots.taken == 1


def test_a_free_slot_is_given_even_when_the_deadline_has_passed():
    Slots(1).acquire(deadline=Deadline("test", 0.0))


def test_a_released_slot_wakes_whoever_waits():
    slots = Slots(1)
    slots.acquire(deadline=FOREVER)
    got_it = threading.Event()

    def wait() -> None:
        slots.acquire(deadline=FOREVER)
        got_it.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not got_it.wait(0.05)
    slots.release()
    assert got_it.wait(LONG_S)
    waiting.join()
    assert slots.taken == 1


def test_no_more_than_the_capacity_is_ever_held():
    slots, most, lock = Slots(3), [], threading.Lock()
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(50):
            slots.acquire(deadline=FOREVER)
            with lock:
                most.append(slots.taken)
            slots.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(most), slots.taken) == (400, 0)
    assert 1 <= max(most) <= 3


def test_releasing_what_nobody_holds_is_a_programming_error():
    slots = Slots(1)
    with pytest.raises(RuntimeError, match="nobody holds"):
        slots.release()
    assert slots.taken == 0
