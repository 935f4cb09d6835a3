"""Services beside the ranks on a Ray cluster: each engine, the rollout API, the environment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lachesis.plugins.cluster.placement import Ended, Lost, Place, Task, failure, is_final
from lachesis.plugins.cluster.ray_cluster import RayCluster

logger = logging.getLogger("lachesis")

_AGAIN_S = 5.0
_LOOK_S = 0.5
# After so long Ray knows of a node that went without a word.
NEWS_S = 40.0


class Watch:
    """Pending calls on hosts, each with a handler of its outcome; and handlers that are due later."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self._calls: dict[Any, tuple[Place | None, Callable[[Any], None]]] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []

    def on(self, call: Any, then: Callable[[Any], None], *, place: Place | None = None) -> None:
        """Have ``then`` called with the outcome of a call to a host, which is at ``place`` if that is known."""
        self._calls[call] = (place, then)

    def later(self, then: Callable[[], None], *, after_s: float) -> None:
        """Have it called after so many seconds."""
        self._later.append((time.monotonic() + after_s, then))

    def look(self) -> None:
        """Wait shortly, and run the handlers that are due. Raises their errors."""
        for call in self.cluster.wait_any(list(self._calls), limit_s=_LOOK_S):
            place, then = self._calls.pop(call)
            then(self.cluster.outcome(call, place=place))
        if not self._calls:
            time.sleep(_LOOK_S)
        now = time.monotonic()
        due = [then for at, then in self._later if at <= now]
        self._later = [(at, then) for at, then in self._later if at > now]
        for then in due:
            then()


class Service:
    """A process that is restarted when it ends, and on another node if its node is lost.

    Args:
        name: in messages.
        new_host: asks for a host; Ray gives it a node when there is room.
        task: the process to run at a place.
        moved: called whenever :attr:`place` has changed.
        restarts: how often it is restarted after failures.
        may_end: True if an end with exit code 0 is not a failure.
    """

    def __init__(
        self,
        name: str,
        watch: Watch,
        *,
        new_host: Callable[[], Any],
        task: Callable[[Place], Task],
        moved: Callable[[], None] = lambda: None,
        restarts: int,
        may_end: bool = False,
    ) -> None:
        self.name = name
        self.place: Place | None = None
        self._watch, self._new_host, self._task, self._moved = watch, new_host, task, moved
        self._most, self._may_end = restarts, may_end
        self._failures = 0
        self.host = new_host()

    def settle(self, *, run: bool = True) -> None:
        """Learn where its host is as soon as it has a place, and ``run`` it there."""
        self._watch.on(self.host.place.remote(), partial(self._settled, self.host, run))

    def run(self) -> None:
        """Start the process. Its place is known."""
        assert self.place is not None, "it has settled"
        self._watch.on(self.host.run.remote(self._task(self.place)), partial(self._ended, self.host), place=self.place)

    def replace(self) -> None:
        """End the host, and begin with another one."""
        self._watch.cluster.end(self.host)
        self._begin()

    def _settled(self, host: Any, run: bool, outcome: Place | Lost) -> None:
        if host is not self.host:
            return
        if isinstance(outcome, Lost):
            if not outcome.node_lost:
                self._count(outcome)
            self._watch.later(partial(self._begin_for, host), after_s=_AGAIN_S)
            return
        logger.info("%s is at %s", self.name, outcome.address)
        self.place = outcome
        self._moved()
        if run:
            self.run()

    def _ended(self, host: Any, outcome: Ended | Lost) -> None:
        """Restart after an end; raises the process's error if a restart would not help, or restarts are used up."""
        if host is not self.host:
            return
        if isinstance(outcome, Ended) and outcome.code == 0 and self._may_end:
            logger.warning("%s has ended by itself, and is not started again", self.name)
            return
        if isinstance(outcome, Lost):
            self._lost(host, outcome, time.monotonic() + NEWS_S)
            return
        self._count(outcome)
        self._watch.later(partial(self._run_on, host), after_s=_AGAIN_S)

    def _lost(self, host: Any, outcome: Lost, until: float) -> None:
        """Another place, once it is known whether the node is lost too, on which Ray would put it else."""
        if host is not self.host:
            return
        node_lost = outcome.node_lost or (self.place is not None and not self._watch.cluster.lives(self.place))
        if not node_lost and time.monotonic() < until:
            self._watch.later(partial(self._lost, host, outcome, until), after_s=_LOOK_S)
            return
        if node_lost:
            logger.warning("%s is lost with its node; it gets another place", self.name)
        else:
            self._count(outcome)
        self._begin()

    def _run_on(self, host: Any) -> None:
        if host is self.host:
            self.run()

    def _begin_for(self, host: Any) -> None:
        if host is self.host:
            self._begin()

    def _begin(self) -> None:
        self.place = None
        self._moved()
        self.host = self._new_host()
        self.settle()

    def _count(self, outcome: Ended | Lost) -> None:
        error = failure(self.name, outcome)
        self._failures += 1
        if is_final(outcome) or self._failures > self._most:
            raise error
        logger.warning("%s; it is started again (%d of %d)", error.message, self._failures, self._most)
