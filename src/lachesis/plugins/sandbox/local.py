"""Sandboxes of this machine: a few wardens, each with one program or test at a time."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lachesis.plugins.sandbox.cgroup import remove_cgroup
from lachesis.plugins.sandbox.job import REQUEST_S
from lachesis.plugins.sandbox.link import MAX_REQUEST_BYTES, LinkClosed, pack, receive, send, send_packed
from lachesis.plugins.sandbox.records import (
    Ending,
    FunctionTests,
    Limits,
    Outcome,
    Program,
    SandboxError,
    Verdict,
    Wall,
)
from lachesis.plugins.sandbox.warden import keep
from lachesis.process.workers import ChildProcess, ProcessLimits

_START_S = 60.0
# Seconds after its limit within which a program's end must be reported, even on a busy machine.
_GRACE_S = 20.0
# Each needs a socket.
_TESTS_AT_A_TIME = 64
_INPUTS_AT_A_TIME_BYTES = 8 << 20
# Copies of a request in a judge's memory: as bytes, as a text and as values.
_COPIES = 4
_REASONS = {
    "wall": "it took longer than {0.wall_s:g} s",
    "memory": "it used more than {0.memory_bytes} bytes of memory",
    "scratch": "it wrote more than {0.scratch_bytes} bytes, or started more than {0.processes} processes",
}


class LocalSandbox:
    """Sandbox that runs programs and tests behind a wall of this machine; thread-safe.

    Args:
        walls: kind of wall that the wardens put up: ``namespaces``, ``landlock`` (with seccomp), or ``none``.
        count: number of wardens, and so of concurrent programs; one for each processor if unset.

    Raises:
        SandboxError: the wall cannot be put up here.
    """

    def __init__(self, walls: str, *, count: int | None = None) -> None:
        self._walls = walls
        self._closed = threading.Event()
        self.count = count or len(os.sched_getaffinity(0))
        first = self._start()
        self.wall = Wall(walls, tuple(first.layers))
        self._idle: queue.LifoQueue[_Warden | None] = queue.LifoQueue()
        for warden_ in [None] * (self.count - 1) + [first]:
            self._idle.put(warden_)

    def run(self, program: Program) -> Outcome:
        """Run a program to its end.

        Raises:
            SandboxError: the sandbox failed twice, for which the program is not to blame.
        """
        return self.run_each(program, [program.stdin])[0]

    def run_each(self, program: Program, inputs: Sequence[bytes]) -> list[Outcome]:
        """Run a program with one input after the other, each time in a new process, until a limit ends the series.

        The last outcome then reports the limit. Raises as :meth:`run`.
        """
        outcomes: list[Outcome] = []
        limits, files = program.limits, {name: content.hex() for name, content in program.files.items()}
        while len(outcomes) < len(inputs):
            part = _first_part(inputs[len(outcomes) :])
            request = {"source": program.source, "argv": program.argv, "inputs": len(part), "files": files}
            found = self._ask("program", request, limits, parts=part)
            now = [_outcome(**one["outcome"]) for one in found["verdicts"]]
            outcomes += now
            if found["ending"] != "exited":
                left_s = found["seconds"] - sum(outcome.seconds for outcome in now)
                return [*outcomes, Outcome(found["ending"], -9, b"", b"", left_s)]
            limits = replace(limits, wall_s=max(limits.wall_s - found["seconds"], 0.001))
        return outcomes

    def test(self, tests: FunctionTests) -> list[Verdict]:
        """Return a verdict for each test; tests after a limit have not passed. Raises as :meth:`run`."""
        verdicts: list[Verdict] = []
        limits, ending = tests.limits, "exited"
        while len(verdicts) < len(tests.tests) and ending == "exited":
            part = tests.tests[len(verdicts) : len(verdicts) + _TESTS_AT_A_TIME]
            request = {"code": tests.code, "tests": part, "imports": tests.imports}
            found = self._ask("tests", request, limits, count=len(part))
            verdicts += [Verdict(one["passed"] is True, one["reason"]) for one in found["verdicts"]]
            ending = found["ending"]
            if ending == "left":
                verdicts.append(Verdict(False, "the test ended its process"))
                ending = "exited"
            limits = replace(limits, wall_s=max(limits.wall_s - found["seconds"], 0.001))
        missing = len(tests.tests) - len(verdicts)
        return verdicts + [Verdict(False, _REASONS[ending].format(tests.limits)) for _ in range(missing)]

    @property
    def pids(self) -> list[int]:
        """Return process ids of the idle wardens; each leads the process group of that number."""
        return [one.pid for one in list(self._idle.queue) if one is not None]

    def close(self) -> None:
        """End all wardens, and the programs that they run. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        for _ in range(self.count):
            try:
                one = self._idle.get(timeout=1.0)
            except queue.Empty:
                return
            if one is not None:
                one.close()

    def _ask(
        self, kind: str, request: Mapping[str, Any], limits: Limits, *, parts: Sequence[bytes] = (), count: int = 0
    ) -> Mapping[str, Any]:
        content, held_bytes = _content(kind, request, parts)
        header = {"kind": kind, "count": count, "limits": asdict(limits), "held_bytes": held_bytes}
        try:
            warden_ = self._idle.get(timeout=600.0)
        except queue.Empty:
            raise SandboxError("no sandbox became free in 600 s", remedy="lower the programs' limits") from None
        try:
            for attempt in range(2):
                warden_ = warden_ or self._start()
                try:
                    return warden_.ask(header, content, parts, limits.wall_s)
                except LinkClosed as error:
                    warden_.close()
                    warden_ = None
                    if attempt:
                        raise SandboxError(
                            f"the sandbox ended twice while it ran a {kind} ({error})",
                            remedy="run `lachesis doctor` to check it; the machine may be short of memory",
                        ) from error
            raise AssertionError("unreachable")
        finally:
            self._idle.put(warden_)

    def _start(self) -> _Warden:
        if self._closed.is_set():
            raise SandboxError("the sandbox is closed")
        return _Warden(self._walls)


