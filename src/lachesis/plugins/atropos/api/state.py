"""State of one training run, and its rules. It does no input or output: a request comes in, its change goes out.

Methods that alter anything return the :class:`~lachesis.plugins.atropos.api.entries.Change` that the store has to make
durable before the reply goes out. Time is an argument, in seconds on one monotonic clock.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lachesis.plugins.atropos.api.backlog import Backlog
from lachesis.plugins.atropos.api.batching import Demand, Key, needs_groups, plan_batch, waiting_for
from lachesis.plugins.atropos.api.entries import RECEIPTS, Change, RolloutBatch, Snapshot, StoredGroup
from lachesis.plugins.atropos.api.environments import Environments, RegisteredEnvironment
from lachesis.plugins.atropos.api.wire import EnvRegistration, Refusal, Registration


class QueueLimits(BaseModel):
    """Options of the server for its queue, which has no bound without a limit of tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strict: bool = Field(default=False, description="Set aside groups that no trainer could use.")
    max_queued_tokens: int | None = Field(default=None, description="Answer 429 instead of queueing more tokens.")
    ack_timeout_s: float = Field(
        default=600.0, description="Seconds until an unacknowledged batch is handed out again."
    )
    env_timeout_s: float = Field(
        default=300.0, description="Seconds of silence after which an environment no longer counts."
    )


