"""Runs code of a model, with tests, in a process of its own under limits of time and memory.

This keeps accidents away from the trainer: endless loops, floods of memory or output, ``sys.exit``. It is no
wall against code that means harm; for that, train in a container without network.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_MB = 2048

# Each test that passes is reported at once, so that those before an endless loop count. What the code prints
# goes nowhere; the mark, unknown to it, keeps it from reporting success by chance.
_HARNESS = """
import json, os, resource, sys
task = json.load(sys.stdin)
limit = task["memory_mb"] * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**24, 2**24))
report = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
space = {"__name__": "solution"}
def attempt(statements):
    try:
        exec(compile(statements, "<solution>", "exec"), space)
    except BaseException:
        return False
    return True
if attempt(task["code"]):
    for number, test in enumerate(task["tests"]):
        if attempt(test):
            os.write(report, f"{task['mark']} {number}\\n".encode())
"""


def run_tests(
    code: str, tests: Sequence[str], *, time_limit_s: float = TIME_LIMIT_S, memory_mb: int = MEMORY_LIMIT_MB
) -> int:
    """How many of the tests pass after ``code`` ran; 0 where that raises or ends the process.

    Args:
        tests: statements such as ``assert f(1) == 2``, all run in the namespace that ``code`` leaves.
        time_limit_s: for all together; tests that passed before it count.
    """
    mark = secrets.token_hex(8)
    task = json.dumps({"code": code, "tests": list(tests), "memory_mb": memory_mb, "mark": mark})
    with tempfile.TemporaryDirectory(prefix="lachesis-code-") as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _HARNESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"PATH": os.environ.get("PATH", ""), "HOME": directory, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(task.encode("utf-8", "replace"), timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
        finally:
            _kill(process)
    reported = {line for line in output.decode("ascii", "replace").splitlines() if line.startswith(mark)}
    return len(reported)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started; they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
