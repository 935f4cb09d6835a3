"""Serving of an environment: register, keep the queue filled without letting rollouts grow stale, and disconnect."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DataError, LachesisError
from lachesis.plugins.atropos.environments.base import Environment
from lachesis.plugins.atropos.environments.outputs import Counters, Outputs
from lachesis.plugins.atropos.environments.rollout_api import (
    SETTING,
    EnvironmentNotRegistered,
    EnvironmentRegistration,
    Membership,
    QueueStatus,
    RolloutApi,
    Sender,
)
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from lachesis.plugins.atropos.environments.workers import GroupWorkers
from lachesis.process.tasks import cancel, unless

logger = logging.getLogger("lachesis.plugins.atropos.environments")

_POLL_S = 0.1
_GOODBYE_S = 5.0
_REPORT_S = 30.0
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Work of an environment. ``ended`` says in a few words why it ended."""

    ended: str
    step: int
    counters: Counters


@dataclass(slots=True)
class _Progress:
    """The trainer's last seen step, its time, and the work done until then and since."""

    step: int = 0
    changed: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)
    now: Counters = field(default_factory=Counters)
    before: Counters = field(default_factory=Counters)


class Runner:
    """Runner that serves an environment to a rollout API."""

    def __init__(self, environment: Environment[Any, Any], *, api: RolloutApi, outputs: Outputs) -> None:
        self._environment = environment
        self._config = environment.config
        self._api = api
        self._outputs = outputs
        self._name = self._config.wandb_name or environment.name
        self._membership = Membership(api, name=self._name, config=self._config)
        self._progress = _Progress()

        def counters() -> Counters:
            return self._progress.now

        self._sender = Sender(
            api=api, membership=self._membership, config=self._config, outputs=outputs, counters=counters
        )
        self._workers = GroupWorkers(environment=environment, deliver=self._sender.put, counters=counters)
        self._evaluation: asyncio.Task[None] | None = None
        self._joined = False
        self._looked = time.monotonic()
        self._reason = ""

    async def serve(self, *, stop: asyncio.Event) -> Summary:
        """Serve until the trainer has all its batches, problems run out, or ``stop`` is set.

        In any case it sends the finished groups, if that takes only a few seconds, and disconnects, giving an error as
        the reason.

        Raises:
            ConfigError, DataError, EngineError: the environment cannot continue; the message says why.
            DeadlineExceeded: the API, the trainer or an inference server stayed away.
        """
        try:
            ended = await unless(stop.wait(), self._serve()) or "it was asked to stop"
        except LachesisError as error:
            self._reason = str(error)
            raise
        finally:
            await self._goodbye()
        self._report()
        return Summary(ended=ended, step=self._progress.step, counters=self._progress.before)

    async def _serve(self) -> str:
        await self._environment.setup()
        await self._environment.client.wait_until_ready()
        member = await self._join()
        return await self._keep_filled(member, self._sender.start())

    async def _keep_filled(self, member: EnvironmentRegistration, sending: asyncio.Task[None]) -> str:
        idle = self._idle()
        while True:
            if member is not self._membership.current:
                # The sender has already noticed that the registration was gone.
                member = await self._join()
            # Counted before the queue is read: its size may not include groups posted in between.
            pending = self._sender.pending
            try:
                status = await self._api.status(member.env_id)
            except EnvironmentNotRegistered as error:
                logger.info(f"{error.message}; registering again")
                member = await self._join(lost=member)
                continue
            if self._advance(status):
                idle = self._idle()
            member = await self._look(member)
            if self._has_all(member):
                return f"the trainer has taken its {self._progress.step} batches"
            await self._workers.fill(self._room(status, member) - pending)
            if self._workers.exhausted and not self._workers.tasks and not self._sender.pending:
                return "there are no more problems"
            if self._workers.tasks:
                idle = self._idle()
            self._check_idle(idle, status)
            await self._next_event(sending)

    async def _look(self, member: EnvironmentRegistration) -> EnvironmentRegistration:
        """Check regularly for another trainer, which may want other batches."""
        if time.monotonic() - self._looked < _LOOK_S:
            return member
        await self._membership.look()
        self._looked = time.monotonic()
        now = self._membership.current or member
        if now.batch_size != member.batch_size:
            logger.info(f"the current trainer wants batches of {now.batch_size} sequences, not {member.batch_size}")
            self._check_size(now)
        return now

    def _check_size(self, member: EnvironmentRegistration) -> None:
        """Raise ConfigError if no batch could hold a group."""
        size, batch = self._config.group_size, member.batch_size
        if 0 < batch < size and member.takes_larger:
            logger.info(f"groups of {size} are larger than the trainer's batches of {batch}: each is handed out alone")
        elif 0 < batch < size:
            raise ConfigError(
                f"groups of {size} do not fit into the trainer's batches of {batch} sequences",
                remedy="lower --env.group_size or raise the trainer's batch size",
            )
        elif batch > 0 and batch % size:
            logger.info(f"the trainer's batches of {batch} sequences are not a multiple of the group size {size}")

    def _check_idle(self, idle: Deadline, status: QueueStatus) -> None:
        """Warn regularly while the trainer takes nothing, and raise after too long."""
        queued = f"{status.queue_size} groups are queued at step {status.step}"
        idle.check(queued)
        if min(idle.elapsed_s(), time.monotonic() - self._progress.said) >= _REPORT_S:
            self._progress.said = time.monotonic()
            logger.info(f"{idle.name}, for up to {idle.limit_s:g} s ({SETTING}): {queued}")

    async def _next_event(self, sending: asyncio.Task[None]) -> None:
        """Wait until a group is done, something failed, or it is time to look at the queue again."""
        watched = {sending, *self._workers.tasks, *([self._evaluation] if self._evaluation else [])}
        await asyncio.wait(watched, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        self._workers.reap()
        if sending.done():
            sending.result()
        if self._evaluation is not None and self._evaluation.done():
            self._evaluation.result()
            self._evaluation = None

    async def _join(self, *, lost: EnvironmentRegistration | None = None) -> EnvironmentRegistration:
        first = not self._joined
        member = await self._membership.join(lost=lost)
        self._check_size(member)
        self._progress.step = self._environment.step = member.step
        self._progress.changed = time.monotonic()
        logger.info(
            f"registered at {self._api.url} as {member.name} "
            f"(step {member.step}, batches of {member.batch_size} sequences)"
        )
        self._joined = True
        if first and self._config.use_wandb:
            project, group = await self._api.wandb_info()
            settings = self._config.model_dump(mode="json")
            self._outputs.start_wandb(project=project, group=group, name=member.name, settings=settings)
        return member

    def _advance(self, status: QueueStatus) -> bool:
        """Record the trainer's step, and return True if it has changed."""
        progress = self._progress
        if status.step == progress.step:
            return False
        every, before = self._config.steps_per_eval, progress.step
        self._report(queue_size=status.queue_size)
        progress.step = self._environment.step = status.step
        progress.changed = time.monotonic()
        if every and before // every != status.step // every and self._evaluation is None:
            self._evaluation = asyncio.create_task(self._evaluate())
        return True

    def _report(self, *, queue_size: int = 0) -> None:
        """Write the work done at this step, and log it from time to time."""
        progress = self._progress
        values = {**progress.now.values(), **self._environment.metrics(), "queue_size": float(queue_size)}
        progress.before.add(progress.now)
        progress.now = Counters()
        self._outputs.metrics(progress.step, values)
        if time.monotonic() - progress.said >= _REPORT_S:
            progress.said = time.monotonic()
            mean = f", mean score {values['score/mean']:.3f}" if "score/mean" in values else ""
            logger.info(f"step {progress.step}: {progress.before.groups} groups sent{mean}")

    async def _evaluate(self) -> None:
        result = await self._environment.evaluate()
        self._outputs.evaluation(self._name, result)
        logger.info(f"step {result.step}: held-out accuracy {result.accuracy:.3f} ({result.problems} problems)")

    def _room(self, status: QueueStatus, member: EnvironmentRegistration) -> int:
        if member.batch_size < 1:
            raise DataError(
                f"the rollout API at {self._api.url} has no batch size", remedy="register the trainer again"
            )
        return room_for_groups(status, self._config, batch_size=member.batch_size)

    def _has_all(self, member: EnvironmentRegistration) -> bool:
        """Return True if the trainer has all its batches and has not asked for more for a while."""
        total = self._config.total_steps if self._config.total_steps >= 0 else member.num_steps
        lingered = time.monotonic() - self._progress.changed >= self._config.linger
        return 0 < total <= self._progress.step and lingered

    def _idle(self) -> Deadline:
        name = f"environment {self._name}: waiting for the trainer to take a batch from {self._api.url}"
        return Deadline(name, self._config.wait_timeout, SETTING)

    async def _goodbye(self) -> None:
        if self._evaluation is not None:
            await cancel([self._evaluation])
        await self._workers.stop()
        await self._sender.finish(limit_s=_GOODBYE_S)
        if self._sender.pending:
            logger.info(f"{self._sender.pending} finished groups could not be sent")
        if self._membership.current is not None:
            env_id = self._membership.current.env_id
            await self._api.disconnect(env_id, reason=self._reason, limit_s=_GOODBYE_S)


def room_for_groups(status: QueueStatus, config: EnvironmentConfig, *, batch_size: int) -> int:
    """Return how many groups may be in the making or on their way to the queue, under the rule of the protocol.

    Queued groups and those in the making are together at most ``max_batches_offpolicy`` batches of this
    environment's part: the unreserved part, and its own minimum. With a minimum it may always fill its own
    share, whatever others have queued. The weight that the API gives it scales ``max_num_workers``, as it scales
    requests.
    """
    if status.full:
        return 0
    minimum, most, wanted = config.min_batch_allocation or 0.0, config.max_num_workers, config.max_batches_offpolicy
    part = min(1.0, status.unallocated_fraction + minimum)
    # A batch whose share is less than a group still needs one.
    ahead = max(1, int(batch_size * part) * wanted // config.group_size)
    room = ahead - status.queue_size
    if minimum:
        share = math.ceil(minimum * batch_size * wanted / config.group_size)
        room = max(room, share - status.self_queue_size)
    if most >= 0:
        room = min(room, max(1, round(most * min(1.0, status.env_weight))))
    return max(0, room)
