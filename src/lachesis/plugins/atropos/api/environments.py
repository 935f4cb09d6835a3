"""Registered environments, and their view of the queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lachesis.plugins.atropos.api.batching import Demand, GroupQueue
from lachesis.plugins.atropos.api.wire import EnvRegistration

# Below this weight an environment would be starved of requests.
MIN_WEIGHT = 0.01
_SMOOTHING = 0.05


@dataclass(slots=True)
class RegisteredEnvironment:
    """Registration of an environment. ``last_seen`` and ``last_post`` are seconds on the server's monotonic clock.

    ``reason`` says why a disconnected environment ended, if it gave a reason.
    """

    id: int
    name: str
    asked: EnvRegistration
    last_seen: float
    last_post: float
    connected: bool = True
    reason: str = ""
    groups: int = 0
    set_aside: int = 0
    score: float | None = None

    def note_group(self, *, score: float | None, now: float) -> None:
        """Count a group; ``score`` of the environment is a running mean over its last groups."""
        self.groups += 1
        self.last_post = now
        if score is not None:
            self.score = score if self.score is None else self.score + _SMOOTHING * (score - self.score)

    @property
    def share(self) -> float:
        """Return the environment's claim on requests: its weight times the length of its sequences."""
        return max(0.0, self.asked.weight) * self.asked.max_token_length


class Environments:
    """Registrations of a run, by id.

    An environment counts while it is connected and was heard from within ``timeout_s``: the original's clients
    never disconnect, and one that died must not hold up batches with its minimum.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._all: list[RegisteredEnvironment] = []

    def __iter__(self) -> Iterator[RegisteredEnvironment]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def get(self, env_id: int | None) -> RegisteredEnvironment | None:
        """Return the environment, None if that id is not registered."""
        return self._all[env_id] if env_id is not None and 0 <= env_id < len(self._all) else None

    def add(self, asked: EnvRegistration, *, now: float) -> RegisteredEnvironment:
        """Register an environment: ids count up, and equal desired names get a number."""
        namesakes = sum(environment.asked.desired_name == asked.desired_name for environment in self._all)
        name = f"{asked.desired_name}_{namesakes}"
        environment = RegisteredEnvironment(id=len(self._all), name=name, asked=asked, last_seen=now, last_post=now)
        self._all.append(environment)
        return environment

    def present(self, now: float) -> list[RegisteredEnvironment]:
        """Return the environments that are connected and were heard from recently."""
        return [env for env in self._all if env.connected and now - env.last_seen <= self._timeout_s]

    def ended(self) -> str:
        """Return why the latest environment has left; empty if it gave no reason."""
        last = self._all[-1] if self._all else None
        return "" if last is None or last.connected or not last.reason else f"{last.name} ended: {last.reason}"

    def demand(self, batch_size: int, now: float) -> Demand:
        """Return the sequences that the next batch owes to environments, and the group sizes that may still arrive."""
        present = self.present(now)
        minimums = {
            env.id: int(batch_size * min(1.0, env.asked.min_batch_allocation))
            for env in present
            if env.asked.min_batch_allocation is not None
        }
        return Demand(
            batch_size=batch_size,
            minimums={env_id: owed for env_id, owed in minimums.items() if owed > 0},
            sizes=frozenset(env.asked.group_size for env in present if now - env.last_post <= self._timeout_s),
        )

    def status(self, env: RegisteredEnvironment, queue: GroupQueue, *, batch_size: int, now: float) -> dict[str, Any]:
        """Return the figures of GET /status-env, by which environments throttle themselves.

        ``queue_size`` is in groups of the caller: its own sequences, and others' beyond their minimum.
        """
        present = self.present(now)
        minimums = {
            other.id: other.asked.min_batch_allocation
            for other in present
            if other.asked.min_batch_allocation is not None
        }
        shares = sum(other.share for other in present)
        group_size = max(env.asked.group_size, queue.largest(env.id))
        largest = max(queue.largest(), 1)
        own = queue.sequences.get(env.id, 0)
        others = 0
        if largest > 1:
            for other, sequences in queue.sequences.items():
                packed = -(-sequences // largest) * largest
                owed = int(batch_size * minimums.get(other, 0.0)) if other is not None else 0
                others += max(0, packed - owed) if other != env.id else 0
        return {
            "queue_size": (own + others) // group_size,
            "unallocated_fraction": 1.0 - min(1.0, max(0.0, sum(minimums.values()))),
            "self_queue_size": own // group_size,
            "max_group_size": largest,
            "env_weight": max(MIN_WEIGHT, env.share / shares) if shares else MIN_WEIGHT,
        }

    def dump(self) -> list[dict[str, Any]]:
        """Return the state that a restart must not lose, for the store."""
        return [{"name": env.name, "connected": env.connected, "asked": env.asked.model_dump()} for env in self._all]

    def load(self, records: list[dict[str, Any]], *, now: float) -> None:
        """Undo :meth:`dump`; every environment counts as just heard from."""
        self._all = []
        for index, record in enumerate(records):
            asked = EnvRegistration(**record["asked"])
            environment = RegisteredEnvironment(
                id=index, name=record["name"], asked=asked, last_seen=now, last_post=now
            )
            environment.connected = record["connected"]
            self._all.append(environment)
