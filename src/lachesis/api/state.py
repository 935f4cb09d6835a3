"""The state of the rollout API and every rule about it. No input or output: a request in, its change out.

Methods that alter anything return a :class:`~lachesis.api.records.Change` for the store. Time is an argument, in
seconds on one monotonic clock.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lachesis.api.batching import Demand, plan_batch, released, waiting_for
from lachesis.api.deliveries import Deliveries
from lachesis.api.environments import Environment, Environments
from lachesis.api.queue import GroupQueue
from lachesis.api.records import Batch, Change, HeldGroup, ScoredGroup, Snapshot
from lachesis.api.refusals import Refusal
from lachesis.api.set_aside import SetAside
from lachesis.api.wire import EnvRegistration, Registration

RETRY_AFTER_S = 2
_RECEIPTS = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server was started with. ``max_queued_tokens`` None does not bound the queue."""

    strict: bool = False
    max_queued_tokens: int | None = None
    ack_timeout_s: float = 600.0
    env_timeout_s: float = 300.0


@dataclass(slots=True)
class Counters:
    """Totals since the server started."""

    groups: int = 0
    sequences: int = 0
    tokens: int = 0
    batches: int = 0
    batch_sequences: int = 0
    refused_full: int = 0
    refused_bad: int = 0


class RolloutState:
    """Registrations, queue, buffers and batches of one training run."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self.set_aside = SetAside()
        self._clear()

    def _clear(self) -> None:
        self.registration: Registration | None = None
        self.started = False
        self.step = 0
        self.trainer: int | None = None
        self.environments = Environments(timeout_s=self.limits.env_timeout_s)
        self.queue = GroupQueue()
        self.buffers: dict[int, list[HeldGroup]] = {}
        self.deliveries = Deliveries(timeout_s=self.limits.ack_timeout_s)
        self.latest: ScoredGroup | None = None
        self._receipts: OrderedDict[str, bytes] = OrderedDict()
        self._next_number = 0
        self._next_position = 0
        self._next_batch = 0

    # -- trainers -----------------------------------------------------------------------------------------------

    def register(self, asked: Registration) -> tuple[int, Change]:
        """A trainer registers, perhaps again: what is queued stays, what it asks for counts from now on.

        The step never goes back. Batches that went to an earlier trainer and were not acknowledged are due.
        """
        trainer = uuid.uuid4().int
        old = self.registration
        self.registration = asked
        self.step = max(self.step, asked.starting_step)
        self.trainer = trainer if asked.acknowledge else None
        change = Change()
        if old is not None and old.batch_size != asked.batch_size:
            change = self._dissolve_returned()
        return trainer, self._with_summary(change)

    def next_batch(self, now: float) -> tuple[Batch | None, Change | None]:
        """The next batch for a trainer of the plain protocol; it leaves the state for good."""
        started = self._start()
        batch = self.deliveries.returned.popleft() if self.deliveries.returned else self._form(now)
        if batch is None:
            return None, self._with_summary(Change()) if started else None
        self._count_delivery(batch)
        removed = tuple(held.number for held in batch.groups)
        return batch, self._with_summary(Change(removed=removed))

    def next_batch_for(
        self, trainer: int, holds: Collection[int] | None, now: float
    ) -> tuple[Batch | None, Change | None]:
        """The next batch for a trainer that acknowledges: one that is due again, else a new one.

        Raises:
            Refusal: 409, another trainer registered since.
        """
        self.check_trainer(trainer)
        started = self._start()
        self.deliveries.renew(holds or (), trainer=trainer, now=now)
        batch = self.deliveries.due(trainer=trainer, holds=holds, now=now)
        if batch is None:
            returned = self.deliveries.returned
            batch = returned.popleft() if returned else self._form(now)
            if batch is None:
                return None, self._with_summary(Change()) if started else None
            self._count_delivery(batch)
        self.deliveries.hand_out(batch, trainer=trainer, now=now)
        batched = tuple((held.number, batch.id) for held in batch.groups)
        return batch, self._with_summary(Change(batched=batched))

    def put_back(self, batch: Batch) -> Change:
        """A plain trainer was gone before it could read ``batch``: the next one gets it."""
        self.deliveries.returned.appendleft(batch)
        self.step -= 1
        self.counters.batches -= 1
        self.counters.batch_sequences -= batch.sequences
        return self._with_summary(Change(added=batch.groups))

    def acknowledge(self, trainer: int, ids: Sequence[int], now: float) -> tuple[dict[str, Any], Change]:
        """The trainer has these batches for good. Unknown ids are named, not refused: an answer may be repeated.

        Raises:
            Refusal: 409, another trainer registered since.
        """
        self.check_trainer(trainer)
        done = self.deliveries.acknowledge(ids)
        known = {batch.id for batch in done}
        reply = {
            "status": "success",
            "acknowledged": sorted(known),
            "unknown": [batch_id for batch_id in ids if batch_id not in known],
            "outstanding": list(self.deliveries.outstanding),
        }
        return reply, Change(removed=tuple(held.number for batch in done for held in batch.groups))

    def check_trainer(self, trainer: int) -> None:
        """Only the trainer that registered last may take batches that it has to acknowledge."""
        if trainer != self.trainer:
            raise Refusal(409, "another trainer has registered since, or the API was reset: register again")

    def _start(self) -> bool:
        """Environments may register once a trainer polls; True the first time."""
        first = not self.started
        self.started = True
        return first

    def _form(self, now: float) -> Batch | None:
        if self.registration is None:
            return None
        keys = plan_batch(self.queue.lanes, self.demand(now))
        if keys is None:
            return None
        batch = Batch(id=self._next_batch, groups=self.queue.take(keys))
        self._next_batch += 1
        return batch

    def _count_delivery(self, batch: Batch) -> None:
        self.step += 1
        self.counters.batches += 1
        self.counters.batch_sequences += batch.sequences

    def _dissolve_returned(self) -> Change:
        """Batches of another size go back into the queue, for batches of the new one."""
        groups = [held for batch in self.deliveries.returned for held in batch.groups]
        self.deliveries.returned.clear()
        self.queue.put_back(groups)
        return Change(batched=tuple((held.number, None) for held in groups))

    def demand(self, now: float) -> Demand:
        """What the next batch has to be; a trainer has registered."""
        size = self.registration.batch_size if self.registration else 0
        return self.environments.demand(size, now)

    def waiting(self, now: float) -> str:
        """What the trainer is waiting for, as a sentence; empty where a batch is ready."""
        if self.registration is None:
            return "no trainer has registered"
        demand = self.demand(now)
        if self.deliveries.returned or plan_batch(self.queue.lanes, demand) is not None:
            return ""
        return waiting_for(self.queue.lanes, demand, {env.id: env.name for env in self.environments})

    # -- environments -------------------------------------------------------------------------------------------

    def register_env(self, asked: EnvRegistration, now: float) -> tuple[dict[str, Any], Change | None]:
        """An environment registers; it waits until a trainer has asked for its first batch."""
        if self.registration is None or not self.started:
            return {"status": "wait for trainer to start"}, None
        environment = self.environments.add(asked, now=now)
        reply = {
            "status": "success",
            "env_id": environment.id,
            "wandb_name": environment.name,
            "checkpoint_dir": self.registration.checkpoint_dir,
            "starting_step": self.step,
            "checkpoint_interval": self.registration.save_checkpoint_interval,
            "num_steps": self.registration.num_steps,
        }
        return reply, self._with_summary(Change())

    def disconnect_env(self, env_id: int) -> tuple[dict[str, Any], Change | None]:
        """An environment leaves: its weight and minimum no longer count. What it queued stays."""
        environment = self.environments.get(env_id)
        if environment is None:
            return {"status": "failure", "error": f"no environment has the id {env_id}"}, None
        environment.connected = False
        return {"status": "success"}, self._with_summary(Change())

    def status_env(self, env_id: int, now: float) -> dict[str, Any]:
        """GET /status-env.

        Raises:
            Refusal: 404, nothing registered under that id.
        """
        environment = self.environments.get(env_id)
        if environment is None:
            raise Refusal(404, f"no environment has the id {env_id}: register it again")
        environment.last_seen = now
        size = self.registration.batch_size if self.registration else 0
        figures = self.environments.status(environment, self.queue, batch_size=size, now=now)
        return {"current_step": self.step, **figures, **self._fill()}

    def receipt(self, key: str) -> bytes | None:
        """The reply to an earlier post with the same idempotency key."""
        return self._receipts.get(key)

    def post(self, groups: Sequence[ScoredGroup], *, now: float) -> tuple[list[dict[str, Any]], Change]:
        """Queue groups, or buffer those whose size is not their environment's; a reply for each.

        Raises:
            Refusal: 429, the queue is full; 413, it could never hold them. Nothing was queued.
        """
        self._check_room(groups)
        added: list[HeldGroup] = []
        placed: list[tuple[int, int]] = []
        replies = [self._accept(group, added, placed, now) for group in groups]
        return replies, Change(added=tuple(added), placed=tuple(placed))

    def remember(self, key: str, reply: bytes) -> None:
        """Keep the reply to a post for when it is repeated; the last 10,000 are known."""
        self._receipts[key] = reply
        if len(self._receipts) > _RECEIPTS:
            self._receipts.popitem(last=False)

    def _accept(
        self, group: ScoredGroup, added: list[HeldGroup], placed: list[tuple[int, int]], now: float
    ) -> dict[str, Any]:
        environment = self.environments.get(group.env_id)
        self.counters.groups += 1
        self.counters.sequences += group.sequences
        self.counters.tokens += group.tokens
        problem = self._problem(group, environment)
        if problem or not group.sequences:
            # A group without sequences is no part of any sum; the plain protocol has no word to say so.
            self.set_aside.add(group, problem or "it has no sequences", environment)
            return {"status": "set_aside", "reason": problem} if self.limits.strict else {"status": "received"}
        held = HeldGroup(number=self._next_number, position=None, group=group)
        self._next_number += 1
        if environment is not None:
            environment.note_group(tokens=group.tokens, score=group.score, now=now)
            if group.sequences < environment.group_size:
                return self._buffer(held, environment, added, placed)
        added.append(self._enqueue(held))
        return {"status": "received"}

    def _problem(self, group: ScoredGroup, environment: Environment | None) -> str:
        if not self.limits.strict:
            return ""
        if group.env_id is not None and environment is None:
            return f"env_id {group.env_id} was never registered"
        return group.problem

    def _buffer(
        self, held: HeldGroup, environment: Environment, added: list[HeldGroup], placed: list[tuple[int, int]]
    ) -> dict[str, Any]:
        buffer = self.buffers.setdefault(environment.id, [])
        buffer.append(held)
        leaving = set(released([entry.group.sequences for entry in buffer], environment.group_size))
        for index in sorted(leaving):
            queued = self._enqueue(buffer[index])
            if queued.number == held.number:
                held = queued
            else:
                placed.append((queued.number, queued.position or 0))
        added.append(held)
        buffer[:] = [entry for index, entry in enumerate(buffer) if index not in leaving]
        return {"status": "buffered", "buffer_size": sum(entry.group.sequences for entry in buffer)}

    def _enqueue(self, held: HeldGroup) -> HeldGroup:
        queued = HeldGroup(number=held.number, position=self._next_position, group=held.group)
        self._next_position += 1
        self.queue.append(queued)
        self.latest = held.group
        return queued

    def held_weight(self) -> int:
        """Tokens queued and buffered, as the limit counts them."""
        buffered = sum(held.group.weight for buffer in self.buffers.values() for held in buffer)
        return self.queue.weight + buffered

    def _check_room(self, groups: Sequence[ScoredGroup]) -> None:
        limit = self.limits.max_queued_tokens
        if limit is None:
            return
        asked = sum(group.weight for group in groups)
        if asked > limit:
            raise Refusal(413, f"{asked} tokens in one post are more than the queue may hold ({limit})")
        if self.held_weight() + asked > limit:
            self.counters.refused_full += 1
            raise Refusal(
                429,
                f"the queue holds {self.held_weight()} of at most {limit} tokens; post again later",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    # -- what anyone may ask ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """GET /status, with more than the original's two keys only where an option asks for more."""
        figures: dict[str, Any] = {"current_step": self.step, "queue_size": len(self.queue)}
        if self.limits.strict:
            figures["set_aside"] = self.set_aside.count
        return {**figures, **self._fill()}

    def _fill(self) -> dict[str, int]:
        limit = self.limits.max_queued_tokens
        return {} if limit is None else {"queued_tokens": self.held_weight(), "max_queued_tokens": limit}

    # -- durability ---------------------------------------------------------------------------------------------

    def reset(self) -> Change:
        """As if the server had just started."""
        self._clear()
        self.set_aside = SetAside()
        return Change(wipe=True, summary=self.summary())

    def _with_summary(self, change: Change) -> Change:
        return Change(
            added=change.added, batched=change.batched, removed=change.removed, summary=self.summary()
        )

    def summary(self) -> dict[str, Any]:
        """All but the groups: small, so that it is written whole."""
        return {
            "registration": self.registration.model_dump() if self.registration else None,
            "started": self.started,
            "step": self.step,
            "trainer": str(self.trainer) if self.trainer is not None else None,
            "environments": self.environments.dump(),
            "next_batch": self._next_batch,
        }
