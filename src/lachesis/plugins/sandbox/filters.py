"""Kernel rules that confine code of a model: a seccomp filter of system calls, and Landlock rules for paths."""

from __future__ import annotations

import errno
import os
import platform
import stat
import struct
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from lachesis.plugins.sandbox import kernel

_CALLS: dict[str, dict[str, list[int]]] = tomllib.loads(
    Path(__file__).with_name("system_calls.toml").read_text(encoding="utf-8")
)
# The families of sockets that such programs may make: Unix, IPv4 and IPv6. Namespaces do not confine all others.
_FAMILIES = (1, 2, 10)
# Options that give each socket a buffer of megabytes; the kernel's default is a few hundred KiB.
_SO_SNDBUF = 7
# The last number before the calls added since 2019, and the newer ones that are allowed: close_range, openat2,
# faccessat2, epoll_pwait2, two of Landlock (which only takes rights away), futex_waitv, fchmodat2.
_LAST = (334, 294)
_NEW = (436, 437, 439, 441, 444, 446, 449, 452)
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_NAMESPACES = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# MAP_SHARED and MAP_ANONYMOUS: such memory stays when all but one page is released, and counts for no process.
_SHARED_ANONYMOUS = 0x21
# O_TRUNC without the right to write, which Landlock judges as reading before its version 3, and the bits to look at.
_CUT, _CUT_OR_WRITE = 0o1000, 0o1003
# Sockets that can send to any address, even from a pair; requests to terminals and pipes, which change no file's flags;
# and F_SETOWN, F_SETSIG, F_SETOWN_EX and F_SETLEASE, by which the kernel sends signals, or holds up who opens a file.
_DATAGRAM, _KIND = 2, 0xF
_TERMINAL, _CLASS = 0x5400, 0xFF00
_SIGNALLING = (8, 10, 15, 1024)

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x25, 0x45, 0x06, 0x54
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSED = _ERRNO | errno.EPERM
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16

# Landlock's rights to files, by the version that brought the last of them.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 2, 4, 8
_SCOPE_SIGNALS = 2


def deny_system_calls(*, contained: bool, signals_contained: bool, sockets: bool = False) -> None:
    """Set the seccomp filter for this process and all processes that it starts.

    Args:
        contained: a process namespace ends all processes that it starts.
        signals_contained: its signals cannot reach others.
        sockets: allow what whole programs need, such as sockets in a network namespace.

    Raises:
        OSError: the kernel has no seccomp, or the architecture is not supported.
    """
    kernel.gain_nothing()
    kernel.set_filter(_program(contained, signals_contained, sockets))


def prepare_filters() -> None:
    """Make the programs once, before many processes set them. Raises OSError on other architectures."""
    for contained, signals_contained in ((True, True), (False, True), (False, False)):
        _program(contained, signals_contained, False)
    _unmediated()


@cache
def _program(contained: bool, signals_contained: bool, sockets: bool) -> bytes:
    column = _column()
    skipped = {
        "judged": True,
        "unmediated": True,
        "refused_to_code": sockets,
        "leaving": contained,
        "signals": signals_contained,
    }
    refused = [call[column] for kind, calls in _CALLS.items() if not skipped.get(kind) for call in calls.values()]
    judged = {name: call[column] for name, call in _CALLS["judged"].items()}
    return b"".join(_filter(column, sorted(refused), judged, sockets))


@cache
def _unmediated() -> bytes:
    """Return the program that refuses changes of files of which Landlock has no rule; others have judged the rest."""
    column = _column()
    rules = [_when(call[column], _REFUSED) for call in _CALLS["unmediated"].values() if call[column] >= 0]
    judged = {name: call[column] for name, call in _CALLS["judged"].items() if call[column] >= 0}
    rules += [
        _when_argument(judged[name], index, _EQUAL, _CUT, mask=_CUT_OR_WRITE, then=_REFUSED, otherwise=_ALLOW)
        for name, index in (("open", 1), ("openat", 2))
        if name in judged
    ]
    rules += [_when_argument(judged["fcntl"], 1, _EQUAL, one, then=_REFUSED, otherwise=None) for one in _SIGNALLING]
    terminals = _when_argument(judged["ioctl"], 1, _EQUAL, _TERMINAL, mask=_CLASS, then=_ALLOW, otherwise=_REFUSED)
    rules.append(terminals)
    return b"".join([_instruction(_LOAD, 0, 0, _NUMBER_AT), *chain(*rules), _instruction(_RETURN, 0, 0, _ALLOW)])


def _column() -> int:
    try:
        return ("x86_64", "aarch64").index(platform.machine())
    except ValueError as error:
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}") from error


