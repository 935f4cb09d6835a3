"""Rollouts without a reward, each with its cause, as a run records them in failures.jsonl."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from lachesis.common.types import Group
from lachesis.rollouts.rewards.functions import Excluded

logger = logging.getLogger(__name__)

# A separate logger: sources know no run directory, and its owner listens here.
_LOGGER = logging.getLogger("lachesis.failures")
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False
_LOGGER.addHandler(logging.NullHandler())


def note_failure(message: str, *, cause: str, prompt_id: str = "") -> None:
    """Report the failure of one rollout, or of a group if no single rollout is to blame, to the listeners."""
    _LOGGER.info("%s", message, extra={"rollout_failure": {"cause": cause, "prompt": prompt_id, "message": message}})


def excluded_in_words(group: Group, excluded: Mapping[int, Excluded]) -> dict[int, str]:
    """Describe why samples of a group could not be judged, by their places."""
    size, prompt = len(group.samples), group.prompt.id
    return {
        place: f"sample {place + 1} of {size} of prompt {prompt!r} could not be judged: {reason.why or reason.cause}"
        for place, reason in excluded.items()
    }


def note_excluded(group: Group, excluded: Mapping[int, Excluded]) -> None:
    """Note each sample of a group that could not be judged."""
    for place, message in excluded_in_words(group, excluded).items():
        cause = excluded[place].counted
        note_failure(message, cause=cause, prompt_id=group.prompt.id)
        logger.warning("a sample is excluded (%s): %s", cause, message)


class FailureFile(logging.Handler):
    """Context in which each failure is written as JSON: ``time`` (since 1970), ``cause``, ``prompt`` (id), ``message``.

    The file is made with the first of them. A full disk ends it silently: the run reports that elsewhere.
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
