"""Keeping the command line's log handlers to one call, where a process makes several."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Handlers that are added to the loggers within are gone after it."""
    loggers = (logging.getLogger(), logging.getLogger("lachesis"))
    before = [list(logger.handlers) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
