"""`lachesis tinker-server` as a process of its own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import warm
from tests.paths import SOURCE
from tests.waiting import until

KEY = "tml-of-the-tests"


@contextmanager
def tinker_server(model: Path, directory: Path, *words: str) -> Iterator[str]:
    """Its address. It keeps checkpoints in ``directory``, and its log beside it."""
    log = directory.with_suffix(".log")
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ["tinker-server", "--model", str(model), "--dir", str(directory), "--port", "0", *words]
    with log.open("wb") as output:
        started = warm.Popen(
            [sys.executable, "-m", "lachesis", *command],
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TINKER_API_KEY": KEY},
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: address(log) or started.poll() is not None, log.read_text)
        found = address(log)
        assert found, log.read_text()
        yield found
    finally:
        started.terminate()
        started.wait(timeout=20)


def address(log: Path) -> str | None:
    """Return the address that the server has printed; None while it is not up."""
    found = re.search(r"to tinker at (\S+)", log.read_text())
    return found and found[1]
