"""Only a test whose last statement returned has passed, and no code that is judged brings its judge down."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.plugins.sandbox import local
from lachesis.plugins.sandbox.choice import open_sandbox
from lachesis.plugins.sandbox.judge import judge
from lachesis.plugins.sandbox.link import LinkClosed, receive, send
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.records import FunctionTests, Limits, Program, SandboxError
from lachesis.plugins.sandbox.rewards.code_tests import InputTest, cases_of
from lachesis.plugins.sandbox.rewards.execution import run_tests, share_passed
from lachesis.rollouts.rewards.functions import Excluded
from tests.contracts import judge_attacks
from tests.contracts.verdict_attacks import ATTACKS, PROGRAMS, TESTS
from tests.walls import needs_namespaces

pytestmark = needs_namespaces

LIMITS = Limits(cpu_s=1, wall_s=3, memory_bytes=256 << 20, processes=16, scratch_bytes=4 << 20)
HONEST = ("def solve(x): return x + 1", ("assert solve(1) == 2",))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    opened = open_sandbox("namespaces", count=1)
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def either(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    opened = open_sandbox(request.param, count=1)
    yield opened
    opened.close()


TABLES = {"verdicts": (ATTACKS, TESTS), "judges": (judge_attacks.ATTACKS, judge_attacks.TESTS)}


@pytest.mark.parametrize("table", TABLES)
def test_there_are_enough_attacks(table: str):
    assert len(TABLES[table][0]) >= 60


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in TABLES for name in TABLES[table][0]])
def test_no_attack_passes_any_test(sandbox: LocalSandbox, table: str, name: str):
    attacks, tests = TABLES[table]
    verdicts = sandbox.test(FunctionTests(attacks[name], tests, limits=LIMITS))
    assert [verdict.passed for verdict in verdicts] == [False] * len(tests)
    assert all(verdict.reason for verdict in verdicts)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_brings_its_judge_down(either: LocalSandbox, name: str):
    """It is judged, input after input, and gets nothing for it; the next program is judged as if it had not been."""
    tests = [InputTest("1\n", "one\n"), InputTest("2\n", "two\n")]
    assert run_tests(PROGRAMS[name], tests, time_limit_s=3, sandbox=either) == 0
    code, calls = HONEST
    assert run_tests(code, calls, sandbox=either) == 1


def test_each_run_finds_an_empty_directory_and_no_shared_memory(either: LocalSandbox):
    source = (
        "import os\nfound = os.listdir('.') + [n for n in os.listdir('/dev/shm') if n != '.scratch']\n"
        "os.makedirs('a/b')\nopen('a/b/c', 'w').close()\n"
        "try: open('/dev/shm/left', 'w').close()\nexcept OSError: pass\nos.mkdir('d', 0)\nprint(found)"
    )
    if either.wall.name == "landlock":
        source = source.replace("os.listdir('/dev/shm')", "[]")
    outcomes = either.run_each(Program(source=source, limits=Limits(wall_s=30)), [b"", b"", b""])
    assert [outcome.stdout for outcome in outcomes] == [b"[]\n"] * 3
    code = "import os\nfound = os.listdir('.')\nos.mkdir('d', 0)"
    verdicts = either.test(FunctionTests(code, ("assert found == []",) * 3, limits=Limits(wall_s=30)))
    assert [verdict.reason for verdict in verdicts] == [""] * 3


def test_an_input_larger_than_a_message_is_given_whole(sandbox: LocalSandbox):
    """And the conversation goes on with the next program."""
    large = b"a" * (40 << 20)
    program = Program(source="import sys\nprint(len(sys.stdin.buffer.read()))", limits=Limits(wall_s=60))
    outcomes = sandbox.run_each(program, [b"a", large, b"ab"])
    assert [outcome.stdout.strip() for outcome in outcomes] == [b"1", str(len(large)).encode(), b"2"]
    test = f"assert size('{'a' * (33 << 20)}') == {33 << 20}"
    (verdict,) = sandbox.test(FunctionTests("def size(x): return len(x)", (test,), limits=Limits(wall_s=60)))
    assert verdict.passed, verdict.reason


def test_an_input_that_is_too_large_for_any_judge_says_so(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "MAX_REQUEST_BYTES", 1000)
    with pytest.raises(SandboxError, match="too large"):
        sandbox.run(Program(source="pass", stdin=b"a" * 2000))
    monkeypatch.undo()
    assert sandbox.run(Program(source="print(1)", limits=Limits(wall_s=30))).stdout == b"1\n"


class TestJudgesThatDie:
    """From outside, as for want of memory: no fault of the code's."""

    @pytest.fixture
    def fresh(self) -> Iterator[LocalSandbox]:
        opened = open_sandbox("namespaces", count=1)
        assert isinstance(opened, LocalSandbox)
        yield opened
        opened.close()

    def test_it_is_tried_again(self, fresh: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
        answers = [{"verdicts": [], "ending": "died", "detail": "the judge was killed by SIGKILL", "seconds": 0.0}]
        real = local.receive

        def receive_once(link: socket.socket, **options: int) -> object:
            answer = real(link, **options)
            return answers.pop() if answers and "ending" in answer else answer

        monkeypatch.setattr(local, "receive", receive_once)
        code, calls = HONEST
        assert share_of(fresh, code, calls, monkeypatch) == 1.0
        assert answers == []

    def test_it_is_excluded_and_counted_after_that(self, fresh: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
        died = {"verdicts": [], "ending": "died", "detail": "the judge was killed by SIGKILL", "seconds": 0.0}
        real = local.receive
        monkeypatch.setattr(
            local, "receive", lambda link, **options: died if "ending" in (got := real(link, **options)) else got
        )
        code, calls = HONEST
        found = share_of(fresh, code, calls, monkeypatch)
        assert isinstance(found, Excluded)
        assert found.counted == "sandbox" and "killed by SIGKILL" in found.why

    def test_a_judge_that_is_killed_is_no_verdict(self, fresh: LocalSandbox):
        """With a real kill, of the first process of the namespace that a program's output is read by."""
        program = Program(source="import time\ntime.sleep(60)", limits=Limits(wall_s=50))
        with pytest.raises(SandboxError, match=r"ended twice .* SIGKILL"), _judges_killed(fresh, times=2):
            fresh.run(program)
        assert fresh.run(Program(source="print(1)", limits=Limits(wall_s=30))).stdout == b"1\n"


def share_of(
    sandbox: LocalSandbox, code: str, calls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> float | Excluded:
    monkeypatch.setattr("lachesis.plugins.sandbox.rewards.execution.shared_sandbox", lambda: sandbox)
    return share_passed(code, calls)


@contextlib.contextmanager
def _judges_killed(sandbox: LocalSandbox, *, times: int) -> Iterator[None]:
    """Kill the process that judges, below a warden of this process, once it has forked a program."""
    over, killed = threading.Event(), set[int]()

    def run() -> None:
        while not over.is_set() and len(killed) < times:
            for judge_pid in _judges_of(os.getpid()) - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(judge_pid, signal.SIGKILL)
                killed.add(judge_pid)
            time.sleep(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _children(pid: int) -> set[int]:
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return set()
    return {int(one) for text in texts for one in text.split()}


def _judges_of(pid: int) -> set[int]:
    """Processes that have a child that has none, four steps below: warden, first of the namespaces, judge, program."""
    generation = {pid}
    for _ in range(3):
        generation = {child for parent in generation for child in _children(parent)}
    return {one for one in generation if _children(one)}


class TestAnyAnswer:
    """Whatever comes over the link is no verdict: the judge alone, opposite to a process that sends anything."""

    VALUES = (
        None, True, 7919, -1, 1.5, "", "value", [], ["list", []], ["ref", 0], ["ref", 0, "class", "", ["Exception"]],
        ["type", "int"], ["type", "AssertionError"], ["ref", 1, "coroutine"], ["ref", -1, "object"], ["dict", [[1, 2]]],
        ["function", 0], ["int", "0x1eef"], ["notimplemented"], ["array", "<i8", [1], "00" * 8, True],
        ["array", "O", [], "", True],
        ["deque", [], -1], ["range", 0, 1, 0], ["Decimal", "x"], {"value": True}, {"a": 1},
    )  # fmt: skip
    KEYS = ("value", "error", "call", "changed", "args", "keywords", "class", "attributes", "passed", "ending")

    @classmethod
    def message(cls, chance: random.Random, depth: int = 0) -> object:
        if depth > 2 or chance.random() < 0.3:
            return chance.choice(cls.VALUES)
        if chance.random() < 0.2:
            return [cls.message(chance, depth + 1) for _ in range(chance.randrange(3))]
        return {chance.choice(cls.KEYS): cls.message(chance, depth + 1) for _ in range(chance.randrange(1, 4))}

    @pytest.mark.parametrize("seed", range(40))
    def test_random_answers_pass_nothing(self, seed: int, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(threading, "excepthook", threading.excepthook)
        chance = random.Random(seed)
        ours, theirs = socket.socketpair()

        def answer() -> None:
            with contextlib.suppress(LinkClosed, OSError):
                receive(theirs)
                send(theirs, {"value": None})  # the code is loaded
                for _ in range(200):
                    receive(theirs)
                    send(theirs, self.message(chance))
            theirs.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            secret = chance.getrandbits(60)
            test = f"assert solve(lambda n: n) == {secret} and solve(1) == 'aaaaaaaaa'"
            verdict = judge(ours, "", test, "")
        finally:
            ours.close()
            thread.join(10)
        assert not verdict.passed
        assert verdict.reason


def test_assertions_that_the_code_catches_and_those_of_threads_count(sandbox: LocalSandbox):
    code = "def solve(f):\n    try: f(1)\n    except BaseException: pass\n    return 5"
    tests = (
        "def f(x):\n    assert x == 2\nassert solve(f) == 5",
        "import threading\ndef run():\n    assert solve(lambda x: x) == 6\nt = threading.Thread(target=run)\nt.start()",
        "def f(x):\n    assert x == 1\nassert solve(f) == 5",
    )
    verdicts = sandbox.test(FunctionTests(code, tests, limits=Limits(wall_s=30)))
    assert [verdict.passed for verdict in verdicts] == [False, False, True]


VACUOUS = {
    "for got, want in zip(solve(3), [1, 2]): assert got == want": "def solve(x): return []",
    "for got in solve(3):\n    assert got > 5": "def solve(x): return iter(())",
    "def check(f):\n    while f(1): assert f(2) == 3\ncheck(solve)": "def solve(x): return 0",
    "[check for check in solve(3)]\ndef late(): assert solve(3) == 5": "def solve(x): return []",
    "assert isclose(sqrt(3), 1.732, abs_tol=0.01)": "def sqrt(x): return 0\ndef isclose(*a, **k): return True",
    "assert reduce(max, gcd(4, 6)) == 2": "def gcd(*a): return [1]\ndef reduce(*a): return 2",
}


@pytest.mark.parametrize("test", VACUOUS)
def test_a_test_of_which_nothing_was_evaluated_by_us_is_not_passed(sandbox: LocalSandbox, test: str):
    (verdict,) = sandbox.test(FunctionTests(VACUOUS[test], (test,), limits=Limits(wall_s=30)))
    assert not verdict.passed and verdict.reason


NOT_TO_COME_HERE = (
    "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
    "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False, 'no error'",
    "def test():\n    try:\n        f(-1)\n        assert 0\n    except ValueError:\n        return\ntest()",
    "for n in range(3):\n    if f(n) != n + 1: assert False, n",
)


def test_places_that_a_test_is_not_to_reach_are_no_assertions_to_evaluate(sandbox: LocalSandbox):
    right = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x + 1"
    for code, passed in ((right, True), ("def f(x): return x", False)):
        verdicts = sandbox.test(FunctionTests(code, NOT_TO_COME_HERE, limits=Limits(wall_s=30)))
        assert [verdict.passed for verdict in verdicts] == [passed] * len(NOT_TO_COME_HERE)


def test_loops_over_right_answers_pass(sandbox: LocalSandbox):
    tests = ("for got, want in zip(solve(3), [1, 2]): assert got == want", "assert isclose(sqrt(4), 2.0)", "solve(1)")
    code = "import math\ndef solve(x): return [1, 2]\ndef sqrt(x): return math.sqrt(x)"
    assert [one.passed for one in sandbox.test(FunctionTests(code, tests, limits=Limits(wall_s=30)))] == [True] * 3


def test_tests_that_are_coroutine_functions_are_run(sandbox: LocalSandbox):
    source = "async def test_a():\n    assert solve() == 2\n"
    source += "class TestB:\n    async def test_b(self):\n        assert solve() == 1"
    tests = [test for test in cases_of({"test": source}) if isinstance(test, str)]
    verdicts = sandbox.test(FunctionTests("def solve(): return 1", tuple(tests), limits=Limits(wall_s=30)))
    assert [verdict.passed for verdict in verdicts] == [False, True]


# Memory that stays when it is let go of: what a process is seen to have does not show it.
HIDDEN = {
    "shared memory of its own": "m = mmap.mmap(-1, 64 << 20)\nfor at in range(0, 64 << 20, 4096): m[at] = 1",
    "a mapped device": "f = os.open('/dev/zero', os.O_RDWR)\nmmap.mmap(f, 64 << 20)",
    "a file in memory": "os.memfd_create('a')",
    "memory of System V": "assert ctypes.CDLL(None, use_errno=True).shmget(0, 1 << 20, 0o1600) == -1\nraise OSError",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_memory_that_no_process_is_seen_to_have_is_refused(either: LocalSandbox, name: str):
    source = f"import ctypes, mmap, os\ntry:\n    exec({HIDDEN[name]!r})\nexcept OSError: print('refused')"
    outcome = either.run(Program(source=source, limits=Limits(wall_s=30)))
    assert outcome.stdout == b"refused\n", outcome


def test_sockets_with_full_buffers_are_few(either: LocalSandbox):
    source = (
        "import socket\npairs = []\ntry:\n    while True: pairs.append(socket.socketpair())\nexcept OSError: pass\n"
        "held = 0\nfor pair in pairs:\n    for one in pair:\n        one.setblocking(False)\n"
        "        try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)\n        except OSError: pass\n"
        "        try:\n            while True: held += one.send(bytes(1 << 16))\n        except OSError: pass\n"
        "print(held >> 20)"
    )
    outcome = either.run(Program(source=source, limits=Limits(wall_s=30)))
    assert 0 < int(outcome.stdout) <= 64


def test_pools_of_processes_and_shared_values_still_work(sandbox: LocalSandbox):
    source = (
        "import multiprocessing as m\nv = m.Value('i', 0)\n"
        "def add(n):\n    with v.get_lock(): v.value += n\n"
        "with m.Pool(4) as pool: pool.map(add, range(10))\nprint(v.value)"
    )
    outcome = sandbox.run(Program(source=source, limits=Limits(wall_s=30)))
    assert outcome.stdout == b"45\n", outcome
