"""The engine behind the environments: where it is gone, no batch will come."""

from __future__ import annotations

import time

from lachesis.common.errors import EngineError
from lachesis.common.threads import Watch, call_watched
from lachesis.engines.base import Engine

_EVERY_S = 5.0


class EngineWatch:
    """Called again and again while a batch is waited for, looks at the engine from time to time.

    Args:
        engine: that the trainer's weights go to.
        watch: called while the engine is looked at, which may take a while where it hangs.
        every_s: seconds between two looks.
    """

    def __init__(self, engine: Engine, *, watch: Watch = lambda: None, every_s: float = _EVERY_S) -> None:
        self._engine = engine
        self._watch = watch
        self._every_s = every_s
        self._looked = time.monotonic()

    def __call__(self) -> None:
        """Raise EngineError where it is gone, or another one is in its place."""
        if time.monotonic() - self._looked < self._every_s:
            return
        health = call_watched(self._engine.health, watch=self._watch)
        self._looked = time.monotonic()
        if not health.ready and not health.paused:
            raise EngineError(
                f"the environments cannot generate: {health.detail}",
                remedy="look at the engine's log, start it again and go on with --resume",
            )
