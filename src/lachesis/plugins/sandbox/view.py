"""View of this machine's files for code of a model: a read-only Python, the system's libraries, a scratch directory."""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lachesis.plugins.sandbox import kernel

# Libraries and programs of the system; missing ones are left out.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
# Without /dev/zero: mapping it gives memory that counts for no process.
_DEVICES = ("null", "full", "random", "urandom")
# A directory of every machine, over which the view is built in a namespace, unseen by other processes.
_PLACES = ("/mnt", "/srv", "/media", "/opt", "/run", "/tmp")
# Deepest nesting of directories: no program that solves a task needs more.
_DEEPEST = 128
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Names with which a program looks up its user.
_PASSWD = "root:x:0:0::/tmp:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"


@dataclass(frozen=True, slots=True)
class View:
    """Paths to read, and directories to write.

    Args:
        links: symbolic links, by their path.
        writable: directories of this machine that are written, each with its path in the view.
        terminals: True adds what programs at a terminal need: ``/dev/pts``, ``/dev/shm`` and ``/dev/fd``.
    """

    readable: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    scratch: str
    writable: tuple[tuple[str, str], ...] = ()
    terminals: bool = False


def python_view() -> View:
    """Return the view with this interpreter and the packages installed for it."""
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    paths = {path for path in _SYSTEM if path not in links and os.path.exists(path)}
    for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix):
        real = os.path.realpath(prefix)
        if real == "/":
            continue
        paths.add(real)
        if real != prefix:
            links[prefix] = real
    readable = outermost(paths)
    scratch = "/scratch" if any(_below(path, "/tmp") for path in readable) else "/tmp"
    shown = [
        (place, target)
        for place, target in sorted(links.items())
        if not any(_below(place, path) for path in (*readable, scratch))
    ]
    return View(readable, tuple(shown), scratch)


def outermost(paths: Collection[str]) -> tuple[str, ...]:
    """Return the paths that lie in no other one, sorted."""
    return tuple(sorted({path for path in paths if not any(_below(path, other) for other in paths)}))


def enter_view(view: View) -> None:
    """Make the view the root of this process's private mounts, with a ``/proc`` of its namespace."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    place = next(
        path for path in _PLACES if os.path.isdir(path) and not any(_below(one, path) for one in view.readable)
    )
    kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    root = Path(place)
    for path, seen_at in view.writable:
        _bind(path, root, seen_at)
    for path in view.readable:
        _bind(path, root, path)
        kernel.make_read_only(f"{place}{path}")
    for path, target in view.links:
        link = root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    for device in _DEVICES:
        _bind(f"/dev/{device}", root, f"/dev/{device}")
    for directory in ("dev/shm", "proc", view.scratch.lstrip("/")):
        (root / directory).mkdir(parents=True, exist_ok=True)
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text(_PASSWD)
    (root / "etc/group").write_text(_GROUP)
    kernel.mount("proc", f"{place}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    if view.terminals:
        _add_terminals(root)
        if not (root / "etc/hosts").exists():
            (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    kernel.mount("none", place, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    kernel.pivot_root(place)


def mount_scratch(view: View, limit_bytes: int) -> None:
    """Give a program its directory and shared memory, which share one limit, and remove ``/proc``."""
    data = f"size={limit_bytes},nr_inodes=4096,mode=1777"
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, data)
    os.mkdir("/dev/shm/.scratch")
    os.chmod("/dev/shm/.scratch", 0o1777)
    kernel.mount("/dev/shm/.scratch", view.scratch, None, kernel.MS_BIND)
    kernel.unmount("/proc")


def use_real_paths() -> None:
    """Let the interpreter look for modules where the view has them, not at links to there."""
    sys.path[:] = [os.path.realpath(entry) for entry in sys.path if entry]
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        setattr(sys, name, os.path.realpath(getattr(sys, name)))
    program = Path(sys.executable)
    sys.executable = str(Path(os.path.realpath(program.parent)) / program.name)
    sys.path_importer_cache.clear()


def _add_terminals(root: Path) -> None:
    _bind("/dev/zero", root, "/dev/zero")
    kernel.mount("tmpfs", f"{root}/dev/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64m,mode=1777")
    (root / "dev/pts").mkdir()
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", kernel.MS_NOSUID, "newinstance,ptmxmode=0666,mode=620")
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (root / "dev" / name).symlink_to(target)


def _bind(path: str, root: Path, seen_at: str) -> None:
    target = root / seen_at.lstrip("/")
    if os.path.isdir(path):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    kernel.mount(path, str(target), None, kernel.MS_BIND | kernel.MS_REC)


def in_any(path: str, directories: Collection[str]) -> bool:
    """Return True if a path is one of the directories, or in one."""
    return path in directories or any(_below(path, directory) for directory in directories)


def _below(path: str, directory: str) -> bool:
    return path != directory and path.startswith(directory.rstrip("/") + "/")


def new_directory() -> str:
    """Make a directory for one job that has no file system for itself."""
    path = f"{os.environ.get('TMPDIR', '/tmp')}/lachesis-code-{os.getpid()}-{time.monotonic_ns()}"
    os.mkdir(path, 0o700)
    return path


def size_of(directory: Path, *, unreadable: float = 0.0) -> float:
    """Return the bytes of all files below a directory, ignoring those that vanish; infinite if nested too deep.

    A directory whose files may not be listed counts as ``unreadable`` bytes.
    """
    total, left = 0, [(str(directory), 0)]
    while left:
        path, depth = left.pop()
        if depth > _DEEPEST:
            return math.inf
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append((entry.path, depth + 1))
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError as error:
            total += unreadable if isinstance(error, PermissionError) else 0
    return total


def empty_directory(path: str, *, keep: tuple[int, int] | None = None) -> None:
    """Remove everything in a directory, however deep it is nested and whatever its permissions.

    It takes time in proportion to the entries, and needs neither recursion nor long paths: a program may have tried to
    break the clean-up with either.

    Args:
        keep: device and inode of an entry that stays.

    Raises:
        OSError: something cannot be removed.
    """
    _allow_owner(path)
    place = os.open(path, _DIRECTORY)
    names: list[str] = []  # from `path` down to `place`
    try:
        left = [_remove_files(place, keep)]
        while True:
            if left[-1]:
                names.append(left[-1].pop())
                _allow_owner(names[-1], place)
                place = _moved(place, names[-1])
                left.append(_remove_files(place, None))
            elif names:
                left.pop()
                place = _moved(place, "..")
                os.rmdir(names.pop(), dir_fd=place)
            else:
                return
    finally:
        os.close(place)


def _remove_files(place: int, keep: tuple[int, int] | None) -> list[str]:
    """Remove all files of an open directory, and return the names of its directories."""
    directories = []
    for name in os.listdir(place):
        found = os.stat(name, dir_fd=place, follow_symlinks=False)
        if keep == (found.st_dev, found.st_ino):
            continue
        if stat.S_ISDIR(found.st_mode):
            directories.append(name)
        else:
            os.unlink(name, dir_fd=place)
    return directories


def _allow_owner(path: str, place: int | None = None) -> None:
    """Let this process list and change a directory that it owns."""
    if os.stat(path, dir_fd=place, follow_symlinks=False).st_uid == os.geteuid():
        os.chmod(path, 0o700, dir_fd=place)


def _moved(place: int, name: str) -> int:
    """Open a directory by its name in another one, and close that one."""
    inner = os.open(name, _DIRECTORY, dir_fd=place)
    os.close(place)
    return inner
