"""Processes from a server that has imported once what they need: torch alone takes more than a second."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver as servers
from multiprocessing.context import ForkServerContext

from tests.paths import ROOT

TENSORS = ("tests.unit.transport.sharing", "tests.unit.transport.test_channel")


def forkserver(preload: Sequence[str] = TENSORS) -> ForkServerContext:
    """One server serves all tests of a process, and what it imports is settled when the first of them starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with contextlib.chdir(ROOT):  # it finds the modules from here
        servers._forkserver.ensure_running()
    return context
