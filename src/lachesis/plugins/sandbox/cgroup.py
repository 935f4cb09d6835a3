"""Control group (version 2) for the jobs of a warden: limits of a whole tree of processes, enforced by the kernel.

The warden checks the memory of its job twenty times a second; between two checks a program can take all memory.
Where a control group may be made (by root, or below a user's own ``systemd``), the kernel holds the tree to its memory,
its number of processes and one processor, and kills all of it at once. Elsewhere the checks have to be enough.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lachesis.plugins.sandbox import kernel
from lachesis.plugins.sandbox.records import Limits

_NEEDED = frozenset({"memory", "pids"})
_PREFIX = "lachesis-code-"
# The judge and the processes that fork for it, besides those of the program.
_OURS = 8
_OWN_BYTES = 32 << 20
_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A group made for one warden. Its files were opened before the walls, behind which no path leads to them."""

    path: Path
    layer: str
    files: dict[str, int]

    def restrict(self, limits: Limits, *, held_bytes: int = 0) -> None:
        """Set the limits of the next job, whose memory includes the files of its scratch.

        Args:
            limits: of the job.
            held_bytes: size of the tests and inputs that the judge holds.
        """
        self._write("memory.max", limits.memory_bytes + limits.scratch_bytes + held_bytes + _OWN_BYTES)
        self._write("pids.max", limits.processes + _OURS)

    def enter(self) -> None:
        """Move this process into the group, with all processes that it will fork."""
        self._write("cgroup.procs", 0)

    def kill(self) -> None:
        """End all processes of the group."""
        if "cgroup.kill" in self.files:
            self._write("cgroup.kill", 1)

    def ran_out(self) -> int:
        """Return how often the kernel has killed a process of the group for lack of memory since it was made."""
        lines = os.pread(self.files["memory.events"], 1 << 12, 0).decode().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def _write(self, name: str, value: int) -> None:
        os.write(self.files[name], str(value).encode())


def make_cgroup(
    *, mountinfo: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
) -> Cgroup | None:
    """Make a group for this process's jobs, in the nearest group that allows it; ``None`` if none does.

    Args:
        mountinfo: file that says where control groups are mounted.
        own: file that says which group this process is in.
    """
    for parent in _parents(mountinfo, own):
        _sweep(parent)
        path = parent / f"{_PREFIX}{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            return _opened(path)
        except OSError:
            remove_cgroup(path)
    return None


def remove_cgroup(path: Path) -> None:
    """Remove a group whose processes have ended."""
    with contextlib.suppress(OSError):
        path.rmdir()


def _parents(mountinfo: Path, own: Path) -> Iterator[Path]:
    """Yield the groups that delegate memory and processes to child groups: this process's own, and those around it."""
    try:
        mounts = [line.split() for line in mountinfo.read_text().splitlines()]
        at = next(line.partition("::")[2] for line in own.read_text().splitlines() if line.startswith("0::"))
        root = next(Path(fields[4]) for fields in mounts if fields[fields.index("-") + 1] == "cgroup2")
    except (OSError, StopIteration, ValueError):
        return
    inside = root / at.strip("/")
    for group in (inside, *inside.parents):
        try:
            handed_on = (group / "cgroup.subtree_control").read_text().split()
        except OSError:
            handed_on = []
        if set(handed_on) >= _NEEDED:
            yield group
        if group == root:
            return


def _opened(path: Path) -> Cgroup:
    """Open the group's files, set the limits that all jobs share, and try to enter it in a child."""
    files = {name: os.open(path / name, os.O_WRONLY) for name in ("cgroup.procs", "memory.max", "pids.max")}
    files["memory.events"] = os.open(path / "memory.events", os.O_RDONLY)
    with contextlib.suppress(OSError):  # Linux before 5.14 has none
        files["cgroup.kill"] = os.open(path / "cgroup.kill", os.O_WRONLY)
    _set(path / "memory.swap.max", "0")
    one_processor = _set(path / "cpu.max", f"{_PERIOD_US} {_PERIOD_US}")
    held = "memory, processes and one processor" if one_processor else "memory and processes"
    made = Cgroup(path, f"a control group for {held}", files)
    _try_to_enter(made)
    return made


def _set(file: Path, value: str) -> bool:
    """Write a limit; return False if the kernel does not have it."""
    try:
        descriptor = os.open(file, os.O_WRONLY)
    except OSError:
        return False
    with os.fdopen(descriptor, "w") as stream:
        stream.write(value)
    return True


def _try_to_enter(group: Cgroup) -> None:
    """Move a child process into the group; raises OSError if that is not allowed, as below another user's groups."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            group.enter()
            code = 0
        finally:
            kernel.end_process(code)
    if os.waitpid(child, 0)[1]:
        raise PermissionError(f"no process can be moved to {group.path}")


def _sweep(parent: Path) -> None:
    """Remove groups of wardens that were killed with their trainer."""
    for path in parent.glob(f"{_PREFIX}*"):
        if not Path(f"/proc/{path.name.removeprefix(_PREFIX)}").exists():
            remove_cgroup(path)
