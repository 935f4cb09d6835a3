"""Requests to a sandbox, their results, and the error of a sandbox that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lachesis.common.errors import LachesisError

# Reason why a program ended: "exited", or the limit that it hit.
Ending: TypeAlias = Literal["exited", "cpu", "wall", "memory", "output", "scratch"]


class SandboxError(LachesisError):
    """Error of a sandbox that is missing or failed; it says nothing about the code to run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program and all processes that it starts together.

    Args:
        cpu_s: processor time of each process.
        wall_s: time until all of them are killed.
        memory_bytes: of all processes together, besides the interpreter's own; also the address space of each.
        processes: processes and threads at a time.
        output_bytes: standard output and standard error, each.
        scratch_bytes: files in its directory, and shared memory.
    """

    cpu_s: float = 10.0
    wall_s: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 64
    output_bytes: int = 1 << 20
    scratch_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Program:
    """Python source, or a command line that the sandbox can run, with its input.

    Args:
        source: run as a script, in an interpreter that is already warm.
        argv: instead of a source.
        stdin: its standard input.
        files: contents by name, in the directory where it starts.
    """

    source: str | None = None
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program.

    Args:
        ending: how it ended; only ``exited`` means by itself.
        exit_code: negative: the signal that killed it.
    """

    ending: Ending
    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Return True if the program ended by itself with exit code 0."""
        return self.ending == "exited" and self.exit_code == 0


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Statements that call functions of some code, as ``assert add(1, 2) == 3``.

    Args:
        code: of the model; run again for each test, in a new process.
        tests: each passes if all of it runs. A test is never in the memory of the code's process.
        imports: statements of the reference solution, for names that tests use from it.
        limits: ``wall_s`` is for all tests together.
    """

    code: str
    tests: tuple[str, ...]
    imports: str = ""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a test, with the reason if it did not pass."""

    passed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Wall:
    """Barrier between a program and this machine.

    Args:
        name: of the kind of wall.
        layers: its parts, such as ``user namespace`` or ``seccomp``.
    """

    name: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.layers)})" if self.layers else self.name
