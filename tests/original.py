"""The original Atropos, which ours is run against. The Python that has it is named by ``ATROPOS_PYTHON``.

`make contracts` and `make e2e` install it and say so. Without it these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.unit.plugins.atropos.api.processes import Server, running

_NAMED = os.environ.get("ATROPOS_PYTHON", "")
needs_original = pytest.mark.skipif(
    not _NAMED, reason="ATROPOS_PYTHON names no Python that has atroposlib; `make original` installs one"
)
# A venv's interpreter is a link, which has to stay one. -E: what is set for our processes is not meant for its.
_PYTHON = Path(_NAMED).absolute()
PYTHON = (str(_PYTHON), "-E")
RUN_API = (*PYTHON, str(_PYTHON.with_name("run-api")))


@contextmanager
def original(cwd: Path) -> Iterator[Server]:
    """Its rollout API as a process of its own."""
    port = free_port()
    with running([*RUN_API, "--host", "127.0.0.1", "--port", str(port)], port=port, cwd=cwd) as server:
        yield server
