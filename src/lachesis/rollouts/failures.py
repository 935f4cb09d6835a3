"""Rollouts that came to no reward, each with its cause: what a run keeps of them in failures.jsonl."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

# A logger of its own: sources know of no run directory, and whoever has one listens here.
_LOGGER = logging.getLogger("lachesis.failures")
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False
_LOGGER.addHandler(logging.NullHandler())


def note_failure(message: str, *, cause: str, prompt_id: str = "") -> None:
    """Tell whoever listens of one rollout, or of a group where no single one is to blame."""
    _LOGGER.info("%s", message, extra={"rollout_failure": {"cause": cause, "prompt": prompt_id, "message": message}})


class FailureFile(logging.Handler):
    """Within it each failure is a line of JSON: ``time`` (since 1970), ``cause``, ``prompt`` (its id), ``message``.

    The file is made with the first of them. A full disk ends it without a word: the run has other ways to say so.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __enter__(self) -> FailureFile:
        _LOGGER.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _LOGGER.removeHandler(self)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        line = {"time": time.time(), **vars(record)["rollout_failure"]}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass
