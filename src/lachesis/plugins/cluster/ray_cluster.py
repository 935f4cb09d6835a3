"""Access to Ray: nodes, places, hosts on them. Only this module imports it, and only when Ray places a run.

A host is an actor that starts processes on its node and watches them, by :mod:`lachesis.process.managed`: they end with
it, however it ends. Ray does not restart hosts (`max_restarts=0`): the caller decides what follows from a loss.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError, DependencyError, LachesisError, first_line
from lachesis.plugins.cluster.placement import Bundle, Ended, Lost, NodeRoom, Place, Task
from lachesis.process.managed import ManagedProcess

# Of a host: processes at a time, and calls beside them.
_CALLS = 64
# What Ray says of an actor that went with its node.
_NODE_DIED = "its node has died"
_SESSIONS = "LACHESIS_SESSION_DIR"


class Host:
    """Runs on a node, as an actor. ``job`` tells the sessions of its engines from those of other jobs there."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._running: dict[str, tuple[ManagedProcess, threading.Event]] = {}
        self._stopping = False
        self._ray_here = os.getppid()

    def place(self) -> Place:
        """Return this host's location."""
        ray: Any = import_module("ray")
        address = str(ray.util.get_node_ip_address())
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        return Place(node=ray.get_runtime_context().get_node_id(), address=address, free_port=port)

    def run(self, task: Task) -> Ended | Lost:
        """Start a process, and say how it ended once it has; where Ray is gone from here it has ended with that."""
        ended = threading.Event()
        sessions = str(Path(tempfile.gettempdir()) / f"lachesis-{self._job}")
        process = ManagedProcess(
            [sys.executable, "-m", "lachesis", *task.words],
            name=task.name,
            log_path=task.log,
            # Ray's own, by which a process would take itself for one of its workers.
            env={name: None for name in os.environ if name.startswith("RAY_")}
            | {_SESSIONS: sessions}
            | dict(task.environment),
            grace_s=task.grace_s,
            on_death=lambda error: ended.set(),
        )
        if self._stopping:
            return Ended(None, "its host is being stopped")
        try:
            process.launch()
        except LachesisError as error:
            return Ended(error.exit_code, f"error: {error}")
        self._running[task.name] = (process, ended)
        ended.wait()
        del self._running[task.name]
        if os.getppid() != self._ray_here:
            return Lost("Ray has ended on its node", node_lost=True)
        return Ended(process.exit_code, last_words(process.last_lines()))

    def stop(self) -> None:
        """End all its processes, which have some seconds for it; it may be used again afterwards."""
        self._stopping = True
        running = list(self._running.values())
        stops = [threading.Thread(target=process.stop) for process, _ in running]
        for thread in stops:
            thread.start()
        for thread in stops:
            thread.join()
        for _, ended in running:
            ended.set()
        self._stopping = False


def last_words(lines: Sequence[str]) -> str:
    """Return the error at the end of a log with the lines after it; without an error the last line."""
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[errors[-1] :]) if errors else "".join(lines[-1:])


class RayCluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._job = f"ray-{ray.get_runtime_context().get_job_id()}-{os.urandom(4).hex()}"
        self._groups: list[Any] = []

    def nodes(self) -> dict[str, NodeRoom]:
        """Return the live nodes, by Ray's names."""
        return {
            node["NodeID"]: NodeRoom(
                address=node["NodeManagerAddress"],
                cpus=int(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        }

    def reserve(self, bundles: Sequence[Bundle], *, near: str | None = None) -> Any:
        """Reserve a placement group with each bundle on another node; a single bundle on ``near`` if it has room."""
        module = import_module("ray.util.placement_group")
        single = {"strategy": "STRICT_PACK", "_soft_target_node_id": near}
        options = single if len(bundles) == 1 else {"strategy": "STRICT_SPREAD"}
        group = module.placement_group([dict(bundle) for bundle in bundles], **options)
        self._groups.append(group)
        return group

    def host(self, group: Any = None, *, bundle: int = 0, needs: Bundle | None = None) -> Any:
        """Start a host in a bundle of a group, or on any node; it has what it ``needs`` of the bundle."""
        needs = needs or {}
        options: dict[str, Any] = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
        strategy: Any = "SPREAD"
        if group is not None:
            module = import_module("ray.util.scheduling_strategies")
            strategy = module.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = self._ray.remote(Host)
        return actor.options(scheduling_strategy=strategy, max_restarts=0, max_concurrency=_CALLS, **options).remote(
            self._job
        )

    def wait(self, calls: Sequence[Any], *, limit_s: float) -> list[Any]:
        """Return the calls that have an outcome after at most ``limit_s`` seconds."""
        return self._ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)[0] if calls else []

    def wait_any(self, calls: Sequence[Any], *, limit_s: float) -> list[Any]:
        """Return the calls that have an outcome as soon as one has."""
        return self._ray.wait(list(calls), num_returns=1, timeout=limit_s)[0] if calls else []

    def outcome(self, call: Any, *, place: Place | None = None) -> Any:
        """Return the result of a call; :class:`Lost` if its host, last known at ``place``, is gone."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayActorError as error:
            if _NODE_DIED in str(error) or (place is not None and not self.lives(place)):
                return Lost(
                    "its node is gone" if place is None else f"its node {place.address} is gone", node_lost=True
                )
            return Lost(_reason(error), node_lost=False)

    def lives(self, place: Place) -> bool:
        """Return True if Ray believes the node alive; of a node that vanished it learns after a while."""
        return place.node in self.nodes()

    def end(self, host: Any) -> None:
        """End a host, and what runs on it."""
        with suppress(Exception):  # Ray has no name for all that may be wrong with what is gone
            self._ray.kill(host)

    def release(self) -> None:
        """Give back all places."""
        module = import_module("ray.util.placement_group")
        for group in self._groups:
            module.remove_placement_group(group)
        self._groups.clear()


@contextmanager
def connected(environment: Mapping[str, str] = os.environ) -> Iterator[RayCluster]:
    """Connect to the cluster at RAY_ADDRESS, or to the one that this machine is part of.

    Raises:
        DependencyError: Ray is not installed.
        ConfigError: there is no cluster.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise DependencyError("Ray is not installed", remedy="pip install 'lachesis[ray]', on all nodes") from error
    address = environment.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS is {address}, of a client that is outside of the cluster",
            remedy="start the run on one of its nodes, as by `ray job submit -- lachesis run CONFIG`",
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address}: {first_line(error)}",
            remedy="start one with `ray start --head`, or set RAY_ADDRESS, or cluster.kind: local",
        ) from error
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def _reason(error: BaseException) -> str:
    """Return the first line of Ray's error that gives a reason; a log may follow it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "because" in line or "Error: " in line or "exit" in line]
    return (said or lines or [type(error).__name__])[0]
