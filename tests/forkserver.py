"""Processes from a server that has imported once what they need: torch alone takes more than a second."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

# One server serves all tests of a process, and what it imports is settled when the first of them starts it.
_PRELOAD = ["tests.unit.transport.sharing", "tests.unit.transport.test_channel"]


def forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context
