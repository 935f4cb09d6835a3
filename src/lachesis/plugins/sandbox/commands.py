"""Containers of docker and podman as walls, with a warden inside."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from lachesis.plugins.sandbox.records import SandboxError
from lachesis.plugins.sandbox.warden import keep

# The directory that has this package, which a warden inside needs to start, and its place there.
_ROOT, _INSIDE = Path(__file__).parents[3], "/lachesis"
_CHUNK = 1 << 16
_CONTAINER_PROCESSES = "512"
DEFAULT_IMAGE = "python:3.12-slim"


def run_inside(link: socket.socket, container: Sequence[str], walls: str) -> None:
    """Run a container with a warden inside, in a child process; the warden has ``link`` as its input and output.

    It stays in this process's group, and ends with it.
    """
    main = f"import sys; sys.path.insert(0, {_INSIDE!r}); import lachesis; sys.path.append(sys.path.pop(0)); "
    main += f"from lachesis.plugins.sandbox.commands import keep_inside; keep_inside({walls!r})"
    subprocess.run(
        [*container, "python3", "-I", "-c", main],
        stdin=link.fileno(),
        stdout=link.fileno(),
        stderr=subprocess.DEVNULL,
        check=False,
    )


def keep_inside(walls: str) -> None:
    """Run a warden inside a container, whose standard streams are pipes, with them as its link."""
    link, other = socket.socketpair()
    if os.fork() == 0:
        link.close()
        _pump(other)
        return
    other.close()
    os.setpgid(0, 0)  # what a program leaves is found by its group
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


def container(program: str, image: str) -> Callable[[], Sequence[str]]:
    """Return the command line of ``docker`` or ``podman`` with an image that has Python 3.11 or later."""

    def line() -> Sequence[str]:
        words = [_found(program), "run", "--rm", "--interactive", "--network", "none", "--read-only"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", _CONTAINER_PROCESSES]
        return [*words, "--tmpfs", "/tmp", "--volume", f"{_ROOT}:{_INSIDE}:ro", image]

    return line


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise SandboxError(f"there is no program {program}", remedy=f"install it, as by apt-get install {program}")
    return path
