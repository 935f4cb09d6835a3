from __future__ import annotations

from lachesis.metrics.meters import BusyTime, TimeAverage


class Clock:
    """Stands still but where it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_that_overlap_count_once():
    clock = Clock()
    busy = BusyTime(clock)
    with busy.span():
        clock.now += 2
        with busy.span():
            clock.now += 3
        assert busy.take() == 5, "also of a span that goes on"
        clock.now += 1
    clock.now += 10
    assert busy.take() == 1
    assert busy.take() == 0


def test_a_number_counts_for_as_long_as_it_holds():
    clock = Clock()
    slots = TimeAverage(clock)
    slots.change(4)
    clock.now += 1
    slots.change(0)
    clock.now += 3
    assert slots.take() == 1.0
    clock.now += 5
    assert slots.take() == 0.0
    slots.change(7)
    assert slots.take() == 7.0, "no time has passed"
