"""System calls that the filters refuse to code of a model, each tried in a forked process."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from lachesis.plugins.sandbox.filters import contain_code, deny_system_calls
from lachesis.plugins.sandbox.kernel import end_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the filters are Linux's")

FS_IOC_GETFLAGS, F_SETSIG, F_SETLEASE, RT_TGSIGQUEUEINFO = 0x80086601, 10, 1024, 297


def behind(call: Callable[[], object], *, alone: bool) -> int:
    """The number of the error that a call gets from the filters; 0 for none. ``alone`` is without namespaces."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            deny_system_calls(contained=not alone, signals_contained=not alone)
            if alone:
                contain_code()
            call()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            end_process(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def queue_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(RT_TGSIGQUEUEINFO, os.getppid(), os.getppid(), 0, None) < 0:
        raise OSError(ctypes.get_errno(), "rt_tgsigqueueinfo")


def of_a_file(request: int, argument: int | bytes = 0, *, control: Callable[..., object] = fcntl.fcntl) -> object:
    with Path(__file__).open("rb") as file:
        return control(file, request, argument)


@pytest.mark.parametrize("alone", [False, True], ids=["namespaces", "landlock"])
def test_pairs_that_could_send_to_any_address_are_refused(alone: bool):
    assert behind(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), alone=alone) == errno.EACCES
    wrapped = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    assert behind(lambda: socket.socketpair(socket.AF_UNIX, wrapped), alone=alone) == errno.EACCES
    assert behind(socket.socketpair, alone=alone) == 0


@pytest.mark.parametrize("alone", [False, True], ids=["namespaces", "landlock"])
def test_no_other_process_is_moved_to_other_processors(alone: bool):
    assert behind(lambda: os.sched_setaffinity(os.getppid(), {0}), alone=alone) == errno.EPERM
    assert behind(lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)), alone=alone) == 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the call is of x86_64")
def test_no_signal_is_queued_where_landlock_keeps_none_inside():
    assert behind(queue_signal, alone=True) == errno.EPERM


@pytest.mark.parametrize(
    ("request_", "argument"), [(fcntl.F_SETOWN, os.getpid()), (F_SETSIG, 9), (F_SETLEASE, fcntl.F_RDLCK)]
)
def test_the_kernel_is_not_asked_for_signals_or_leases(request_: int, argument: int):
    assert behind(lambda: of_a_file(request_, argument), alone=True) == errno.EPERM


def test_files_flags_are_refused_and_terminals_are_not():
    flags = lambda: of_a_file(FS_IOC_GETFLAGS, bytes(8), control=fcntl.ioctl)  # noqa: E731
    assert behind(flags, alone=True) == errno.EPERM
    assert behind(lambda: of_a_file(termios.FIONREAD, bytes(4), control=fcntl.ioctl), alone=True) == 0
    assert behind(lambda: of_a_file(fcntl.F_GETFL), alone=True) == 0
    assert behind(lambda: of_a_file(termios.TIOCSTI, b"x", control=fcntl.ioctl), alone=True) == errno.EPERM
