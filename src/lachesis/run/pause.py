"""The pause of a run between two of its steps, for as long as somebody wants it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from lachesis.common.deadline import Deadline, paused
from lachesis.metrics.names import format_seconds
from lachesis.run.directory import RunDirectory
from lachesis.run.requests import is_asked

logger = logging.getLogger("lachesis")

# How soon a run hears that it may go on, and that it is to stop or to save a checkpoint meanwhile: seconds.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class RequestedPause:
    """Holds a run up while its directory has the request.

    Args:
        run: whose directory it is; its state says that the run is paused.
        watch: asked meanwhile; what it raises ends the pause, and the run's wait with it.
        look_s: how often it looks.
    """

    run: RunDirectory
    watch: Callable[[], None]
    look_s: float = _LOOK_S

    def __call__(self, step: int, meanwhile: Callable[[], None]) -> None:
        """Return at once, or when the request is gone. ``step`` is done; ``meanwhile`` is called at each look.

        Raises:
            What ``watch`` and ``meanwhile`` raise.
        """
        if not is_asked(self.run.path, "pause"):
            return
        logger.warning("paused after step %d, as was asked; `lachesis watch %s` lets it go on", step, self.run.path)
        self.run.update(status="paused", step=step)
        wait = Deadline("the pause that somebody has asked for", None)
        with wait.waiting(), paused():
            while is_asked(self.run.path, "pause"):
                self.watch()
                meanwhile()
                time.sleep(self.look_s)
        self.run.update(status="running")
        logger.warning("goes on with step %d after a pause of %s", step + 1, format_seconds(wait.elapsed_s()))