def _filter(column: int, refused: Sequence[int], judged: Mapping[str, int], sockets: bool) -> Iterator[bytes]:
    """Return the BPF program: each rule is a comparison that skips its return if it does not hold."""
    yield _instruction(_LOAD, 0, 0, _ARCH_AT)
    yield _instruction(_EQUAL, 1, 0, _AUDIT_ARCH[column])
    yield _instruction(_RETURN, 0, 0, _KILL)
    yield _instruction(_LOAD, 0, 0, _NUMBER_AT)
    for number in _NEW:
        yield from _when(number, _ALLOW)
    yield _instruction(_ABOVE, 0, 1, _LAST[column])  # numbers of x32 are above it too
    yield _instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    for number in refused:
        if number >= 0:
            yield from _when(number, _REFUSED)
    if sockets:
        for family in _FAMILIES:
            yield from _when_argument(judged["socket"], 0, _EQUAL, family, then=_ALLOW, otherwise=None)
    pair, denied = judged["socketpair"], _ERRNO | errno.EACCES
    yield from _when(judged["socket"], denied)
    yield from _when_argument(judged["clone"], 0, _ANY_BIT, _NAMESPACES, then=_REFUSED, otherwise=_ALLOW)
    yield from _when_argument(judged["prlimit"], 0, _EQUAL, 0, then=_ALLOW, otherwise=_REFUSED)
    if not sockets:
        yield from _when_argument(judged["setsockopt"], 2, _EQUAL, _SO_SNDBUF, then=_REFUSED, otherwise=_ALLOW)
        kept = _SHARED_ANONYMOUS
        yield from _when_argument(judged["mmap"], 3, _EQUAL, kept, mask=kept, then=_REFUSED, otherwise=_ALLOW)
        yield from _when_argument(judged["sched_setaffinity"], 0, _EQUAL, 0, then=_ALLOW, otherwise=_REFUSED)
        yield from _when_argument(pair, 1, _EQUAL, _DATAGRAM, mask=_KIND, then=denied, otherwise=None)
    yield from _when_argument(pair, 0, _EQUAL, 1, then=_ALLOW, otherwise=denied)
    for request in (_TIOCSTI, _TIOCLINUX):
        yield from _when_argument(judged["ioctl"], 1, _EQUAL, request, then=_REFUSED, otherwise=None)
    yield _instruction(_RETURN, 0, 0, _ALLOW)


def _when(number: int, verdict: int) -> Iterator[bytes]:
    yield _instruction(_EQUAL, 0, 1, number)
    yield _instruction(_RETURN, 0, 0, verdict)


def _when_argument(
    number: int, index: int, test: int, value: int, *, then: int, otherwise: int | None, mask: int = 0xFFFFFFFF
) -> Iterator[bytes]:
    """Yield the instructions that decide by masked bits of the low half of an argument; flags have only that half.

    Without ``otherwise``, the next instructions decide about other values.
    """
    yield _instruction(_EQUAL, 0, 5, number)
    yield _instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)
    yield _instruction(_AND, 0, 0, mask)
    yield _instruction(test, 0, 1, value)
    yield _instruction(_RETURN, 0, 0, then)
    if otherwise is None:
        yield _instruction(_LOAD, 0, 0, _NUMBER_AT)
    else:
        yield _instruction(_RETURN, 0, 0, otherwise)


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def restrict_paths(readable: Sequence[str], writable: Sequence[str]) -> int:
    """Limit reading, running and writing to paths, and forbid TCP, and signals and abstract sockets to others.

    Returns its version; 0, with no effect, where the kernel has none.
    """
    version = kernel.landlock_version()
    if not version:
        return 0
    rights = _FS_RIGHTS[max(known for known in _FS_RIGHTS if known <= version)]
    network = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    kernel.gain_nothing()
    rules = [(path, _rights_of(path, rights & (_EXECUTE | _READ | _READ_DIR))) for path in readable]
    rules += [(path, _rights_of(path, rights)) for path in writable]
    kernel.landlock(struct.pack("QQQ", rights, network, scopes)[:size], rules)
    return version


def contain_code() -> None:
    """Keep this process, and all that it starts, from processes around it and from other files' permissions and times.

    Some processes behind the same wall are ours. If the kernel has no such rule (Landlock before its version 6), the
    filter refuses signals altogether. Call it before code of a model runs, where no namespace has files of its own.
    """
    kernel.set_filter(_unmediated())
    if kernel.landlock_version() >= 6:
        kernel.landlock(struct.pack("QQQ", 0, 0, _SCOPE_SIGNALS), [])


def _rights_of(path: str, rights: int) -> int:
    """Return the rights that apply to a path: all for a directory and its content, fewer for a file."""
    if stat.S_ISDIR(os.stat(path).st_mode):
        return rights
    return rights & (_EXECUTE | _WRITE | _READ | 1 << 14 | 1 << 15)
