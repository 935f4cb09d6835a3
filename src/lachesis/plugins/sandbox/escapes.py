"""Ten ways out of a sandbox, tried as code of a model would: `lachesis doctor` shows them, and ``auto`` asks."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lachesis.plugins.sandbox.records import Limits, Outcome, Program, SandboxError

_MIB = 1 << 20
_LIMITS = Limits(cpu_s=4, wall_s=8, memory_bytes=256 * _MIB, processes=24, scratch_bytes=8 * _MIB)
_OUT = "OUT:"
_PR_SET_NAME = 15


class Runs(Protocol):
    """Target of the attempts."""

    def run(self, program: Program) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way out, and whether the wall held; ``detail`` says what came out where it did not."""

    name: str
    held: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Bait:
    """Bait outside the sandbox: a directory, a secret in a file and in the environment, a server, a process."""

    directory: str
    secret: str
    port: int
    pid: int
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
        return [_attempt(sandbox, name, make(bait), bait) for name, make in _ESCAPES.items()]


def _attempt(sandbox: Runs, name: str, source: str, bait: _Bait) -> Attempt:
    outcome = sandbox.run(Program(source=_PRELUDE + source, limits=_LIMITS))
    out = [
        line[len(_OUT) :] for line in outcome.stdout.decode("utf-8", "replace").splitlines() if line.startswith(_OUT)
    ]
    if os.path.exists(f"{bait.directory}/written"):
        out.append("a file outside was written")
    if bait.secret.encode() in outcome.stdout + outcome.stderr:
        out.append("the secret was read")
    if name == _OUTLIVES and (pid := _lives(bait.name)):
        out.append(f"process {pid} lives on")
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
    with tempfile.TemporaryDirectory(prefix="lachesis-bait-") as directory, socket.socket() as server:
        Path(directory, "secret").write_text(secret)
        os.environ[variable] = secret
        server.bind(("127.0.0.1", 0))
        server.listen()
        try:
            yield _Bait(directory, secret, server.getsockname()[1], os.getpid(), f"esc-{secrets.token_hex(4)}")
        finally:
            del os.environ[variable]


_PRELUDE = f"""
import os, sys, time
def out(text): print({_OUT!r} + text, flush=True)
"""


def _read_files(bait: _Bait) -> str:
    return f"""
for path in ({bait.directory + "/secret"!r}, "/etc/shadow", "/proc/1/root/etc/shadow", "/proc/{bait.pid}/environ",
             {str(Path.home())!r} + "/.ssh", {str(Path.home())!r} + "/.netrc", "/var/log", "/sys/kernel"):
    try:
        found = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(200)
    except OSError:
        continue
    if found:
        out(f"read {{path}}: {{str(found)[:40]}}")
"""


def _write_files(bait: _Bait) -> str:
    return f"""
import sysconfig
for path in ({bait.directory + "/written"!r}, os.path.join(sysconfig.get_path("stdlib"), "lachesis-was-here"),
             "/etc/lachesis-was-here", "/usr/lib/lachesis-was-here"):
    try:
        open(path, "w").close()
        os.unlink(path)
    except OSError:
        continue
    if not path.startswith(os.getcwd()):
        out("wrote " + path)
"""


def _read_environment(bait: _Bait) -> str:
    return """
import glob
for name in os.environ:
    if name.startswith(("LACHESIS", "AWS", "HF_", "WANDB", "OPENAI", "SSH")):
        out("the variable " + name)
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        if b"LACHESIS" in open(path, "rb").read():
            out("the variables of " + path)
    except OSError:
        pass
"""


def _use_network(bait: _Bait) -> str:
    return f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {bait.port})), (socket.AF_INET, ("1.1.1.1", 53)),
                        (socket.AF_INET6, ("::1", {bait.port})), (socket.AF_UNIX, "/var/run/docker.sock")):
    try:
        with socket.socket(family) as one:
            one.settimeout(1)
            one.connect(address)
            out(f"connected to {{address}}")
    except OSError:
        pass
"""


def _reach_processes(bait: _Bait) -> str:
    return f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for pid in ({bait.pid}, os.getppid()):
    if pid > 1 and libc.kill(pid, 0) == 0 and pid == {bait.pid}:
        out(f"a signal reached process {{pid}}")
    if pid > 1 and libc.ptrace(0x4206, pid, None, None) == 0:  # without stopping it
        out(f"traced process {{pid}}")
try:
    others = [name for name in os.listdir("/proc") if name.isdecimal()]
    if len(others) > 8:
        out(f"saw {{len(others)}} processes")
except OSError:
    pass
"""


def _change_namespaces(bait: _Bait) -> str:
    return """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for what, flag in (("user", 0x10000000), ("mount", 0x20000), ("network", 0x40000000)):
    if libc.unshare(flag) == 0:
        out("left the namespace of " + what)
if libc.mount(b"tmpfs", os.getcwd().encode(), b"tmpfs", 0, None) == 0:
    out("mounted")
if libc.chroot(b".") == 0:
    out("changed the root")
"""


def _use_memory(bait: _Bait) -> str:
    return f"""
kept = []
pids = []
for child in range(3):
    pid = os.fork()
    if not pid:
        while sum(map(len, kept)) < {200 * _MIB}:
            kept.append(bytes([1]) * {4 * _MIB})
        time.sleep(2)
        os._exit(0)
    pids.append(pid)
if all(os.waitpid(pid, 0)[1] == 0 for pid in pids):
    out("three processes kept 600 MiB where 256 are allowed")
"""


def _start_processes(bait: _Bait) -> str:
    return f"""
count = 0
try:
    while count < {4 * _LIMITS.processes}:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        count += 1
except OSError:
    pass
time.sleep(0.5)
if count > {2 * _LIMITS.processes}:
    out(f"started {{count}} processes where {_LIMITS.processes} are allowed")
"""


def _fill_disk(bait: _Bait) -> str:
    return f"""
written = 0
try:
    for number in range(32):
        with open(f"part{{number}}", "wb") as file:
            written += file.write(bytes({_MIB}))
except OSError:
    pass
time.sleep(0.5)
if written > {2 * _LIMITS.scratch_bytes}:
    out(f"wrote {{written}} bytes where {_LIMITS.scratch_bytes} are allowed")
"""


def _outlive(bait: _Bait) -> str:
    return f"""
import ctypes, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        ctypes.CDLL(None).prctl({_PR_SET_NAME}, {bait.name.encode()!r}, 0, 0, 0)
        os.closerange(0, 3)
        time.sleep(30)
    os._exit(0)
time.sleep(0.2)
"""


_OUTLIVES = "live on after the end"
_ESCAPES: dict[str, Callable[[_Bait], str]] = {
    "read files": _read_files,
    "write files": _write_files,
    "read the environment": _read_environment,
    "use the network": _use_network,
    "reach other processes": _reach_processes,
    "change namespaces": _change_namespaces,
    "use more memory": _use_memory,
    "start more processes": _start_processes,
    "fill the disk": _fill_disk,
    _OUTLIVES: _outlive,
}
