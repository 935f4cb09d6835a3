"""The ranks of a run on a Ray cluster: started together, and all again from the last checkpoint after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lachesis.common.deadline import Deadline, Retry, wait_until
from lachesis.common.errors import DeadlineExceeded
from lachesis.common.run_files import run_paths
from lachesis.plugins.cluster.placement import (
    Ended,
    Lost,
    Place,
    RayJob,
    cause,
    failure,
    is_final,
    rank_bundles,
    rank_tasks,
    start_options,
)
from lachesis.plugins.cluster.ray_services import NEWS_S, Watch

logger = logging.getLogger("lachesis")

# How long ranks may take to end by themselves after one has, and those that are told to.
_ALONE_S, _STOP_S = 15.0, 60.0
# What ran on a lost node ends within this time, where it is Ray alone that is gone from there.
_LOST_S = 5.0
_LOOK_S = 0.5


_FROM: Mapping[tuple[str, ...], str] = {
    ("--resume",): "from the last checkpoint",
    ("--overwrite",): "from the start, as there is no checkpoint yet",
}


class Ranks:
    """Ranks on their own hosts, one host for each node.

    Args:
        options: of the first start, as `--resume`.
        meanwhile: called repeatedly while places are awaited; an error that it raises ends the wait.
    """

    def __init__(
        self, job: RayJob, watch: Watch, *, options: Sequence[str], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        self._job, self._watch, self._cluster, self._options = job, watch, watch.cluster, options
        self._meanwhile = meanwhile
        bundles = rank_bundles(job.layout)
        self.group = self._cluster.reserve(bundles)
        self.hosts: list[Any] = [self._new_host(node) for node in range(len(bundles))]
        self.places: list[Place] = []
        self.finished = False
        self._state_before = self._state_written()
        self._ends: dict[int, Ended | Lost] = {}
        self._failed_at: float | None = None
        self._attempt = self._failures = 0

    @property
    def begun(self) -> bool:
        """True if the run in the directory is this job's."""
        return self._state_written() != self._state_before

    def settle(self) -> None:
        """Wait until all hosts have a place, and new ports are known. Raises DeadlineExceeded."""
        until = time.monotonic() + self._job.config.cluster.wait_s
        found: dict[int, Place] = {}
        calls = {node: host.place.remote() for node, host in enumerate(self.hosts)}
        while calls:
            done = self._cluster.wait(list(calls.values()), limit_s=_LOOK_S)
            for node, call in [(node, call) for node, call in calls.items() if call in done]:
                outcome = self._cluster.outcome(call)
                if isinstance(outcome, Lost):  # of a node, or with one, of whose loss Ray has not known
                    calls[node] = self._replace(node).place.remote()
                else:
                    found[node] = outcome
                    del calls[node]
            self._meanwhile()
            if calls and time.monotonic() > until:
                raise self._no_room()
        self.places = [found[node] for node in range(len(self.hosts))]

    def start(self) -> None:
        """Start all of them; where the run has begun, from its last checkpoint."""
        self._ends, self._failed_at = {}, None
        self._attempt += 1
        begun = self.begun
        options = start_options(self._options, begun=begun, has_checkpoint=begun and self._has_checkpoint())
        if begun:
            logger.warning("the ranks are started again, %s", _FROM[options])
        for host, place, tasks in zip(
            self.hosts, self.places, rank_tasks(self._job, self.places, options=options), strict=True
        ):
            for task in tasks:
                rank = int(task.environment["RANK"])
                ended = partial(self._ended, self._attempt, rank)
                self._watch.on(host.run.remote(task), ended, place=place)

    def look(self) -> bool:
        """Return True if ranks failed and have to be started again; all of them have been stopped then.

        Raises:
            LachesisError: that of the ranks, if a restart would not help, or restarts are used up.
        """
        if self._failed_at is None:
            return False
        if len(self._ends) < self._job.layout.ranks and time.monotonic() < self._failed_at + _ALONE_S:
            return False
        rank, end = cause(self._ends)
        error = failure(f"rank {rank}", end)
        lost = any(isinstance(one, Lost) for one in self._ends.values())
        if is_final(end):
            raise error
        if isinstance(end, Lost) and self._node_lost(rank, end):
            logger.warning("rank %d is lost with its node", rank)
        else:
            self._failures += 1
            if self._failures > self._job.config.cluster.restarts:
                raise error
            logger.warning("%s (failure %d of %d)", error.message, self._failures, self._job.config.cluster.restarts)
        self._stop()
        if lost:
            time.sleep(_LOST_S)
        return True

    def _ended(self, attempt: int, rank: int, outcome: Ended | Lost) -> None:
        if attempt != self._attempt:
            return
        self._ends[rank] = outcome
        if isinstance(outcome, Ended) and outcome.code == 0:
            self.finished = self.finished or rank == 0
        elif self._failed_at is None:
            self._failed_at = time.monotonic()

    def _new_host(self, node: int) -> Any:
        bundles = rank_bundles(self._job.layout)
        return self._cluster.host(self.group, bundle=node, needs=bundles[node])

    def _node_lost(self, rank: int, end: Lost) -> bool:
        """Return True if the rank's node is lost too, which Ray may learn later."""
        place = self.places[rank // self._job.layout.ranks_per_node]
        news = Deadline(f"rank {rank}: news of its node", NEWS_S, watch=self._meanwhile)

        def lives() -> str:
            return f"Ray has {place.node}" if not end.node_lost and self._cluster.lives(place) else ""

        try:
            wait_until(lives, Retry(news, first_s=_LOOK_S, longest_s=_LOOK_S))
        except DeadlineExceeded:
            return False
        return True

    def _stop(self) -> None:
        """End the remaining ranks; replace hosts that are gone or do not answer."""
        calls = [host.stop.remote() for host in self.hosts]
        done = self._cluster.wait(calls, limit_s=_STOP_S)
        for node, call in enumerate(calls):
            if call not in done or isinstance(self._cluster.outcome(call), Lost):
                self._replace(node)

    def _replace(self, node: int) -> Any:
        self._cluster.end(self.hosts[node])
        self.hosts[node] = self._new_host(node)
        return self.hosts[node]

    def _no_room(self) -> DeadlineExceeded:
        bundles = rank_bundles(self._job.layout)
        there = ", ".join(
            f"{node.address} {node.cpus} CPU(s) {node.gpus} GPU(s)" for node in self._cluster.nodes().values()
        )
        asked = ", ".join(f"{int(count)} {name}" for name, count in bundles[0].items())
        return DeadlineExceeded(
            f"Ray had no room for {len(bundles)} node(s) of ranks with {asked} each within "
            f"{self._job.config.cluster.wait_s:g} s (cluster.wait_s); its nodes: {there}",
            remedy="start more nodes, end what else runs there, or lower cluster.nodes",
        )

    def _state_written(self) -> int | None:
        """Return when the run in the directory last wrote its state: a change shows that this job writes it."""
        path = run_paths(self._job.run_dir)["state"]
        return path.stat().st_mtime_ns if path.is_file() else None

    def _has_checkpoint(self) -> bool:
        from lachesis.train.checkpoint import CheckpointManager  # imports torch, which is not needed until then

        return CheckpointManager(run_paths(self._job.run_dir)["checkpoints"], keep_last=1).latest() is not None
