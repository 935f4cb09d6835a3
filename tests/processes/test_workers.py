"""Child processes with limits: what comes back from them, and that they end."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.common.errors import DataError, DeadlineExceeded
from lachesis.process.workers import ChildProcess, ProcessLimits, WorkerError, WorkerPool, send_message
from tests.waiting import LONG_S, until

GIB = 1 << 30


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2, os.getpid, name="test workers")
    yield pool
    pool.close()


def failure(pool: WorkerPool, function, *args, timeout_s: float = LONG_S) -> tuple[str, str]:
    (error,) = pool.run(function, [args], timeout_s=timeout_s)
    assert isinstance(error, WorkerError)
    return error.reason, error.message


class TestCalls:
    def test_results_come_in_order_from_processes_that_are_kept(self, pool):
        assert pool.run(math.sqrt, [(4,), (9,)], timeout_s=LONG_S) == [2.0, 3.0]
        pids = pool.run(os.getpid, [(), ()], timeout_s=LONG_S)
        assert pids == pool.run(os.getpid, [(), ()], timeout_s=LONG_S) == pool.pids
        assert len({*pids, os.getpid()}) == 3

    def test_what_the_function_raises_is_raised(self, pool):
        with pytest.raises(ValueError, match="math domain"):
            pool.run(math.sqrt, [(4,), (-1,)], timeout_s=LONG_S)
        assert pool.run(math.sqrt, [(4,), (9,)], timeout_s=LONG_S) == [2.0, 3.0]

    def test_one_that_dies_says_how_and_leaves_the_others(self, pool):
        first, second = pool.run(os._exit, [(3,), (4,)], timeout_s=LONG_S)
        assert (first.reason, first.message) == ("died", "ended its process (ended with exit code 3)")
        assert second.message == "ended its process (ended with exit code 4)"
        assert failure(pool, os.abort) == ("died", "ended its process (was killed by SIGABRT)")
        assert pool.run(math.sqrt, [(4,), (9,)], timeout_s=LONG_S) == [2.0, 3.0]

    def test_one_that_hangs_is_replaced(self, pool):
        before = pool.run(os.getpid, [()], timeout_s=LONG_S)
        assert failure(pool, time.sleep, 600, timeout_s=0.1)[0] == "timeout"
        until(lambda: not alive(before[0]))
        assert pool.run(os.getpid, [()], timeout_s=LONG_S) != before

    def test_what_cannot_travel(self, pool):
        assert failure(pool, len, threading.Lock())[0] == "arguments"
        assert failure(pool, open, os.devnull)[0] == "result"
        assert pool.run(math.sqrt, [(4,)], timeout_s=LONG_S) == [2.0]

    def test_threads_take_turns(self, pool):
        results: list[float] = []
        threads = [
            threading.Thread(target=lambda: results.extend(pool.run(math.sqrt, [(4,), (9,)], timeout_s=LONG_S)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert results == [2.0, 3.0] * 4

    def test_it_starts_without_torch(self, pool):
        code = "'torch' in __import__('sys').modules or 'numpy' in __import__('sys').modules"
        assert pool.run(eval, [(code,)], timeout_s=LONG_S) == [False]


class TestLife:
    def test_an_error_of_the_start(self):
        with pytest.raises(DataError, match="cannot"):
            WorkerPool(2, eval, "(_ for _ in ()).throw(E('cannot'))", {"E": DataError}, name="test workers")
        with pytest.raises(WorkerError, match="exit code 7"):
            WorkerPool(2, os._exit, 7, name="test workers")
        with pytest.raises(DeadlineExceeded, match=r"start of 1 test workers took longer than 0\.1 s"):
            WorkerPool(1, time.sleep, 600, name="test workers", start_s=0.1)

    def test_memory_is_limited(self):
        pool = WorkerPool(1, os.getpid, name="test workers", limits=ProcessLimits(memory_mb=512))
        with pytest.raises(MemoryError):
            pool.run(bytes, [(GIB,)], timeout_s=LONG_S)
        pool.close()

    def test_closing_ends_a_call_under_way_and_the_next_call_starts_anew(self):
        pool = WorkerPool(1, os.getpid, name="test workers")
        (pid,) = pool.pids
        ended: list[WorkerError] = []
        thread = threading.Thread(target=lambda: ended.extend(pool.run(time.sleep, [(600,)], timeout_s=600)))
        thread.start()
        until(lambda: not pool._idle)
        pool.close()
        pool.close()
        thread.join(LONG_S)
        assert [error.reason for error in ended] == ["died"]
        assert not alive(pid)
        assert pool.run(math.sqrt, [(4,)], timeout_s=LONG_S) == [2.0]
        pool.close()

    def test_it_ends_with_its_parent_in_the_middle_of_a_call_that_keeps_the_lock(self):
        program = textwrap.dedent("""
            import os, signal, threading
            from lachesis.process.workers import WorkerPool
            pool = WorkerPool(1, os.getpid, name="test workers")
            print(*pool.pids, flush=True)
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            pool.run(eval, [("9**9**9",)], timeout_s=600)
        """)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S)
        pid = int(done.stdout)
        until(lambda: not alive(pid))


class TestOneChild:
    def test_its_output_is_bounded(self):
        with ChildProcess(send_message, b"x" * 10**7, timeout_s=LONG_S, limits=ProcessLimits()) as child:
            assert len(child.read(timeout_s=LONG_S, max_bytes=100)) == 100
        assert not alive(child.pid)


def alive(pid: int) -> bool:
    """Running; an orphan that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
