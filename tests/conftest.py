"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from _pytest import logging as collecting

from tests.logs import RootLogs

# Before torch is imported: tests run small models, on which threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
collecting.catching_logs = RootLogs
# A shell's job in the background ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what is imported and collected: it stays, and looking through it takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """What is torn down at the end wants its garbage collected; not where other processes have run the tests."""
    if not config.getoption("forks", 0):
        gc.unfreeze()
