"""Ten ways out of a sandbox, tried as a model's code would: `lachesis doctor` and the choice ``auto`` use them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lachesis.plugins.sandbox.records import Limits, Outcome, Program, SandboxError

_MIB = 1 << 20
_LIMITS = Limits(cpu_s=4, wall_s=8, memory_bytes=256 * _MIB, processes=24, scratch_bytes=8 * _MIB)
_OUT = "OUT:"
_PROGRAMS = Path(__file__).with_name("escapes.toml")
_OUTLIVES = "live on after the end"


class Runs(Protocol):
    """Target of the attempts."""

    def run(self, program: Program) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt at a way out, and True if the wall held; otherwise ``detail`` says what escaped."""

    name: str
    held: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Bait:
    """Bait outside the sandbox: a directory, a secret in a file and in the environment, servers, a process's name."""

    directory: str
    secret: str
    port: int
    name: str


def try_escapes(sandbox: Runs) -> list[Attempt]:
    """Try all ten escapes, after checking that an honest program runs.

    Raises:
        SandboxError: the honest program does not run.
    """
    outcome = sandbox.run(Program(source="print(sum(map(int, input().split())))", stdin=b"1 2 3\n", limits=_LIMITS))
    if outcome.stdout.strip() != b"6" or not outcome.succeeded:
        said = outcome.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [outcome.ending]
        raise SandboxError(f"an honest program does not run in it ({said[0]})")
    with _bait() as bait:
        programs = tomllib.loads(_PROGRAMS.read_text(encoding="utf-8"))
        return [_attempt(sandbox, name, program, bait) for name, program in programs.items()]


def _attempt(sandbox: Runs, name: str, source: str, bait: _Bait) -> Attempt:
    outcome = sandbox.run(Program(source=_prelude(bait) + source, limits=_LIMITS))
    out = [
        line[len(_OUT) :] for line in outcome.stdout.decode("utf-8", "replace").splitlines() if line.startswith(_OUT)
    ]
    if os.path.exists(f"{bait.directory}/written"):
        out.append("a file outside was written")
    if bait.secret.encode() in outcome.stdout + outcome.stderr:
        out.append("the secret was read")
    if name == _OUTLIVES and (pid := _lives(bait.name)):
        out.append(f"process {pid} is still running")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 9)
    return Attempt(name, not out, "; ".join(out))


def _lives(name: str) -> int:
    """Return the id of a process of this name that still runs after a moment; 0 if there is none."""
    for _ in range(20):
        found = [entry for entry in Path("/proc").glob("[0-9]*") if _text(entry / "comm") == name]
        if not found:
            return 0
        time.sleep(0.05)
    return int(found[0].name)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def _bait() -> Iterator[_Bait]:
    secret = secrets.token_hex(16)
    variable = f"LACHESIS_BAIT_{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix="lachesis-bait-") as directory,
        socket.socket() as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letters,
    ):
        letters.bind(f"{directory}/letters")
        Path(directory, "secret").write_text(secret)
        os.environ[variable] = secret
        server.bind(("127.0.0.1", 0))
        server.listen()
        try:
            yield _Bait(directory, secret, server.getsockname()[1], f"esc-{secrets.token_hex(4)}")
        finally:
            del os.environ[variable]


def _prelude(bait: _Bait) -> str:
    """Return the first lines of each program, which define the targets to reach."""
    return f"""
import os, sys, time
DIRECTORY, HOME, PORT, PID = {bait.directory!r}, {str(Path.home())!r}, {bait.port}, {os.getpid()}
PROCESSES, SCRATCH, NAME = {_LIMITS.processes}, {_LIMITS.scratch_bytes}, {bait.name!r}
def out(text): print({_OUT!r} + text, flush=True)
"""
