"""Main of a fork server: ``python -m lachesis.process.fork_main DESCRIPTOR MODULE [ARGUMENT...]``.

See :class:`lachesis.process.forkserver.ForkServer`. It has one thread, as a process that forks must.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util

from lachesis.common.openmp import brief_waits
from lachesis.process.forkserver import SIZE_BYTES
from lachesis.process.garbage import frozen_imports
from lachesis.process.supervisor import prepare_child, supervise

# numpy's library would start one a core as it is imported; what is forked does no linear algebra with it.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "1")


@dataclass(frozen=True, slots=True)
class Request:
    """Command that is to be forked, with its end of the link and the descriptor of its log."""

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    asker: int
    grace_s: float
    link: int
    log: int


class Forked(BaseException):
    """Exception raised in a forked process, so that it leaves whatever its parent was doing."""


def main() -> None:
    """Import, then fork until nobody can ask any more; in each forked process, run the command."""
    number, module, *arguments = sys.argv[1:]
    os.environ |= brief_waits(os.environ)
    os.environ.setdefault(*_ONE_THREAD)
    with frozen_imports():
        imports = importlib.import_module(module)
        imports.load(arguments)
    is_usable = imports.is_usable()
    if not is_usable:
        sys.stderr.write(f"lachesis: {module} is no use to processes that are forked, which import for themselves\n")
    gc.collect()
    gc.freeze()
    sys.stdout.flush()  # what is left of what was said would be written by each process
    try:
        fork_supervisors(socket.socket(fileno=int(number)), asker=os.pidfd_open(os.getppid()))
    except Forked as forked:
        request: Request = forked.args[0]
    else:
        os._exit(0)  # what was frozen would be taken for leaked
    run(request, is_usable=is_usable)


def fork_supervisors(asked: socket.socket, *, asker: int) -> None:
    """Fork a supervisor for each request, until the asker has closed, or has ended.

    Raises Forked in the command.

    Args:
        asked: requests come over it.
        asker: the pidfd of who asks; what that has forked may hold the other end of ``asked``.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    poll = select.poll()
    for descriptor in (asked.fileno(), asker):
        poll.register(descriptor, select.POLLIN)
    while asked.fileno() in dict(poll.poll()) and (request := receive(asked)) is not None:
        if os.fork() == 0:
            asked.close()
            try:
                become_supervisor(request)
            except Forked:
                raise
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(0)  # what ends with the process that has imported is not its own
        os.close(request.link)
        os.close(request.log)


def receive(asked: socket.socket) -> Request | None:
    """Return the next request; ``None`` once the asker has closed, or died while sending one."""
    size, descriptors, _, _ = socket.recv_fds(asked, SIZE_BYTES, 2)
    if len(descriptors) < 2:
        return None
    length, text = int.from_bytes(size, "big"), b""
    while len(text) < length:
        part = asked.recv(length - len(text))
        if not part:
            return None
        text += part
    return Request(**json.loads(text), link=descriptors[0], log=descriptors[1])


def become_supervisor(request: Request) -> None:
    """Supervise one command to its end.

    Raises Forked in the command's process, which it forks.
    """
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(request.log, descriptor)
    os.close(request.log)
    link = socket.socket(fileno=request.link)
    socket.send_fds(link, [b"\n"], [os.pidfd_open(os.getpid())])
    if _has_ended(link.fileno()):
        return
    asker = os.pidfd_open(request.asker)
    supervise(
        link,
        is_asked_for=lambda: not _has_ended(asker),
        grace_s=request.grace_s,
        start=lambda: ForkedChild(request),
    )


class ForkedChild:
    """Forked child with the methods of ``subprocess.Popen`` that a supervisor uses, the head of a session.

    In the child it raises Forked, whose argument is ``argument``.
    """

    def __init__(self, argument: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            prepare_child()
            # As Python has them when it begins.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise Forked(argument)

    def poll(self) -> int | None:
        return self._reaped(os.WNOHANG)

    def wait(self) -> int:
        code = self._reaped(0)
        assert code is not None
        return code

    def _reaped(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def run(request: Request, *, is_usable: bool) -> None:
    """Run ``python -m MODULE ARGUMENT...`` with its imports done, or execute it anew if they are unusable."""
    python, _, module, *arguments = request.command
    if util.find_spec("setproctitle"):  # vLLM brings it; so that `ps` tells which is which
        # It finds its place in front of the environment that the process began with.
        importlib.import_module("setproctitle").setproctitle(shlex.join(request.command))
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    if not is_usable:
        os.execve(python, [*request.command], os.environ)
    atexit.register(gc.unfreeze)  # as above
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _has_ended(descriptor: int) -> bool:
    """Return True if a pidfd's process has ended, or a socket's other side has closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


if __name__ == "__main__":
    main()
