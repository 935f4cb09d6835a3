"""Programs of a model that the sandbox judges in a second: four tests each, every test in a process of its own.

    python benchmarks/code_execution.py [--tiny] [--sandbox namespaces] [--workers 2] [--programs 400] [--first]

Prints a table row for each number of tests at a time, with the same programs in all rows.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lachesis.plugins.sandbox.choice import Sandbox, open_sandbox
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.rewards.code_tests import CodeTest, InputTest
from lachesis.plugins.sandbox.rewards.execution import run_tests

_CODE = """
from collections import Counter

class Store:
    def __init__(self):
        self.items = Counter()

    def add(self, name, count=1):
        self.items[name] += count
        return self.items[name]

def primes(limit):
    sieve = [True] * (limit + 1)
    for n in range(2, int(limit**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    return [n for n in range(2, limit + 1) if sieve[n]]

if __name__ == "__main__":
    print(sum(primes(int(input()))))
"""
_CALLS: tuple[CodeTest, ...] = (
    "assert primes(10) == [2, 3, 5, 7]",
    "assert len(primes(1000)) == 168",
    "store = Store()\nstore.add('a')\nassert store.add('a', 2) == 3",
    "assert all(n % 2 for n in primes(100)[1:])",
)
_INPUTS: tuple[CodeTest, ...] = tuple(
    InputTest(f"{n}\n", f"{total}\n") for n, total in ((10, 17), (2, 2), (20, 77), (5, 10))
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", default="namespaces")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--tiny", action="store_true", help="eight programs: that it runs, not how fast")
    parser.add_argument("--first", action="store_true", help="before other work of the machine; by root")
    options = parser.parse_args()
    programs = 8 if options.tiny else options.programs
    machine = f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} processors"
    say(f"{machine}, load {os.getloadavg()[0]:.1f}")
    say("| sandbox | tests | programs at a time | programs | programs/s | median of one |\n|---|---|---|---|---|---|")
    for workers in sorted({1, options.workers}):
        sandbox = open_sandbox(options.sandbox, count=workers)
        assert isinstance(sandbox, LocalSandbox), "a remote sandbox measures its server"
        try:
            _measure(sandbox, _CALLS, 4 * workers, workers)  # all workers are there from now on
            if options.first:
                for pid in (os.getpid(), *sandbox.pids):
                    Path(f"/proc/{pid}/autogroup").write_text("-20")
            for kind, tests in (("4 calls", _CALLS), ("4 inputs", _INPUTS)):
                rate, median = _measure(sandbox, tests, programs, workers)
                say(f"| {sandbox.wall.name} | {kind} | {workers} | {programs} | {rate:.0f} | {1000 * median:.0f} ms |")
        finally:
            sandbox.close()


def _measure(sandbox: Sandbox, tests: tuple[CodeTest, ...], programs: int, workers: int) -> tuple[float, float]:
    """Programs a second, and the median of the seconds of one."""

    def judged(_: int) -> float:
        started = time.perf_counter()
        passed = run_tests(_CODE, tests, sandbox=sandbox)
        assert passed == len(tests), f"{passed} of {len(tests)} tests passed"
        return time.perf_counter() - started

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(judged, range(2 * workers)))
        started = time.perf_counter()
        seconds = list(pool.map(judged, range(programs)))
        return programs / (time.perf_counter() - started), statistics.median(seconds)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
