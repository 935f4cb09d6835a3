"""The rollout API as environments see it: registration, the queue, and posts that are not lost. No torch."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from lachesis.common.deadline import Deadline, Retry
from lachesis.common.errors import DataError, EngineError
from lachesis.engines.http.control import tls
from lachesis.plugins.atropos.api.wire import KEY_HEADER, EnvRegistration
from lachesis.plugins.atropos.environments.outputs import Counters, Outputs
from lachesis.plugins.atropos.environments.records import UsableGroup
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from lachesis.process.tasks import cancel

logger = logging.getLogger("lachesis.plugins.atropos.environments")

SETTING = "--env.wait_timeout"
_REQUEST_S = 30.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_TRAINER_POLL_S = 0.25
_GZIP_FROM = 1024
# The first pause is short, because the API is on this machine or near.
_GZIP_LEVEL = 1
# The original answers 500 to an environment that it does not know, for example after a restart.
_UNKNOWN_AFTER = 3
_GROUPS_A_POST = 32
_TOKENS_A_POST = 500_000
# Our API's words about an environment that registered before the API was restarted.
_UNREGISTERED = "was never registered"


class EnvironmentNotRegistered(EngineError):
    """Error of an API that does not know this environment, perhaps after a restart: register again."""


class PostRefused(DataError):
    """Error of a post that the API will never accept: it is too large, or malformed."""


class QueueFull(EngineError):
    """Error of a queue without room for several groups. It may have room for the one that completes a batch."""


@dataclass(frozen=True, slots=True)
class EnvironmentRegistration:
    """Reply of the API to an environment that registers. ``batch_size`` and ``max_token_len`` are the trainer's.

    ``takes_larger``: groups larger than a batch are handed out alone; the original API keeps them forever.
    """

    env_id: int
    name: str
    step: int
    num_steps: int
    batch_size: int
    max_token_len: int
    takes_larger: bool = False


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Figures by which an environment throttles itself. ``full``: the queue takes no more tokens."""

    step: int
    queue_size: int
    self_queue_size: int
    max_group_size: int
    unallocated_fraction: float
    env_weight: float
    full: bool = False


