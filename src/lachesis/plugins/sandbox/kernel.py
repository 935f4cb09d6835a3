"""System calls that Python has no function for, by ctypes. Linux only; imported only in sandboxes' processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def end_process(code: int) -> NoReturn:
    """End this forked process at once, without flushing, closing or calling anything that it inherited."""
    _libc._exit(code)
    raise AssertionError("unreachable")


def take_usual_priority() -> None:
    """Give up a raised priority, which processes of other people's code would inherit."""
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def take_priority() -> None:
    """Run before usual processes, if this user may: no flood of them holds up the process that ends it."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def unshare(flags: int) -> None:
    """Leave namespaces. Raises OSError if the kernel or the container's runtime forbids it."""
    _check(_libc.unshare(flags), "unshare")


def use_new_process_namespace() -> None:
    """Have the next forked process be the first of a new namespace, even after an earlier call."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(own, CLONE_NEWPID), "setns")
    finally:
        os.close(own)
    unshare(CLONE_NEWPID)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Call mount(2)."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount, even while it is in use."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all mounts in it read-only, without devices and set-user-id."""
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    if result < 0:  # before Linux 5.12; this changes only the mount itself
        mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def pivot_root(directory: str) -> None:
    """Make a mount the root, and detach the old root."""
    os.chdir(directory)
    _check(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def die_with_parent() -> None:
    """Have this process killed when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def hide_memory() -> None:
    """Keep other processes of this user from tracing this one or reading its memory."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def gain_nothing() -> None:
    """Give up gaining rights by starting programs, after which filters may be set without rights."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def keep_memory_together() -> None:
    """Let threads share two heaps: a separate one for each would reserve 64 MiB of address space."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(-8, 2)


def drop_capabilities() -> None:
    """Drop all capabilities, for good if :func:`gain_nothing` was called before."""
    _check(_libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")


def set_filter(instructions: bytes) -> None:
    """Let a seccomp program decide about all system calls from now on."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    return max(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), 0)


def landlock(ruleset: bytes, rules: list[tuple[str, int]]) -> None:
    """Restrict this process and its children to ``rules``: what may be done below a path."""
    descriptor = _check(_libc.syscall(_LANDLOCK_CREATE, ruleset, len(ruleset), 0), "landlock_create_ruleset")
    try:
        for path, access in rules:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", access, place)
                _check(_libc.syscall(_LANDLOCK_ADD, descriptor, 1, rule, 0), f"landlock_add_rule {path}")
            finally:
                os.close(place)
        _check(_libc.syscall(_LANDLOCK_RESTRICT, descriptor, 0), "landlock_restrict_self")
    finally:
        os.close(descriptor)
