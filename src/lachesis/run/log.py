"""The log of a run, and the words in which it says what ended one."""

from __future__ import annotations

import logging
from contextlib import suppress

from lachesis.common.errors import LachesisError


class LogFile(logging.FileHandler):
    """A log that a full disk ends without a word: what goes into it is shown on the screen too."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def reason_of(failure: BaseException) -> str:
    """What ended the run, in words."""
    if isinstance(failure, KeyboardInterrupt):
        return "it was stopped at once, by a second signal, without a checkpoint of the step it was in"
    return str(failure) if isinstance(failure, LachesisError) else f"{type(failure).__name__}: {failure}"
