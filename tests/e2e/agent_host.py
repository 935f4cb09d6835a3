"""Agents as processes that have their imports behind them, which take a second or two for each rollout.

``serve`` waits at a socket, and forks a process for whoever knocks; ``KNOCK`` is the program that a run starts as its
agent. It gives its arguments, variables, directory and streams to the forked process, and ends as that does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KNOCK = """
import json, os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect(sys.argv[1])
told = {"arguments": sys.argv[2:], "variables": dict(os.environ), "directory": os.getcwd()}
socket.send_fds(door, [json.dumps(told).encode()], [0, 1, 2])
code = door.recv(1)
sys.exit(code[0] if code else 1)
"""


@contextmanager
def host(program: Path, directory: Path) -> Iterator[list[str]]:
    """Forks agents of ``program``; yields the command that is given their arguments.

    The program is a file whose ``main()`` is an agent. Its ``prepare()`` is called once, in front of all forks.
    """
    path = directory / "door"
    server = subprocess.Popen([sys.executable, __file__, str(program), str(path)], start_new_session=True,
                              stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield [sys.executable, "-IS", "-c", KNOCK, str(path)]
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with agents that were left behind
        server.wait()


def serve(program: str, path: str) -> None:
    space: dict[str, Any] = {"__name__": "agent"}
    exec(compile(Path(program).read_text(), program, "exec"), space)
    space["prepare"]()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"ready\n")
    while True:
        door, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become(door, space["main"])
        door.close()


def _become(door: socket.socket, main: Callable[[], None]) -> None:
    """The agent of whoever knocked."""
    code = 1
    try:
        said, streams, *_ = socket.recv_fds(door, 1 << 20, 3)
        told = json.loads(said)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(told["variables"])
        os.chdir(told["directory"])
        sys.argv[1:] = told["arguments"]
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    door.send(bytes([code]))
    os._exit(code)


if __name__ == "__main__":
    serve(*sys.argv[1:])
