"""Walls by other programs' command lines, with a warden inside: bubblewrap, docker and podman."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lachesis.plugins.sandbox.records import SandboxError
from lachesis.plugins.sandbox.view import python_view
from lachesis.plugins.sandbox.warden import keep

# The directory that has this package, which a warden inside needs to start.
_ROOT = Path(__file__).parents[3]
_CHUNK = 1 << 16
_CONTAINER_PROCESSES = "512"
DEFAULT_IMAGE = "python:3.12-slim"


@dataclass(frozen=True, slots=True)
class Command:
    """A command line that runs the interpreter that follows it.

    Args:
        root: where it has this package.
        piped: it gives two pipes; otherwise it hands on the socket that it is given.
    """

    line: tuple[str, ...]
    interpreter: str
    root: str
    piped: bool = False


def run_inside(link: socket.socket, command: Command, walls: str) -> None:
    """Run a command with a warden inside, in a child process; the warden has ``link`` as its input and output.

    It stays in this process's group, and ends with it.
    """
    main = f"import sys; sys.path.insert(0, {command.root!r}); import lachesis; sys.path.append(sys.path.pop(0)); "
    main += f"from lachesis.plugins.sandbox.commands import keep_inside; keep_inside({walls!r}, {command.piped!r})"
    line = [*command.line, command.interpreter, "-I", "-c", main]
    subprocess.run(line, stdin=link.fileno(), stdout=link.fileno(), stderr=subprocess.DEVNULL, check=False)


def keep_inside(walls: str, piped: bool) -> None:
    """Run a warden inside a command, with the standard streams as its link."""
    if piped:
        link, other = socket.socketpair()
        if os.fork() == 0:
            link.close()
            _pump(other)
            return
        other.close()
        os.setpgid(0, 0)  # what a program leaves is found by its group
    else:
        link = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)
    keep(link, walls)


def _pump(link: socket.socket) -> None:
    """Pass on the standard input, and the warden's answers, until one of them ends."""
    while True:
        for source in select.select([0, link], [], [])[0]:
            part = os.read(0, _CHUNK) if source == 0 else link.recv(_CHUNK)
            if not part:
                return
            if source == 0:
                link.sendall(part)
            else:
                while part:
                    part = part[os.write(1, part) :]


def bubblewrap() -> Command:
    """``bwrap`` with nothing shared but a read-only Python."""
    view = python_view()
    line = [_found("bwrap"), "--unshare-all", "--die-with-parent", "--clearenv"]
    for path in view.readable:
        line += ["--ro-bind", path, path]
    for place, target in view.links:
        line += ["--symlink", target, place]
    line += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--dir", "/lachesis"]
    return Command((*line, "--ro-bind", str(_ROOT), "/lachesis", "--chdir", "/"), _interpreter(), "/lachesis")


def container(program: str, image: str) -> Callable[[], Command]:
    """``docker`` or ``podman`` with an image that has Python 3.11 or later."""

    def command() -> Command:
        line = [_found(program), "run", "--rm", "--interactive", "--network", "none", "--read-only"]
        line += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", _CONTAINER_PROCESSES]
        line += ["--tmpfs", "/tmp", "--volume", f"{_ROOT}:/lachesis:ro", image]
        return Command(tuple(line), "python3", "/lachesis", piped=True)

    return command


def _interpreter() -> str:
    return str(Path(os.path.realpath(Path(sys.executable).parent)) / Path(sys.executable).name)


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise SandboxError(f"there is no program {program}", remedy=f"install it, as by apt-get install {program}")
    return path
