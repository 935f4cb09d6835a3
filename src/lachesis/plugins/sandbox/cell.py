"""Wall around a program that runs for long and talks to one server, such as an agent.

The program has its own files, processes and network. The only server that it reaches is that of the process that
started it: the listening socket is made in the program's network and passed out. No other program can connect to that
socket, so a connection identifies the program. The first process of the namespace holds the program to its limits and
reports how it ended. All processes of the program end with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lachesis.plugins.sandbox import kernel
from lachesis.plugins.sandbox.cgroup import Cgroup, make_cgroup, remove_cgroup
from lachesis.plugins.sandbox.filters import deny_system_calls
from lachesis.plugins.sandbox.job import NOBODY, end_with, limit, memory_of
from lachesis.plugins.sandbox.link import LinkClosed, receive, send
from lachesis.plugins.sandbox.records import Limits, Outcome, Program, SandboxError
from lachesis.plugins.sandbox.view import View, enter_view, in_any, outermost, python_view, size_of
from lachesis.plugins.sandbox.warden import leave_user_namespace

# Path of the program's directory. It starts in the ``work`` there, and sees the ``tmp`` there as ``/tmp``.
HOME = "/rollout"
_ROOT = Path(__file__).parents[3]
_ETC = ("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/localtime", "/etc/nsswitch.conf", "/etc/mime.types")
_ETC_OF_NETWORK = ("/etc/resolv.conf", "/etc/hosts")
_MAIN = "import sys; sys.path.insert(0, {0!r}); import lachesis; sys.path.append(sys.path.pop(0)); " \
    "from lachesis.plugins.sandbox.cell import main; main()"  # fmt: skip
_FIRST_LOOK_S, _LOOK_S, _LOOK_SHARE = 0.01, 0.25, 20
_SIOCSIFFLAGS, _UP_AND_RUNNING = 0x8914, 0x41
_OPEN_FILES = 4096
_TRIED_PORT = 8000
_START_S, _TOLD_S = 30.0, 2.0
_REMEDY = (
    "allow user namespaces (sysctl user.max_user_namespaces=15000; in a container: --security-opt seccomp=unconfined), "
    "set source.container, or set source.wall to none, which runs agents without any wall"
)
_BEGUN, _FAILED = b"b", b"f"
_NO_WALL = 70


@dataclass(frozen=True, slots=True)
class Cell:
    """Program's view of this machine, and its limits.

    Args:
        box: directory of this machine that the program sees as :data:`HOME`; it contains ``work`` and ``tmp``.
        port: port of its own network at which it reaches the server; ``None`` gives it this machine's network.
        readable: paths of this machine that it may read, besides those of the system and of this Python.
        memory_bytes: limit of the resident memory of all its processes.
        disk_bytes: limit of its files and its output.
        processes: limit of its processes and threads.
    """

    box: str
    port: int | None
    readable: tuple[str, ...] = ()
    memory_bytes: int = 4 << 30
    disk_bytes: int = 1 << 30
    processes: int = 512

    def command(self, line: tuple[str, ...]) -> list[str]:
        """Return the command line that runs ``line`` behind the wall.

        Its standard input has to be a socket, which :func:`begun` and :func:`ending` read: the first byte comes with
        the listening socket, if there is one. One message follows, an ``error`` that kept the program from starting,
        or its exit ``code`` (negative for a signal) with the ``ending``: ``exited``, or the limit that it hit.
        """
        told = json.dumps({"line": line, **asdict(self)})
        return [sys.executable, "-I", "-c", _MAIN.format(str(_ROOT)), told]


def begun(control: socket.socket) -> socket.socket | None:
    """Wait until the wall around a program is up, and return the listening socket if there is one.

    A process that was killed meanwhile has none either; :func:`ending` tells them apart.

    Raises:
        SandboxError: the wall cannot be put up.
    """
    control.settimeout(_START_S)
    try:
        first, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if first == _FAILED:
            raise SandboxError(f"no wall can be put up ({receive(control)['error']})", remedy=_REMEDY)
    except (OSError, LinkClosed):
        return None
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def ending(control: socket.socket) -> tuple[int | None, str]:
    """Return the exit code of a program that has ended, ``None`` if it was killed, and why it ended."""
    control.settimeout(_TOLD_S)
    try:
        told = receive(control)
        return told["code"], told["ending"]
    except (LinkClosed, TimeoutError):
        return None, "exited"


class CellRunner:
    """Runner of programs behind the wall of a cell, which tries the wall."""

    def __init__(self, *, readable: tuple[str, ...] = ()) -> None:
        self._readable = readable

    def run(self, program: Program) -> Outcome:
        """Run a Python source or a command line. Raises SandboxError where the wall cannot be put up."""
        limits = program.limits
        line = program.argv or (sys.executable, "-c", program.source or "")
        with tempfile.TemporaryDirectory(prefix="lachesis-cell-") as root:
            box = Path(root, "box")
            for path in (box / "work", box / "tmp"):
                path.mkdir(parents=True)
            give_away(box)
            cell = Cell(
                str(box), _TRIED_PORT, self._readable, limits.memory_bytes, limits.scratch_bytes, limits.processes
            )
            control, theirs = socket.socketpair()
            with control, Path(root, "out").open("w+b") as out, Path(root, "err").open("w+b") as err:
                # A shell pipes the input in, because a cell uses the program's standard input itself.
                told = ("/bin/sh", "-c", 'printf %s "$0" | "$@"', program.stdin.decode(), *line)
                started = time.monotonic()
                with theirs, subprocess.Popen(
                    cell.command(told if program.stdin else line), stdin=theirs.fileno(), stdout=out, stderr=err,
                    env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")}, start_new_session=True, cwd="/",
                ) as process:  # fmt: skip
                    theirs.close()
                    try:
                        if (listener := begun(control)) is not None:
                            listener.close()
                        process.wait(limits.wall_s)
                        code, why = ending(control)
                    except subprocess.TimeoutExpired:
                        code, why = -signal.SIGKILL, "wall"
                    finally:
                        process.kill()
                outputs = [os.pread(file.fileno(), limits.output_bytes, 0) for file in (out, err)]
        named = {"exited": "exited", "memory": "memory", "disk": "scratch"}
        seconds = time.monotonic() - started
        return Outcome(named.get(why, "wall"), -9 if code is None else code, *outputs, seconds)  # type: ignore[arg-type]


def give_away(box: Path) -> None:
    """Give the files to the user that the programs of root run as."""
    if os.geteuid() == 0:
        for path in (box, *box.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def main() -> None:
    """Put up the wall that the first argument describes, and run the program in it to its end."""
    told = json.loads(sys.argv[1])
    line, cell = told.pop("line"), Cell(**told)
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the signal is for the program, which is in the same group
    environment = dict(os.environ)
    kernel.take_usual_priority()
    group = make_cgroup()
    try:
        try:
            _enter(cell, control)
        except OSError as error:
            control.send(_FAILED)
            send(control, {"error": str(error)})
            return
        first = os.fork()
        if first == 0:
            end_with(lambda: _be_first(cell, line, control, group, environment))
        control.close()
        os.waitpid(first, 0)
    finally:
        if group is not None:
            remove_cgroup(group.path)


def _enter(cell: Cell, control: socket.socket) -> None:
    """Enter new namespaces, and hand out a socket that listens in the new network."""
    root = os.geteuid() == 0
    try:
        leave_user_namespace(map_nobody=root, keep_user=True)
    except OSError:
        if not root:
            raise
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    kernel.unshare(flags | (0 if cell.port is None else kernel.CLONE_NEWNET))
    if cell.port is None:
        control.send(_BEGUN)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))
    with socket.create_server(("127.0.0.1", cell.port)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # for connections, which inherit it
        socket.send_fds(control, [_BEGUN], [listener.fileno()])


def _view(cell: Cell) -> View:
    view = python_view()
    etc = (*_ETC, *(_ETC_OF_NETWORK if cell.port is None else ()))
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    given = (*view.readable, *etc, *packages, str(_ROOT / "lachesis"), *cell.readable)
    linked = [place for place, _ in view.links]
    readable = outermost([path for path in given if os.path.exists(path) and not in_any(path, linked)])
    writable = ((f"{cell.box}/tmp", view.scratch), (cell.box, HOME))
    return replace(view, readable=readable, writable=writable, terminals=True)


def _be_first(
    cell: Cell, line: list[str], control: socket.socket, group: Cgroup | None, environment: Mapping[str, str]
) -> None:
    """Start the program as the first process of the namespace, and hold it to its limits until it ends."""
    kernel.die_with_parent()
    if group is not None:
        group.restrict(Limits(memory_bytes=cell.memory_bytes, processes=cell.processes, scratch_bytes=0))
        group.enter()
    view = _view(cell)
    try:
        enter_view(view)
    except OSError as error:
        os.write(2, f"no wall can be put up: {error}\n".encode())
        kernel.end_process(_NO_WALL)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.gain_nothing()
    kernel.drop_capabilities()
    kernel.hide_memory()
    deny_system_calls(contained=True, signals_contained=True, sockets=True)
    program = os.fork()
    if program == 0:
        control.close()
        _become(line, cell, {**environment, "TMPDIR": view.scratch})
    ran_out = group.ran_out() if group else 0
    code, ending = _hold(program, cell)
    if group is not None and group.ran_out() > ran_out:
        ending = "memory"
    send(control, {"code": code, "ending": ending})


def _become(line: list[str], cell: Cell, environment: Mapping[str, str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    limit(resource.RLIMIT_NPROC, cell.processes)
    limit(resource.RLIMIT_FSIZE, cell.disk_bytes)
    limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    limit(resource.RLIMIT_CORE, 0)
    os.chdir(f"{HOME}/work")
    try:
        os.execvpe(line[0], line, {**environment, "PWD": f"{HOME}/work"})
    except OSError as error:
        os.write(2, f"{line[0]}: {error.strerror}; source.readable names paths that agents may read\n".encode())
        kernel.end_process(127)


def _hold(program: int, cell: Cell) -> tuple[int, str]:
    """Wait until the program ends or exceeds a limit; return its exit code and why it ended."""
    look_s, looked = _FIRST_LOOK_S, time.monotonic()
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return os.waitstatus_to_exitcode(ended[1]), "exited"
        time.sleep(look_s)
        look_s = min(2 * look_s, _LOOK_S / 5)
        if time.monotonic() - looked < _LOOK_S:
            continue
        began = time.monotonic()
        if (ending := _beyond(cell)) is not None:
            return -signal.SIGKILL, ending
        looked = time.monotonic() + _LOOK_SHARE * (time.monotonic() - began)  # many files are measured less often


def _beyond(cell: Cell) -> str | None:
    """Return the limit that the processes and files of the program exceed, or None."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1"]
    if sum(map(memory_of, pids)) > cell.memory_bytes:
        return "memory"
    printed = os.fstat(1).st_size
    return "disk" if printed + size_of(Path(HOME)) > cell.disk_bytes else None