def _content(kind: str, request: Mapping[str, Any], parts: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the JSON of a request, and the memory that it and its parts may take when they are read.

    Raises:
        SandboxError: it is too large for any judge.
    """
    try:
        content = pack(request, max_bytes=MAX_REQUEST_BYTES)
        size = len(content) + sum(map(len, parts))
        if size > MAX_REQUEST_BYTES:
            raise ValueError(f"{size} bytes, over the limit of {MAX_REQUEST_BYTES}")
    except ValueError as error:
        raise SandboxError(f"a {kind} with its inputs is too large ({error})", remedy="leave that test out") from error
    return content, _COPIES * size


def _first_part(inputs: Sequence[bytes]) -> list[bytes]:
    """Return the inputs to send at once, at least one."""
    part: list[bytes] = []
    for stdin in inputs:
        if part and sum(map(len, part)) + len(stdin) > _INPUTS_AT_A_TIME_BYTES:
            break
        part.append(stdin)
    return part


def _outcome(ending: Ending, exit_code: int, stdout: str, stderr: str, seconds: float) -> Outcome:
    return Outcome(ending, exit_code, bytes.fromhex(stdout), bytes.fromhex(stderr), seconds)


class _Warden:
    """Client of a warden's process."""

    def __init__(self, walls: str) -> None:
        self._child = ChildProcess(keep, walls, timeout_s=_START_S, limits=ProcessLimits(), directory=Path("/"))
        try:
            self._child.link.settimeout(_START_S)
            hello = receive(self._child.link)
            if "error" in hello:
                raise SandboxError(hello["error"])
            self.layers: list[str] = hello["layers"]
            self._group: str | None = hello["group"]
        except BaseException as error:
            self._child.close()
            if isinstance(error, LinkClosed):
                raise SandboxError(f"it does not start ({self._child.ending()})") from error
            raise

    @property
    def pid(self) -> int:
        """Id of the warden's process."""
        return self._child.pid

    def ask(
        self, header: Mapping[str, Any], content: bytes, parts: Sequence[bytes], wall_s: float
    ) -> Mapping[str, Any]:
        """Run a job and return its result; raises LinkClosed if warden or judge is gone, or does not answer in time."""
        link = self._child.link
        link.settimeout(wall_s + REQUEST_S + _GRACE_S)
        send(link, header)
        send_packed(link, content, parts)
        answer = receive(link, max_bytes=MAX_REQUEST_BYTES)
        if "error" in answer:
            raise LinkClosed(answer["error"])
        if answer["ending"] == "died":
            raise LinkClosed(answer["detail"])
        return answer

    def close(self) -> None:
        self._child.close()
        if self._group is not None:
            remove_cgroup(Path(self._group))
