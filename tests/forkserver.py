"""Processes from a server that has imported once what they need: torch alone takes more than a second."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver as servers
from multiprocessing.context import ForkServerContext

from tests.paths import ROOT

TENSORS = ("tests.unit.transport.sharing", "tests.unit.transport.test_channel")

# By what they import: servers beside the only one that multiprocessing has by itself.
_others: dict[str, servers.ForkServer] = {}
_swapping = threading.Lock()


@contextlib.contextmanager
def forked_from(module: str) -> Iterator[None]:
    """Within it processes are forked from a server of its own that has imported ``module``, also later ones."""
    with _swapping:
        server = _others.get(module)
        if server is None:
            server = _others[module] = servers.ForkServer()
            server.set_forkserver_preload([module])
            with contextlib.chdir(ROOT):
                server.ensure_running()
        usual = servers.connect_to_new_process
        servers.connect_to_new_process = server.connect_to_new_process
        try:
            yield
        finally:
            servers.connect_to_new_process = usual


def take_over() -> None:
    """In a forked process: the servers that run are another's, and are used by both; Python would start them anew."""
    for server in (servers._forkserver, *_others.values()):
        if server._forkserver_address is not None:
            vars(server)["ensure_running"] = lambda: None


def forkserver(preload: Sequence[str] = TENSORS) -> ForkServerContext:
    """One server serves all tests of a process, and what it imports is settled when the first of them starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with contextlib.chdir(ROOT):  # it finds the modules from here
        servers._forkserver.ensure_running()
    return context
