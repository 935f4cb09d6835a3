"""Someone looks around while a call blocks."""

from __future__ import annotations

import threading

import pytest

from lachesis.common.attended import attended
from lachesis.common.errors import DataError, EngineError


def never() -> None:
    raise AssertionError("nobody had to look around")


def test_what_the_call_returns_or_raises_is_passed_on():
    assert attended(lambda: 7, watch=never) == 7

    def fails() -> None:
        raise DataError("it failed")

    with pytest.raises(DataError, match="it failed"):
        attended(fails, watch=never)


def test_the_watch_is_called_until_the_call_is_done():
    may_end, looks = threading.Event(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            may_end.set()

    assert attended(lambda: may_end.wait(60), watch=look) is True
    assert len(looks) >= 2


def test_a_call_that_hangs_is_left_behind():
    hanging, ended = threading.Event(), threading.Event()

    def hangs() -> None:
        hanging.wait(60)
        ended.set()

    def gone() -> None:
        raise EngineError("no use")

    with pytest.raises(EngineError, match="no use"):
        attended(hangs, watch=gone)
    assert not ended.is_set()
    hanging.set()
    assert ended.wait(60)


def test_a_timeout_of_the_call_is_no_look():
    def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        attended(fails, watch=never)
