"""Someone looks around while a call blocks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from lachesis.common.errors import DataError, EngineError
from lachesis.process.threads import CallThread, DaemonThread, call_watched
from tests.waiting import LONG_S


def never() -> None:
    raise AssertionError("nobody had to look around")


def test_what_the_call_returns_or_raises_is_passed_on():
    assert call_watched(lambda: 7, watch=never) == 7

    def fails() -> None:
        raise DataError("it failed")

    with pytest.raises(DataError, match="it failed"):
        call_watched(fails, watch=never)


def test_the_watch_is_called_until_the_call_is_done():
    may_end, looks = threading.Event(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            may_end.set()

    assert call_watched(lambda: may_end.wait(60), watch=look) is True
    assert len(looks) >= 2


def test_a_call_that_hangs_is_left_behind():
    hanging, ended = threading.Event(), threading.Event()

    def hangs() -> None:
        hanging.wait(60)
        ended.set()

    def gone() -> None:
        raise EngineError("no use")

    with pytest.raises(EngineError, match="no use"):
        call_watched(hangs, watch=gone)
    assert not ended.is_set()
    hanging.set()
    assert ended.wait(60)


def test_a_timeout_of_the_call_is_no_look():
    def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        call_watched(fails, watch=never)


@pytest.fixture
def thread():
    thread = CallThread("test")
    yield thread
    thread.close()


class TestCalls:
    def test_results_and_exceptions_come_back(self, thread):
        assert thread.call(lambda a, b: a - b, {"b": 1, "a": 3}, timeout_s=LONG_S).result == 2
        outcome = thread.call(lambda: {}["key"], {}, timeout_s=LONG_S)
        assert isinstance(outcome.error, KeyError)
        assert not outcome.hung

    def test_the_functions_own_timeout_error_is_no_hang(self, thread):
        def slow_server() -> None:
            raise TimeoutError("server")

        outcome = thread.call(slow_server, {}, timeout_s=LONG_S)
        assert isinstance(outcome.error, TimeoutError)
        assert not outcome.hung

    def test_exiting_is_an_error_like_others(self, thread):
        assert isinstance(thread.call(sys.exit, {}, timeout_s=LONG_S).error, SystemExit)
        assert thread.call(lambda: 1, {}, timeout_s=LONG_S).result == 1

    def test_one_daemon_thread_serves_all_calls(self, thread):
        seen = [thread.call(threading.current_thread, {}, timeout_s=LONG_S).result for _ in range(3)]
        assert seen[0] is seen[1] is seen[2] is not threading.main_thread()
        assert seen[0].daemon

    def test_a_hang_is_left_behind_and_the_next_call_gets_a_new_thread(self, thread):
        release = threading.Event()
        before = thread.call(threading.current_thread, {}, timeout_s=LONG_S).result
        assert thread.call(release.wait, {}, timeout_s=0.05).hung
        after = thread.call(threading.current_thread, {}, timeout_s=LONG_S).result
        assert after is not before
        release.set()
        before.join(timeout=LONG_S)
        assert not before.is_alive()

    def test_coroutines_are_awaited_in_one_loop(self, thread):
        async def loop_after(seconds: float) -> asyncio.AbstractEventLoop:
            await asyncio.sleep(seconds)
            return asyncio.get_running_loop()

        first, second = (thread.call(loop_after, {"seconds": 0.001}, timeout_s=LONG_S).result for _ in range(2))
        assert first is second

    def test_a_coroutine_that_hangs_is_cancelled(self, thread):
        cancelled = threading.Event()

        async def forever() -> None:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        assert thread.call(forever, {}, timeout_s=0.05).hung
        assert cancelled.wait(timeout=LONG_S)

    def test_a_closed_thread_ends_and_can_be_called_again(self, thread):
        worker = thread.call(threading.current_thread, {}, timeout_s=LONG_S).result
        thread.close()
        worker.join(timeout=LONG_S)
        assert not worker.is_alive()
        assert thread.call(lambda: 1, {}, timeout_s=LONG_S).result == 1

    def test_a_hang_does_not_keep_the_interpreter(self):
        program = (
            "import time\nfrom lachesis.process.threads import CallThread\n"
            "assert CallThread('x').call(time.sleep, {'seconds': 600}, timeout_s=0.05) is not None\n"
            "def hang():\n    time.sleep(600)\n"
            "assert CallThread('x').call(hang, {}, timeout_s=0.05).hung\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG_S)


def test_a_call_that_is_cancelled_before_its_turn_leaves_the_thread_to_the_next():
    thread, go_on = DaemonThread("a thread"), threading.Event()
    first = thread.submit(go_on.wait, {"timeout": LONG_S})
    second, third = thread.submit(int, {}), thread.submit(str, {})
    assert second.cancel()
    go_on.set()
    assert first.result(LONG_S) and third.result(LONG_S) == ""
    thread.abandon()


@pytest.mark.parametrize(
    ("seconds", "limit_s", "said"), [(0.3, LONG_S, "there is still an interpreter\n"), (600.0, 0.1, "")]
)
def test_the_end_of_the_interpreter_waits_for_what_was_begun_aside_but_not_for_ever(
    seconds: float, limit_s: float, said: str
):
    program = (
        f"import time\nfrom lachesis.process import threads\nthreads._AT_EXIT_S = {limit_s}\n"
        f"threads.call_aside(lambda: (time.sleep({seconds}), print('there is still an interpreter')), name='aside')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG_S, capture_output=True, text=True)
    assert ended.stdout == said
