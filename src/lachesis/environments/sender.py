"""From finished groups to the rollout API: several in one post, filtered, registered anew where that is needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from lachesis.api.wire import EnvRegistration
from lachesis.environments.outputs import Counters, Outputs
from lachesis.environments.records import ScoredGroup
from lachesis.environments.rollout_api import PostRefused, QueueFull, Registered, RolloutApi
from lachesis.environments.settings import EnvironmentConfig

logger = logging.getLogger("lachesis.environments")

_GROUPS_A_POST = 32
_TOKENS_A_POST = 500_000
# As our API says it of an environment that registered before the API was started again.
_UNREGISTERED = "was never registered"


class Membership:
    """The registration of one environment, made anew when the API has lost it."""

    def __init__(self, api: RolloutApi, *, name: str, config: EnvironmentConfig) -> None:
        self._api = api
        self._asked = EnvRegistration(
            desired_name=name,
            max_token_length=config.max_token_length,
            weight=config.inference_weight,
            group_size=config.group_size,
            min_batch_allocation=config.min_batch_allocation,
        )
        self._lock = asyncio.Lock()
        self.current: Registered | None = None

    async def join(self, *, lost: Registered | None = None) -> Registered:
        """Register; where several notice that the registration ``lost`` is gone, one does it for all."""
        async with self._lock:
            # Not by its id: an API that was started again gives the same ids.
            if self.current is None or self.current is lost:
                self.current = await self._api.register(self._asked)
            return self.current


class Sender:
    """Posts groups in the order in which they were finished.

    Args:
        api: where to.
        membership: under which registration.
        config: the section ``env``, for what is not sent.
        outputs: every group is written there too, sent or not.
        counters: where all is counted.
    """

    def __init__(
        self,
        api: RolloutApi,
        *,
        membership: Membership,
        config: EnvironmentConfig,
        outputs: Outputs,
        counters: Callable[[], Counters],
    ) -> None:
        self._api = api
        self._membership = membership
        self._config = config
        self._outputs = outputs
        self._tally = counters
        self._said: set[str] = set()
        self._queue: asyncio.Queue[ScoredGroup] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.pending = 0

    def start(self) -> asyncio.Task[None]:
        """Begin to send; the task ends only with an error, or by :meth:`finish`."""
        self.task = asyncio.create_task(self._run())
        return self.task

    def put(self, group: ScoredGroup) -> None:
        """Take a group; it is sent when its turn comes."""
        self.pending += 1
        self._queue.put_nowait(group)

    async def finish(self, *, limit_s: float) -> None:
        """Send what is finished, if that takes no longer than ``limit_s`` seconds, and end; the rest is given up.

        A post under way is never begun again under another key, so nothing arrives twice.
        """
        if self.task is None:
            return
        drained = asyncio.create_task(self._queue.join())
        await asyncio.wait({self.task, drained}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (self.task, drained):
            task.cancel()
        await asyncio.gather(self.task, drained, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            groups = [await self._queue.get()]
            tokens = groups[0].longest * groups[0].size
            while not self._queue.empty() and len(groups) < _GROUPS_A_POST and tokens < _TOKENS_A_POST:
                groups.append(self._queue.get_nowait())
                tokens += groups[-1].longest * groups[-1].size
            await self._send(groups)
            self.pending -= len(groups)
            for _ in groups:
                self._queue.task_done()

    async def _send(self, groups: Sequence[ScoredGroup]) -> None:
        wanted = []
        for group in groups:
            self._outputs.group(group)
            if reason := self._unwanted(group):
                self._tally().dropped[reason] += 1
                self._once(f"groups are not sent: {reason}")
            else:
                wanted.append(group)
        await self._post(wanted)

    async def _post(self, groups: Sequence[ScoredGroup]) -> None:
        if not groups:
            return
        member = await self._membership.join()
        try:
            reply = await self._api.post([group.document(env_id=member.env_id) for group in groups])
        except (PostRefused, QueueFull) as error:
            if len(groups) == 1:
                self._tally().dropped["refused by the rollout API"] += 1
                return logger.info("%s", error)
            # One of them is at fault, and the others are not lost with it; or the trainer waits for the first of them
            # to complete a batch, without which there will never be room for all.
            for group in groups:
                await self._post([group])
            return
        aside = dict(reply.set_aside)
        lost = []
        for index, group in enumerate(groups):
            reason = aside.get(index, "")
            if not reason:
                self._tally().count_sent(group)
            elif _UNREGISTERED in reason:
                lost.append(group)
            else:
                self._tally().set_aside[reason] += 1
                self._once(f"the rollout API set a group aside: {reason}")
        if lost:
            await self._membership.join(lost=member)
            await self._post(lost)

    def _unwanted(self, group: ScoredGroup) -> str:
        """Why a group is not sent; empty where it is."""
        if self._config.ensure_scores_are_not_same and len(set(group.scores)) == 1:
            return "all scores are the same (--env.ensure_scores_are_not_same)"
        member = self._membership.current
        limit = member.max_token_len if member else -1
        if 0 < limit <= group.longest:
            return f"longer than the {limit} tokens that the trainer takes"
        return ""

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.info(line)
