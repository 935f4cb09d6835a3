from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from lachesis.rollouts.rewards.calls import BadValue, CallThread, read_rewards
from tests.waiting import LONG_S


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
            "import time\nfrom lachesis.rollouts.rewards.calls import CallThread\n"
            "assert CallThread('x').call(time.sleep, {'seconds': 600}, timeout_s=0.05) is not None\n"
            "def hang():\n    time.sleep(600)\n"
            "assert CallThread('x').call(hang, {}, timeout_s=0.05).hung\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG_S)


class TestValues:
    @pytest.mark.parametrize(
        "result",
        [
            [1, 0.5, True],
            (1.0, 0.5, 1),
            np.array([1, 0.5, 1], dtype=np.float32),
            torch.tensor([1, 0.5, 1], dtype=torch.bfloat16, requires_grad=True),
            [np.float32(1), np.float64(0.5), np.bool_(True)],
            [torch.tensor(1), torch.tensor(0.5), np.array(1)],
        ],
    )
    def test_numbers_of_all_kinds(self, result):
        values = read_rewards(result, 3)
        assert values == [1.0, 0.5, 1.0]
        assert {type(value) for value in values} == {float}

    def test_abstaining(self):
        assert read_rewards([None, 0.0], 2) == [None, 0.0]

    @pytest.mark.parametrize("bad", [math.nan, -math.inf, "1", 1j, [1.0], torch.ones(1), np.nan, 10**400])
    def test_a_bad_value_is_found_in_its_place(self, bad):
        values = read_rewards([0.5, bad, None], 3)
        assert values[0] == 0.5
        assert values[2] is None
        assert isinstance(values[1], BadValue)

    def test_nan_in_arrays(self):
        assert isinstance(read_rewards(np.array([1.0, np.nan]), 2)[1], BadValue)
        assert isinstance(read_rewards(torch.tensor([1.0, torch.inf]), 2)[1], BadValue)

    @pytest.mark.parametrize(
        ("result", "what"),
        [
            (None, "returned None, not a list"),
            (0.5, "returned a float (0.5), not a list"),
            ("0 1", "returned a str ('0 1'), not a list"),
            ({0: 1, 1: 1}, "returned a dict"),
            ((x for x in [1, 2]), "returned a generator"),
            (torch.tensor(1.0), "returned a float"),
            ([1.0], "returned 1 rewards for 2 completions"),
            (np.ones(3), "returned 3 rewards for 2 completions"),
            ([], "returned 0 rewards for 2 completions"),
        ],
    )
    def test_results_that_are_no_list_of_rewards(self, result, what):
        bad = read_rewards(result, 2)
        assert isinstance(bad, BadValue)
        assert bad.what.startswith(what)