class RolloutApi:
    """Rollout API, ours or the original.

    Every call is repeated while the API is away or overloaded; an API that knows idempotency keys takes repeated posts
    once.

    Args:
        wait_s: longest time without an answer, in seconds.
    """

    def __init__(self, url: str, *, wait_s: float) -> None:
        self.url = url
        self._wait_s = wait_s
        self._http = httpx.AsyncClient(
            base_url=url, verify=tls(url), trust_env=False, timeout=_REQUEST_S,
            limits=httpx.Limits(keepalive_expiry=2.0),
        )  # fmt: skip
        self.retries = 0

    async def register(self, asked: EnvRegistration) -> EnvironmentRegistration:
        """Register, once a trainer has registered and asked for a batch.

        Raises:
            DeadlineExceeded: no trainer came.
            DataError: the API refuses the registration.
        """
        deadline = self._deadline(f"environment {asked.desired_name}: waiting for a trainer at {self.url}")
        retry = Retry(
            deadline,
            first_s=_TRAINER_POLL_S,
            longest_s=_TRAINER_POLL_S,
            say=lambda _: logger.info(
                f"waiting for a trainer to register at {self.url} and ask for its first batch, "
                f"for up to {self._wait_s:g} s ({SETTING})"
            ),
        )
        while True:
            reply = await self._request("POST", "/register-env", asked.model_dump())
            if reply.get("status") == "success":
                break
            await asyncio.sleep(retry.after(f"the API says {reply.get('status')!r}"))
        batch_size, max_token_len = await self.trainer()
        return EnvironmentRegistration(
            env_id=reply["env_id"],
            name=reply["wandb_name"],
            step=reply["starting_step"],
            num_steps=reply["num_steps"],
            batch_size=batch_size,
            max_token_len=max_token_len,
            takes_larger=bool(reply.get("takes_larger_groups")),
        )

    async def trainer(self) -> tuple[int, int]:
        """Return the registered trainer's sequences a batch and tokens a sequence; -1 without a trainer."""
        info = await self._request("GET", "/info")
        return info["batch_size"], info["max_token_len"]

    async def status(self, env_id: int) -> QueueStatus:
        """Return the queue as this environment sees it.

        Raises:
            NotRegistered: the API does not know this environment.
        """
        found = await self._request("GET", "/status-env", {"env_id": env_id}, unknown=(404,))
        limit = found.get("max_queued_tokens")
        names = ("queue_size", "self_queue_size", "max_group_size", "unallocated_fraction", "env_weight")
        full = limit is not None and found["queued_tokens"] >= limit
        return QueueStatus(step=found["current_step"], full=full, **{name: found[name] for name in names})

    async def post(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Post groups in one request. A single one waits until the queue has room for it.

        Returns:
            The reason for each group, by index, that the API set aside: it will enter no batch.

        Raises:
            PostRefused: the API refuses them for good.
            QueueFull: there are several, and the queue accepted none of them.
        """
        headers = {KEY_HEADER: uuid.uuid4().hex}
        path, alone = "/scored_data_list", len(groups) == 1
        reply = await self._request("POST", path, list(groups), headers=headers, wait_for_room=alone)
        return {entry["index"]: entry["reason"] for entry in reply.get("reasons", ())}

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """Return the trainer's project and group at Weights & Biases."""
        info = await self._request("GET", "/wandb_info")
        return info["project"], info["group"]

    async def disconnect(self, env_id: int, *, reason: str, limit_s: float) -> None:
        """Disconnect, with the reason, if the API answers within ``limit_s`` seconds; otherwise the API will notice."""
        try:
            await self._http.post("/disconnect-env", json={"env_id": env_id, "reason": reason}, timeout=limit_s)
        except httpx.HTTPError as error:
            logger.info(f"the rollout API at {self.url} could not be told that this environment ends: {error}")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _request(
        self,
        method: str,
        path: str,
        document: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        unknown: tuple[int, ...] = (),
        wait_for_room: bool = True,
    ) -> dict[str, Any]:
        """Return the API's answer; retries while it is away and, with ``wait_for_room``, while its queue is full."""
        body, sent = _encoded(document)
        sent |= headers or {}
        deadline = self._deadline(f"waiting for the rollout API at {self.url} ({method} {path})")
        retry = Retry(
            deadline,
            first_s=_PAUSE_S,
            longest_s=_LONGEST_PAUSE_S,
            # A single failure is not reported: an idle connection may be closed at any time.
            told_at=2,
            say=lambda reason: logger.info(f"{deadline.name}, for up to {self._wait_s:g} s ({SETTING}): {reason}"),
        )
        while True:
            try:
                response = await self._http.request(method, path, content=body, headers=sent)
            except httpx.TransportError as error:
                reason, retry_after = f"{error or type(error).__name__}", None
            else:
                if response.is_success:
                    if retry.failures > 1:
                        logger.info(f"the rollout API at {self.url} answers")
                    return response.json()
                reason = f"it answered {response.status_code}: {' '.join(response.text.split())[:300]}"
                self._refuse(response, reason, unknown, retry.failures)
                if not wait_for_room and response.status_code == 429:
                    raise QueueFull(f"the rollout API at {self.url}: {reason}")
                told = response.headers.get("retry-after", "")
                retry_after = float(told) if told.isdecimal() else None
            self.retries += 1
            pause_s = retry.after(reason)
            await asyncio.sleep(pause_s if retry_after is None else retry_after)

    def _refuse(self, response: httpx.Response, reason: str, unknown: tuple[int, ...], attempts: int) -> None:
        """Raise for an answer that will be the same next time."""
        status = response.status_code
        lost = status in unknown or (bool(unknown) and status == 500 and attempts + 1 >= _UNKNOWN_AFTER)
        if lost:
            raise EnvironmentNotRegistered(f"the rollout API at {self.url} does not know this environment: {reason}")
        if status < 500 and status not in (408, 425, 429, 499):
            kind = PostRefused if status in (413, 422) else DataError
            path = response.request.url.path
            raise kind(f"the rollout API at {self.url} refused {path}: {reason}", remedy="correct this value")

    def _deadline(self, name: str) -> Deadline:
        return Deadline(name, self._wait_s, SETTING)


def _encoded(document: Any) -> tuple[bytes | None, dict[str, str]]:
    """Return a body and its headers. NaN and infinity raise ValueError; callers check for them."""
    if document is None:
        return None, {}
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    headers = {"Content-Type": "application/json"}
    if len(body) < _GZIP_FROM:
        return body, headers
    return gzip.compress(body, _GZIP_LEVEL), headers | {"Content-Encoding": "gzip"}


class Membership:
    """Registration of one environment, repeated when the API has lost it."""

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
        self.current: EnvironmentRegistration | None = None

    async def join(self, *, lost: EnvironmentRegistration | None = None) -> EnvironmentRegistration:
        """Register; if several notice that the registration ``lost`` is gone, one does it for all."""
        async with self._lock:
            # Ids would not tell: a restarted API gives the same ones again.
            if self.current is None or self.current is lost:
                self.current = await self._api.register(self._asked)
            return self.current

    async def look(self) -> None:
        """Read the current trainer's options, because another trainer may have registered."""
        batch_size, max_token_len = await self._api.trainer()
        if self.current is not None and batch_size > 0:
            self.current = replace(self.current, batch_size=batch_size, max_token_len=max_token_len)


@dataclass(kw_only=True, eq=False)
class Sender:
    """Sender of groups, in the order in which they were finished.

    Args:
        config: the section ``env``, which says which groups are not sent.
        outputs: every group is written there too, sent or not.
    """

    api: RolloutApi
    membership: Membership
    config: EnvironmentConfig
    outputs: Outputs
    counters: Callable[[], Counters]
    pending: int = field(default=0, init=False)
    task: asyncio.Task[None] | None = field(default=None, init=False)
    _queue: asyncio.Queue[UsableGroup] = field(default_factory=asyncio.Queue, init=False)
    _said: set[str] = field(default_factory=set, init=False)

    def start(self) -> asyncio.Task[None]:
        """Begin to send; the task ends only with an error, or by :meth:`finish`."""
        self.task = asyncio.create_task(self._run())
        return self.task

    def put(self, group: UsableGroup) -> None:
        """Queue a group for sending."""
        self.pending += 1
        self._queue.put_nowait(group)

    async def finish(self, *, limit_s: float) -> None:
        """Send the finished groups within ``limit_s`` seconds, drop the rest, and end.

        A post in progress is never repeated under another key, so nothing arrives twice.
        """
        if self.task is None:
            return
        drained = asyncio.create_task(self._queue.join())
        await asyncio.wait({self.task, drained}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        await cancel((self.task, drained))

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

    async def _send(self, groups: Sequence[UsableGroup]) -> None:
        wanted = []
        for group in groups:
            self.outputs.group(group)
            if reason := self._unwanted(group):
                self.counters().dropped[reason] += 1
                self._once(f"groups are not sent: {reason}")
            else:
                wanted.append(group)
        await self._post(wanted)

    async def _post(self, groups: Sequence[UsableGroup]) -> None:
        if not groups:
            return
        member = await self.membership.join()
        try:
            aside = await self.api.post([group.document(env_id=member.env_id) for group in groups])
        except (PostRefused, QueueFull) as error:
            if len(groups) == 1:
                self.counters().dropped["refused by the rollout API"] += 1
                return logger.info("%s", error)
            # Either one group is at fault, and the others must not be lost with it; or the trainer needs the first
            # group to complete a batch, and until then there is no room for all.
            for group in groups:
                await self._post([group])
            return
        lost = []
        for index, group in enumerate(groups):
            reason = aside.get(index, "")
            if not reason:
                self.counters().count_sent(group)
            elif _UNREGISTERED in reason:
                lost.append(group)
            else:
                self.counters().set_aside[reason] += 1
                self._once(f"the rollout API set a group aside: {reason}")
        if lost:
            await self.membership.join(lost=member)
            await self._post(lost)

    def _unwanted(self, group: UsableGroup) -> str:
        """Return why a group is not sent; empty if it is."""
        if self.config.ensure_scores_are_not_same and len(set(group.scores)) == 1:
            return "all scores are the same (--env.ensure_scores_are_not_same)"
        member = self.membership.current
        limit = member.max_token_len if member else -1
        if 0 < limit <= group.longest:
            return f"longer than the trainer's limit of {limit} tokens"
        return ""

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.info(line)
