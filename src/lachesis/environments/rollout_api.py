"""The rollout API as environments see it: registration, the queue's state, and posts that are not lost. No torch."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from lachesis.api.wire import KEY_HEADER, EnvRegistration
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError, EngineError
from lachesis.engines.http.control import tls

logger = logging.getLogger("lachesis.environments")

SETTING = "--env.wait_timeout"
_REQUEST_S = 30.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_TRAINER_POLL_S = 0.25
_GZIP_FROM = 1024
# Fastest: the API is on this machine or near.
_GZIP_LEVEL = 1
# The original answers 500 to an environment that it does not know, for example since it was started again.
_UNKNOWN_AFTER = 3


class NotRegistered(EngineError):
    """The API does not know this environment, for example because it was started again: register anew."""


class PostRefused(DataError):
    """The API refuses a post for good: it is too large, or malformed."""


class QueueFull(EngineError):
    """The queue has no room for several groups at once. It may have room for the one that completes a batch."""


@dataclass(frozen=True, slots=True)
class Registered:
    """What the API tells an environment that it took up. ``batch_size`` and ``max_token_len`` are the trainer's."""

    env_id: int
    name: str
    step: int
    num_steps: int
    batch_size: int
    max_token_len: int


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The figures by which an environment throttles itself. ``full`` says that the queue takes no more tokens."""

    step: int
    queue_size: int
    self_queue_size: int
    max_group_size: int
    unallocated_fraction: float
    env_weight: float
    full: bool = False


@dataclass(frozen=True, slots=True)
class PostReply:
    """What became of a post. ``set_aside`` has the index and the reason of each group that enters no batch."""

    buffered: int = 0
    set_aside: tuple[tuple[int, str], ...] = ()


class RolloutApi:
    """One rollout API, ours or the original.

    Every call is repeated while the API is away or overloaded; repeated posts are taken in once, where the API
    knows idempotency keys.

    Args:
        url: its address.
        wait_s: how long it may be away, in seconds.
    """

    def __init__(self, url: str, *, wait_s: float) -> None:
        self.url = url
        self._wait_s = wait_s
        self._http = httpx.AsyncClient(
            base_url=url, verify=tls(url), trust_env=False, timeout=_REQUEST_S,
            limits=httpx.Limits(keepalive_expiry=2.0),
        )  # fmt: skip
        self.retries = 0

    async def register(self, asked: EnvRegistration) -> Registered:
        """Register, once a trainer has registered and asked for a batch.

        Raises:
            DeadlineExceeded: no trainer came.
            DataError: the API refuses the registration.
        """
        deadline = self._deadline(f"environment {asked.desired_name}: waiting for a trainer at {self.url}")
        waiting = False
        while True:
            reply = await self._request("POST", "/register-env", asked.model_dump())
            if reply.get("status") == "success":
                break
            if not waiting:
                logger.info(
                    f"waiting for a trainer to register at {self.url} and ask for its first batch, "
                    f"for up to {self._wait_s:g} s ({SETTING})"
                )
                waiting = True
            deadline.check(f"the API says {reply.get('status')!r}")
            await asyncio.sleep(_TRAINER_POLL_S)
        info = await self._request("GET", "/info")
        return Registered(
            env_id=reply["env_id"],
            name=reply["wandb_name"],
            step=reply["starting_step"],
            num_steps=reply["num_steps"],
            batch_size=info["batch_size"],
            max_token_len=info["max_token_len"],
        )

    async def status(self, env_id: int) -> QueueStatus:
        """The queue as this environment sees it.

        Raises:
            NotRegistered: the API does not know this environment.
        """
        found = await self._request("GET", "/status-env", {"env_id": env_id}, unknown=(404,))
        limit = found.get("max_queued_tokens")
        return QueueStatus(
            step=found["current_step"],
            queue_size=found["queue_size"],
            self_queue_size=found["self_queue_size"],
            max_group_size=found["max_group_size"],
            unallocated_fraction=found["unallocated_fraction"],
            env_weight=found["env_weight"],
            full=limit is not None and found["queued_tokens"] >= limit,
        )

    async def post(self, groups: Sequence[Mapping[str, Any]]) -> PostReply:
        """Post groups in one request. A single one waits until the queue has room for it.

        Raises:
            PostRefused: the API refuses them for good.
            QueueFull: they are several, and the queue took in none of them.
        """
        headers = {KEY_HEADER: uuid.uuid4().hex}
        path, alone = "/scored_data_list", len(groups) == 1
        reply = await self._request("POST", path, list(groups), headers=headers, wait_for_room=alone)
        reasons = tuple((entry["index"], entry["reason"]) for entry in reply.get("reasons", ()))
        return PostReply(buffered=reply.get("buffered", 0), set_aside=reasons)

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """The trainer's project and group at Weights & Biases."""
        info = await self._request("GET", "/wandb_info")
        return info["project"], info["group"]

    async def disconnect(self, env_id: int, *, limit_s: float) -> None:
        """Say goodbye, if the API can be told within ``limit_s`` seconds; otherwise it will notice by itself."""
        try:
            await self._http.post("/disconnect-env", json={"env_id": env_id}, timeout=limit_s)
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
        """The answer of the API, which is asked again while it is away and, to wait for room, its queue is full."""
        body, sent = _encoded(document)
        sent |= headers or {}
        deadline = self._deadline(f"waiting for the rollout API at {self.url} ({method} {path})")
        pause, attempts = _PAUSE_S, 0
        while True:
            try:
                response = await self._http.request(method, path, content=body, headers=sent)
            except httpx.TransportError as error:
                reason, retry_after = f"{error or type(error).__name__}", None
            else:
                if response.is_success:
                    if attempts > 1:
                        logger.info(f"the rollout API at {self.url} answers")
                    return response.json()
                reason = f"it answered {response.status_code}: {' '.join(response.text.split())[:300]}"
                self._refuse(response, reason, unknown, attempts)
                if not wait_for_room and response.status_code == 429:
                    raise QueueFull(f"the rollout API at {self.url}: {reason}")
                retry_after = _seconds(response.headers.get("retry-after"))
            attempts += 1
            self.retries += 1
            # A single failure is no news: a connection that was idle may be closed at any time.
            if attempts == 2:
                logger.info(f"{deadline.name}, for up to {self._wait_s:g} s ({SETTING}): {reason}")
            deadline.check(reason)
            await asyncio.sleep(retry_after if retry_after is not None else pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _refuse(self, response: httpx.Response, reason: str, unknown: tuple[int, ...], attempts: int) -> None:
        """Raise for an answer that will be the same next time."""
        status = response.status_code
        lost = status in unknown or (bool(unknown) and status == 500 and attempts + 1 >= _UNKNOWN_AFTER)
        if lost:
            raise NotRegistered(f"the rollout API at {self.url} does not know this environment: {reason}")
        if status < 500 and status not in (408, 425, 429, 499):
            kind = PostRefused if status in (413, 422) else DataError
            path = response.request.url.path
            raise kind(f"the rollout API at {self.url} refused {path}: {reason}", remedy="correct what it names")

    def _deadline(self, name: str) -> Deadline:
        return Deadline(name, self._wait_s, SETTING)


def _encoded(document: Any) -> tuple[bytes | None, dict[str, str]]:
    """A body and its headers. NaN and infinity raise ValueError: they are checked before."""
    if document is None:
        return None, {}
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    headers = {"Content-Type": "application/json"}
    if len(body) < _GZIP_FROM:
        return body, headers
    return gzip.compress(body, _GZIP_LEVEL), headers | {"Content-Encoding": "gzip"}


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() else None
