"""The walls, by trying; and what becomes of programs at their limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.plugins.sandbox import choice
from lachesis.plugins.sandbox.choice import KINDS, open_sandbox
from lachesis.plugins.sandbox.escapes import Attempt, try_escapes
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.records import FunctionTests, Limits, Outcome, Program, SandboxError, Verdict
from tests.paths import PACKAGE
from tests.waiting import until
from tests.walls import needs_namespaces

pytestmark = needs_namespaces

MIB = 1 << 20


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    opened = open_sandbox("namespaces", count=1)
    assert isinstance(opened, LocalSandbox)
    yield opened
    opened.close()


def run(sandbox: LocalSandbox, source: str, stdin: bytes = b"", **limits: Any) -> Outcome:
    return sandbox.run(Program(source=source, stdin=stdin, limits=Limits(**({"wall_s": 60.0} | limits))))


class TestWalls:
    @pytest.mark.parametrize("kind", ["namespaces", "landlock"])
    def test_ten_escapes_are_held(self, kind: str):
        opened = open_sandbox(kind, count=1)
        try:
            attempts = try_escapes(opened)
        finally:
            opened.close()
        assert [attempt for attempt in attempts if not attempt.held] == []
        assert len(attempts) == 10

    def test_an_escape_is_noticed(self):
        class Open:
            """Runs nothing, and lets everything through."""

            def run(self, program: Program) -> Outcome:
                return Outcome("exited", 0, b"6\n" if program.stdin else b"OUT:read /etc/shadow", b"", 0.0)

        assert [(one.held, one.detail) for one in try_escapes(Open())] == [(False, "read /etc/shadow")] * 10

    def test_a_sandbox_in_which_nothing_runs_is_none(self):
        class Closed:
            def run(self, program: Program) -> Outcome:
                return Outcome("exited", 1, b"", b"no python", 0.0)

        with pytest.raises(SandboxError, match=r"an honest program does not run in it \(no python\)"):
            try_escapes(Closed())

    def test_without_a_wall_it_refuses_and_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(choice, "_AUTOMATIC", ("jail",))
        with pytest.raises(SandboxError, match="no sandbox works here, so code of the model is not run") as caught:
            open_sandbox("auto")
        assert "allow user namespaces" in caught.value.remedy
        assert "rewards.sandbox: none" in caught.value.remedy

    def test_a_wall_that_lets_something_through_is_passed_over(self, monkeypatch: pytest.MonkeyPatch):
        def tried(sandbox: LocalSandbox) -> list[Attempt]:
            return [Attempt("read files", held=sandbox.wall.name != "landlock")]

        monkeypatch.setattr(choice, "_AUTOMATIC", ("landlock", "namespaces"))
        monkeypatch.setattr(choice, "try_escapes", tried)
        opened = open_sandbox("auto", count=1)
        opened.close()
        assert opened.wall.name == "namespaces"

    def test_a_kind_that_there_is_not(self):
        with pytest.raises(SandboxError, match="there is no sandbox 'jail'") as caught:
            open_sandbox("jail")
        assert all(kind in caught.value.remedy for kind in KINDS)


class TestPrograms:
    def test_input_output_and_exit_code(self, sandbox: LocalSandbox):
        source = "import sys\nprint(sys.stdin.read()[::-1])\nprint('bad', file=sys.stderr)\nsys.exit(3)"
        outcome = run(sandbox, source, b"abc")
        assert (outcome.ending, outcome.exit_code, outcome.stdout, outcome.stderr) == ("exited", 3, b"cba\n", b"bad\n")
        assert not outcome.succeeded

    def test_files_and_command_lines(self, sandbox: LocalSandbox):
        program = Program(argv=("cat", "a/b.txt"), files={"a/b.txt": b"content"}, limits=Limits(wall_s=60))
        assert sandbox.run(program).stdout == b"content"

    def test_threads_are_waited_for_and_ends_are_called(self, sandbox: LocalSandbox):
        source = (
            "import atexit, threading, time\natexit.register(print, 'end')\n"
            "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')"
        )
        assert run(sandbox, source).stdout.split() == [b"main", b"thread", b"end"]

    def test_what_it_raises_is_told(self, sandbox: LocalSandbox):
        outcome = run(sandbox, "def f():\n    return 1 / 0\nf()")
        assert outcome.exit_code == 1
        assert b"ZeroDivisionError" in outcome.stderr
        assert b"return 1 / 0" in outcome.stderr

    @pytest.mark.parametrize(
        ("source", "limits", "ending"),
        [
            ("import time; time.sleep(60)", {"wall_s": 1.0}, "wall"),
            ("while True: pass", {"cpu_s": 0.5}, "cpu"),
            ("while True: print('x' * 1000)", {"output_bytes": 5000}, "output"),
            (
                "import os, time\nfor _ in range(3):\n    if not os.fork():\n        x = b'1' * (60 << 20)\n"
                "        time.sleep(60)\ntime.sleep(60)",
                {"memory_bytes": 100 * MIB},
                "memory",
            ),
        ],
    )
    def test_limits_end_it(self, sandbox: LocalSandbox, source: str, limits: dict[str, float], ending: str):
        outcome = run(sandbox, source, **limits)
        assert outcome.ending == ending
        assert not outcome.succeeded
        assert len(outcome.stdout) <= 5000

    @pytest.mark.parametrize(
        "source",
        [
            "import signal, time\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
            "while True: time.sleep(60)",
            "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(60)\nos.wait()",
            "import re\nre.match('(a+)+b', 'a' * 60)",
        ],
        ids=["ignores signals", "waits for another session", "does not come back from C"],
    )
    def test_what_hangs_costs_its_limit_and_no_more(self, sandbox: LocalSandbox, source: str):
        """With what a busy machine takes to begin; such a program once took 25 s at a limit of 3."""
        started = time.monotonic()
        assert run(sandbox, source, wall_s=1.0, cpu_s=30.0).ending == "wall"
        tests = FunctionTests(f"def f():\n    exec({source!r})", ("f()",) * 4, limits=Limits(cpu_s=30.0, wall_s=1.0))
        assert not any(verdict.passed for verdict in sandbox.test(tests))
        assert time.monotonic() - started < 2 * 1.0 + 8.0
        assert run(sandbox, "print(1)").stdout == b"1\n"

    def test_many_inputs(self, sandbox: LocalSandbox):
        inputs = [b"%d\n" % n for n in range(150)] + [b"x" * (6 * MIB) + b"\n"] * 3
        found = sandbox.run_each(Program(source="print(input()[-5:])", limits=Limits(wall_s=120)), inputs)
        assert [outcome.stdout.strip() for outcome in found] == [stdin.strip()[-5:] for stdin in inputs]

    def test_a_limit_ends_the_inputs_after_it_too(self, sandbox: LocalSandbox):
        source = "import time\ntime.sleep(int(input()))\nprint('slept')"
        found = sandbox.run_each(Program(source=source, limits=Limits(wall_s=5.0)), [b"0", b"60", b"0"])
        assert [outcome.ending for outcome in found] == ["exited", "wall"]

    def test_nothing_is_left_for_the_next(self, sandbox: LocalSandbox):
        run(sandbox, "open('left', 'w').close(); open('/dev/shm/left', 'w').close()")
        seen = run(sandbox, "import os; print(os.listdir('.'), os.path.exists('/dev/shm/left'))")
        assert seen.stdout == b"[] False\n"


TRAINER = """
from lachesis.plugins.sandbox.choice import open_sandbox
from lachesis.plugins.sandbox.records import Limits, Program
source = '''
import ctypes, os, time
if os.fork() == 0 and {kind!r} == "namespaces":
    os.setsid()
ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
time.sleep(600)
'''
open_sandbox({kind!r}, count=1).run(Program(source=source, limits=Limits(wall_s=600)))
"""


class TestEnds:
    @pytest.mark.parametrize("kind", ["namespaces", "landlock"])
    def test_a_killed_trainer_takes_everything_with_it(self, tmp_path: Path, kind: str):
        name = f"end-{os.getpid()}"
        program = tmp_path / "trainer.py"
        program.write_text(TRAINER.format(name=name.encode(), kind=kind))

        def living() -> list[str]:
            return named(name)

        environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
        with subprocess.Popen([sys.executable, str(program)], env=environment) as trainer:
            until(lambda: len(living()) == 2)
            trainer.send_signal(signal.SIGKILL)
        until(lambda: not living())

    def test_one_signal_ends_a_program_behind_landlock_however_fast_it_forks(self):
        """Two programs that forked on and on took 200 s to end, found and killed one process after the other.

        As root, whose processes no limit counts, the warden also goes before them all.
        """
        name = f"bomb-{os.getpid()}"
        opened = open_sandbox("landlock", count=1)
        try:
            (warden,) = opened.pids
            told = run(opened, "import os\nprint(os.getpgid(0) == os.getppid(), os.getpriority(os.PRIO_PROCESS, 0))")
            assert told.stdout == b"True 0\n"
            assert os.getpriority(os.PRIO_PROCESS, warden) == (-20 if may_go_first() else 0)
            bomb = f"import ctypes\nlibc = ctypes.CDLL(None)\nlibc.prctl(15, {name.encode()!r}, 0, 0, 0)\n"
            bomb += "for _ in range(7): libc.fork()\nwhile True:\n    if libc.fork(): libc._exit(0)"
            assert run(opened, bomb, processes=8).ending == "scratch"
            until(lambda: not named(name), limit_s=2.0)
        finally:
            opened.close()

    def test_a_warden_that_dies_is_replaced(self):
        tests = FunctionTests("def f(): return 1", ("assert f() == 1",))
        opened = open_sandbox("namespaces", count=1)
        assert isinstance(opened, LocalSandbox)
        try:
            assert opened.test(tests) == [Verdict(True)]
            (pid,) = opened.pids
            os.kill(pid, signal.SIGKILL)
            assert opened.test(tests) == [Verdict(True)]
            assert opened.pids != [pid]
        finally:
            opened.close()

    def test_a_test_that_ends_its_process_fails_alone(self, sandbox: LocalSandbox):
        tests = FunctionTests("x = 1", ("assert x == 1", "import os; os._exit(0)", "assert x == 1"))
        assert [verdict.passed for verdict in sandbox.test(tests)] == [True, False, True]


def may_go_first() -> bool:
    """True for a user who may raise a process's priority."""
    child = os.fork()
    if child == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def named(name: str) -> list[str]:
    """The processes of this name."""
    return [one.parent.name for one in Path("/proc").glob("[0-9]*/comm") if text(one) == name]


def text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class TestControlGroup:
    """Where one can be made: on most machines as root, not in most containers."""

    @pytest.fixture
    def grouped(self, sandbox: LocalSandbox) -> LocalSandbox:
        if not any("control group" in layer for layer in sandbox.wall.layers):
            pytest.skip("no control group of version 2 can be made here")
        return sandbox

    def test_the_kernel_holds_memory_between_two_looks(self, grouped: LocalSandbox):
        greedy = "import os\nfor _ in range(4):\n    os.fork()\ndata = bytearray(96 << 20)\n"
        assert run(grouped, greedy, memory_bytes=128 * MIB).ending == "memory"
        assert run(grouped, "print(1)").stdout == b"1\n", "the next program has all of it"

    def test_it_goes_with_its_warden(self):
        opened = open_sandbox("namespaces", count=1)
        assert isinstance(opened, LocalSandbox)
        (warden,) = [one for one in list(opened._idle.queue) if one is not None]
        opened.close()
        assert warden._group is None or not Path(warden._group).exists()
