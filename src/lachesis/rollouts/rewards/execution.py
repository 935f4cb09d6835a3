"""Runs code of a model, with tests, in a process of its own under limits of time and memory.

This keeps accidents away from the trainer: endless loops, floods of memory or output, ``sys.exit``. It is no
wall against code that means harm; for that, train in a container without network.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lachesis.common.workers import ChildProcess, Limits

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_MB = 2048
_FILE_LIMIT_MB = 16


def run_tests(
    code: str, tests: Sequence[str], *, time_limit_s: float = TIME_LIMIT_S, memory_mb: int = MEMORY_LIMIT_MB
) -> int:
    """How many of the tests pass after ``code`` ran; 0 where that raises or ends the process.

    Args:
        tests: statements such as ``assert f(1) == 2``, all run in the namespace that ``code`` leaves.
        time_limit_s: for all together; tests that passed before it count.
    """
    # Unknown to the code, the mark keeps it from reporting success by chance.
    mark = os.urandom(8).hex()
    # Plain bytes are read back, never pickles: the code could send others.
    texts = [text.encode("utf-8", "replace").decode() for text in (code, *tests)]
    end = time.monotonic() + time_limit_s
    with (
        tempfile.TemporaryDirectory(prefix="lachesis-code-", ignore_cleanup_errors=True) as directory,
        ChildProcess(
            report_passes,
            texts,
            mark,
            timeout_s=time_limit_s,
            limits=Limits(memory_mb, _FILE_LIMIT_MB),
            directory=Path(directory),
        ) as child,
    ):
        most = sum(len(_report(mark, number)) for number in range(len(tests)))
        output = child.read(timeout_s=end - time.monotonic(), max_bytes=most)
    return len({line for line in output.splitlines() if line.startswith(mark.encode())})


def report_passes(link: socket.socket, texts: Sequence[str], mark: str) -> None:
    """In the child: run the code and then its tests; each that passes is reported at once, so that it counts even if
    the next one never ends."""
    namespace: dict[str, object] = {"__name__": "solution"}
    code, *tests = texts
    if _runs(code, namespace):
        for number, test in enumerate(tests):
            if _runs(test, namespace):
                link.sendall(_report(mark, number))


def _report(mark: str, number: int) -> bytes:
    return f"{mark} {number}\n".encode()


def _runs(statements: str, namespace: dict[str, object]) -> bool:
    try:
        exec(compile(statements, "<solution>", "exec", dont_inherit=True), namespace)
    except BaseException:
        return False
    return True
