"""Log handlers: the command line's, where a process makes several calls, and those by which pytest collects."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from _pytest import logging as collecting


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


class RootLogs(collecting.catching_logs):
    """pytest's handlers, six times a test, at the root alone: nothing of ours is kept from it.

    pytest itself looks through all loggers, of which libraries make many hundreds, for such as hand nothing on to it.
    """

    __slots__ = ()

    def __enter__(self) -> logging.Handler:
        root = logging.getLogger()
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        return self.handler