class Deliveries:
    """Batches that were handed out and may have to be handed out again.

    ``returned`` are batches whose trainer left before reading them; any trainer may get them next. ``outstanding`` are
    batches, by id, that Lachesis's trainer has not acknowledged yet.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.returned: deque[RolloutBatch] = deque()
        self.outstanding: dict[int, RolloutBatch] = {}

    def hand_out(self, batch: RolloutBatch, *, trainer: int, now: float) -> None:
        """Await an acknowledgement of ``batch`` from ``trainer``."""
        batch.owner = trainer
        batch.deadline = now + self.timeout_s
        batch.deliveries += 1
        self.outstanding[batch.id] = batch

    def renew(self, ids: Iterable[int], *, trainer: int, now: float) -> None:
        """Restart the timeouts of batches that the trainer still holds, by its word."""
        for batch_id in ids:
            batch = self.outstanding.get(batch_id)
            if batch is not None and batch.owner == trainer:
                batch.deadline = now + self.timeout_s

    def due(self, *, trainer: int, holds: Collection[int] | None, now: float) -> RolloutBatch | None:
        """Return the oldest outstanding batch that ``trainer`` should get again.

        A batch is due if it went to an earlier trainer, was not acknowledged in time, or, if the trainer says which
        batches it ``holds``, never arrived there.
        """
        for batch in self.outstanding.values():
            lost = holds is not None and batch.id not in holds
            if batch.owner != trainer or batch.deadline <= now or lost:
                return batch
        return None

    def acknowledge(self, ids: Iterable[int]) -> list[RolloutBatch]:
        """Forget the batches with these ids; those that were outstanding are returned."""
        return [self.outstanding.pop(batch_id) for batch_id in ids if batch_id in self.outstanding]


class RolloutState:
    """Registrations, groups and batches. ``epoch`` counts resets, so that late messages of an older run are dropped."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.epoch = -1
        self.reset()

    def reset(self) -> Change:
        """Reset to the state of a server that has just started."""
        limits = self.limits
        self.epoch += 1
        self.registration: Registration | None = None
        self.started = False
        self.step = 0
        self.trainer: int | None = None
        self.environments = Environments(timeout_s=limits.env_timeout_s)
        self.backlog = Backlog(self.environments, strict=limits.strict, max_queued_tokens=limits.max_queued_tokens)
        self.deliveries = Deliveries(timeout_s=limits.ack_timeout_s)
        self._receipts: OrderedDict[str, bytes] = OrderedDict()
        self._next_batch = 0
        return Change(wipe=True, summary=self.summary())

    # -- trainers

    def register(self, asked: Registration) -> tuple[int, Change]:
        """Register a trainer, or register it again: the queue stays, and the options count from now on.

        The step never goes back. Batches that an earlier trainer left unacknowledged become due for a trainer that
        acknowledges.
        """
        trainer = uuid.uuid4().int
        old, self.registration = self.registration, asked
        self.step = max(self.step, asked.starting_step)
        self.trainer = trainer if asked.acknowledge else None
        if old is not None and old.batch_size != asked.batch_size:
            self._dissolve_returned()
        return trainer, self._and_summary(Change())

    def forget_trainer(self, trainer: int) -> Change:
        """Forget a trainer that ends, with its options. The queue and the step stay.

        Raises:
            Refusal: 409, another trainer registered since.
        """
        self._check_trainer(trainer)
        self.registration = self.trainer = None
        self.started = False
        return self._and_summary(Change())

    def next_batch(self, now: float) -> tuple[RolloutBatch | None, Change | None]:
        """Return the next batch for a trainer of the plain protocol; it leaves the state for good."""
        (batch, change), started = self._take(now), self._start()
        if batch is None:
            return None, self._and_summary(change) if started or change.placed else None
        return batch, self._and_summary(replace(change, removed=tuple(held.number for held in batch.groups)))

    def next_batch_for(
        self, trainer: int, holds: Collection[int] | None, now: float
    ) -> tuple[RolloutBatch | None, Change | None]:
        """Return the next batch for a trainer that acknowledges: one that is due again, else a new one.

        Args:
            trainer: the uuid that it got when it registered.
            holds: ids of the batches that it has and did not acknowledge yet; None if it did not say.
            now: seconds of the clock.

        Raises:
            Refusal: 409, another trainer registered since.
        """
        self._check_trainer(trainer)
        started = self._start()
        self.deliveries.renew(holds or (), trainer=trainer, now=now)
        batch, change = self.deliveries.due(trainer=trainer, holds=holds, now=now), Change()
        if batch is None:
            batch, change = self._take(now)
        if batch is None:
            return None, self._and_summary(change) if started or change.placed else None
        self.deliveries.hand_out(batch, trainer=trainer, now=now)
        return batch, self._and_summary(
            replace(change, batched=tuple((held.number, batch.id) for held in batch.groups))
        )

    def put_back(self, batch: RolloutBatch, *, epoch: int) -> Change | None:
        """Put ``batch`` back at the front, because a plain trainer left before reading it."""
        if epoch != self.epoch:
            return None
        self.deliveries.returned.appendleft(batch)
        self.step -= 1
        return self._and_summary(Change(added=batch.groups))

    def acknowledge(self, trainer: int, ids: Sequence[int]) -> tuple[dict[str, Any], Change]:
        """Record that the trainer has these batches. Unknown ids, as after a retry, are reported but not refused.

        Raises:
            Refusal: 409, another trainer registered since.
        """
        self._check_trainer(trainer)
        done = self.deliveries.acknowledge(ids)
        known = [batch.id for batch in done]
        reply = {
            "status": "success",
            "acknowledged": known,
            "unknown": [batch_id for batch_id in ids if batch_id not in known],
            "outstanding": list(self.deliveries.outstanding),
        }
        return reply, Change(removed=tuple(held.number for batch in done for held in batch.groups))

    def waiting(self, now: float) -> str:
        """Say in a sentence what the trainer is waiting for; empty if a batch is ready."""
        if self.registration is None:
            return "no trainer has registered"
        lanes, demand = self.backlog.queue.lanes, self._demand(now)
        if self.deliveries.returned or plan_batch(lanes, demand) is not None:
            return ""
        reason = waiting_for(lanes, demand, {env.id: env.name for env in self.environments})
        if demand.full:
            reason += f", and the queue is full at {self.limits.max_queued_tokens} tokens (--max-queued-tokens)"
        if self.environments.present(now) or not (ended := self.environments.ended()):
            return reason
        return f"{reason}, and no environment is left; {ended}"

    def _check_trainer(self, trainer: int) -> None:
        if trainer != self.trainer:
            raise Refusal(409, "another trainer has registered since, or the API was reset: register again")

    def _start(self) -> bool:
        """Let environments register, since a trainer polls; return True the first time."""
        first, self.started = not self.started, True
        return first

    def _take(self, now: float) -> tuple[RolloutBatch | None, Change]:
        """Take a batch that was put back, else a new one of the oldest groups; either counts as a step.

        If the queue is full, incomplete buffers are queued as they are.
        """
        change = Change()
        if self.deliveries.returned:
            batch = self.deliveries.returned.popleft()
        else:
            keys = self._plan(now)
            if keys is None and self.backlog.full and (placed := self.backlog.release_buffers()):
                change, keys = Change(placed=placed), self._plan(now)
            if keys is None:
                return None, change
            batch = RolloutBatch(id=self._next_batch, groups=self.backlog.take(keys))
            self._next_batch += 1
        self.step += 1
        return batch, change

    def _plan(self, now: float) -> tuple[Key, ...] | None:
        """Return the lanes of the next new batch; None if there is none yet."""
        return plan_batch(self.backlog.queue.lanes, self._demand(now)) if self.registration else None

    def _demand(self, now: float) -> Demand:
        asked, queued = self.registration, self.backlog.queue.sequences.total()
        demand = self.environments.demand(asked.batch_size if asked else 0, now)
        return demand.of(queued=queued, full=self.backlog.full)

    def _dissolve_returned(self) -> None:
        """Return batches of another size to the queue, for batches of the new size."""
        while self.deliveries.returned:
            self.backlog.queue.put_back(self.deliveries.returned.popleft().groups)

    # -- environments

    def register_env(self, asked: EnvRegistration, now: float) -> tuple[dict[str, Any], Change | None]:
        """Register an environment. It has to wait until a trainer has asked for its first batch."""
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
        if asked.group_size > self.registration.batch_size:
            reply["takes_larger_groups"] = True  # the original never hands them out
        return reply, self._and_summary(Change())

    def disconnect_env(self, env_id: int, *, reason: str = "") -> tuple[dict[str, Any], Change | None]:
        """Disconnect an environment: its weight and minimum stop counting. Queued groups stay, buffered ones go."""
        environment = self.environments.get(env_id)
        if environment is None:
            return {"status": "failure", "error": f"no environment has the id {env_id}"}, None
        environment.connected, environment.reason = False, reason
        return {"status": "success"}, self._and_summary(Change(removed=self.backlog.leave(environment)))

    def status_env(self, env_id: int, now: float) -> dict[str, Any]:
        """Answer GET /status-env.

        Raises:
            Refusal: 404, nothing registered under that id.
        """
        environment = self.environments.get(env_id)
        if environment is None:
            raise Refusal(404, f"no environment has the id {env_id}: register again")
        environment.last_seen = now
        size = self.registration.batch_size if self.registration else 0
        figures = self.environments.status(environment, self.backlog.queue, batch_size=size, now=now)
        if size and needs_groups(self.backlog.queue.lanes, self._demand(now)):
            figures["queue_size"] = min(figures["queue_size"], _room_for_one(environment, figures, batch_size=size))
        return {"current_step": self.step, **figures, **self._fill()}

    def post(self, groups: Sequence[StoredGroup], now: float) -> tuple[list[dict[str, Any]], Change]:
        """Accept groups, and return a reply for each. See :meth:`Backlog.post`."""
        return self.backlog.post(groups, now=now)

    def receipt(self, key: str) -> bytes | None:
        """Return the reply to an earlier post with the same idempotency key."""
        return self._receipts.get(key)

    def remember(self, key: str, reply: bytes) -> None:
        """Keep the reply to a post in case the post is repeated; the last 10,000 are kept."""
        self._receipts[key] = reply
        if len(self._receipts) > RECEIPTS:
            self._receipts.popitem(last=False)

    # -- anyone

    def status(self) -> dict[str, Any]:
        """Answer GET /status: the original's two keys, and more only if an option asks for it."""
        figures: dict[str, Any] = {"current_step": self.step, "queue_size": len(self.backlog.queue)}
        if self.limits.strict:
            figures["set_aside"] = self.backlog.set_aside.count
        return {**figures, **self._fill()}

    def overview(self, now: float) -> dict[str, Any]:
        """Answer GET /overview: why the trainer waits, unacknowledged batches, and each environment."""
        queued, present = self.backlog.queue.sequences, {env.id for env in self.environments.present(now)}
        return {
            "step": self.step,
            "waiting": self.waiting(now),
            "outstanding": len(self.deliveries.outstanding),
            "environments": [
                {
                    "name": env.name,
                    "state": "left" if not env.connected else "here" if env.id in present else "silent",
                    "silent_s": round(now - env.last_seen, 1),
                    "queued": queued.get(env.id, 0),
                    "groups": env.groups,
                    "set_aside": env.set_aside,
                    "score": env.score,
                }
                for env in self.environments
            ],
        }

    def _fill(self) -> dict[str, int]:
        limit = self.limits.max_queued_tokens
        return {} if limit is None else {"queued_tokens": self.backlog.weight, "max_queued_tokens": limit}

    # -- durability

    def summary(self) -> dict[str, Any]:
        """Return the state without the groups, which is small enough to be written whole."""
        return {
            "registration": self.registration.model_dump() if self.registration else None,
            "started": self.started,
            "step": self.step,
            "trainer": str(self.trainer) if self.trainer is not None else None,
            "environments": self.environments.dump(),
            "next_batch": self._next_batch,
        }

    def restore(self, snapshot: Snapshot, now: float) -> None:
        """Continue from the content of a store. Batches that had been handed out count as handed out just now."""
        self.reset()
        summary = snapshot.summary
        if summary:
            asked = summary["registration"]
            self.registration = Registration(**asked) if asked else None
            self.started, self.step = summary["started"], summary["step"]
            self.trainer = int(summary["trainer"]) if summary["trainer"] else None
            self.environments.load(summary["environments"], now=now)
            self._next_batch = summary["next_batch"]
        self._receipts = OrderedDict(snapshot.receipts)
        waiting = [held for held in snapshot.held if held.number not in snapshot.batch_of]
        self.backlog.restore(waiting, next_number=max((held.number + 1 for held in snapshot.held), default=0))
        out: dict[int, list[Any]] = {}
        for held in snapshot.held:
            if held.number in snapshot.batch_of:
                out.setdefault(snapshot.batch_of[held.number], []).append(held)
        for batch_id in sorted(out):
            batch = RolloutBatch(id=batch_id, groups=tuple(out[batch_id]))
            self.deliveries.hand_out(batch, trainer=self.trainer or 0, now=now)

    def _and_summary(self, change: Change) -> Change:
        return replace(change, summary=self.summary())


def _room_for_one(environment: RegisteredEnvironment, figures: Mapping[str, Any], *, batch_size: int) -> int:
    """Return the largest ``queue_size`` at which the protocol's rule lets an environment make one group more."""
    part = min(1.0, figures["unallocated_fraction"] + (environment.asked.min_batch_allocation or 0.0))
    return max(1, int(batch_size * part) // environment.asked.group_size) - 1
