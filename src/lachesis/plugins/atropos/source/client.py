"""The rollout API as a trainer sees it: ours with its acknowledgements, or the original. Synchronous; no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from lachesis.common.deadline import Deadline, Retry
from lachesis.common.errors import ConfigError, DataError, DeadlineExceeded, EngineError
from lachesis.engines.http.control import tls
from lachesis.plugins.atropos.api.wire import HOLDS_HEADER, TRAINER_HEADER, Registration
from lachesis.process.threads import Watch, call_watched

logger = logging.getLogger("lachesis")

_CONNECT_S = 5.0
_FIRST_PAUSE_S = 0.1
# The original forms all possible batches in one request. With a long queue that takes a minute, and a client that does
# not wait loses its batch.
_PATIENCE_S = 600.0


class TrainerNotRegistered(EngineError):
    """Error of an API that knows no trainer: it was restarted or reset."""


class Replaced(EngineError):
    """Error of an API at which another trainer has registered since."""


@dataclass(frozen=True, slots=True)
class TrainerRegistration:
    """Reply of the API to a registering trainer. ``acknowledges``: the API keeps batches until they are acknowledged.

    ``outstanding`` are the ids of batches that an earlier trainer had and did not acknowledge.
    """

    uuid: int
    acknowledges: bool
    outstanding: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """The groups of one batch, as received. ``batch_id`` is None with the plain protocol."""

    groups: Sequence[Mapping[str, Any]]
    batch_id: int | None = None


class RolloutApiClient:
    """Client of one rollout API. Each call is repeated while the API is away, until its deadline passes.

    Args:
        watch: called while an answer is awaited and after each failure, several times a second; an error that it
            raises ends the call.
    """

    def __init__(self, url: str, *, watch: Watch = lambda: None) -> None:
        self.url = api_url(url)
        self._watch = watch
        # Shorter than the 5 s after which uvicorn closes idle connections.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self._http = httpx.Client(verify=tls(self.url), trust_env=False, limits=limits)

    def require(self, *, limit_s: float) -> None:
        """Return once the API answers.

        Raises:
            EngineError: no answer within ``limit_s`` seconds, or something else listens there.
            LachesisError: what ``watch`` raised.
        """
        retry = Retry(
            Deadline("the wait for the rollout API", limit_s),
            longest_s=_FIRST_PAUSE_S,
            say=lambda reason: logger.warning("%s; trying for up to %g s", reason, limit_s),
        )
        while True:
            try:
                response = self._http.get(f"{self.url}/info", timeout=_CONNECT_S)
                break
            except httpx.TransportError as error:
                reason = f"Atropos API not reachable at {self.url} ({error or type(error).__name__})"
                try:
                    self._wait(retry, reason)
                except DeadlineExceeded:
                    raise EngineError(reason, remedy=start_remedy(self.url)) from error
        if not response.is_success or "batch_size" not in response.text:
            raise EngineError(
                f"the server at {self.url} is not a rollout API: GET /info gives {response.status_code}",
                remedy=start_remedy(self.url),
            )

    def register(self, asked: Registration, *, deadline: Deadline) -> TrainerRegistration:
        """Register as the trainer, with acknowledgements if the API knows them.

        Raises:
            DataError: the API refuses the options.
            DeadlineExceeded: it does not answer.
        """
        reply = self._ask("POST", "/register", deadline=deadline, body=asked.model_dump() | {"acknowledge": True})
        if "uuid" not in reply:
            raise EngineError(
                f"the rollout API at {self.url} did not register the trainer: {reply}", remedy=start_remedy(self.url)
            )
        outstanding = reply.get("outstanding")
        return TrainerRegistration(int(reply["uuid"]), outstanding is not None, tuple(outstanding or ()))

    def queued(self, *, deadline: Deadline) -> int:
        """Return the number of groups that wait for a trainer. Raises DeadlineExceeded if the API does not answer."""
        return int(self._ask("GET", "/status", deadline=deadline).get("queue_size", 0))

    def next_batch(
        self, trainer: TrainerRegistration, *, holds: Collection[int], deadline: Deadline
    ) -> tuple[Delivery | None, str]:
        """Return a batch, or None and the API's reason for waiting, which may be empty.

        Args:
            trainer: its registration.
            holds: ids of the batches that the trainer has and did not acknowledge.
            deadline: of the answer.

        Raises:
            NotRegistered: the API knows no trainer any more.
            Replaced: another trainer has registered.
            DeadlineExceeded: the API does not answer.
        """
        headers = {}
        if trainer.acknowledges:
            headers = {TRAINER_HEADER: str(trainer.uuid), HOLDS_HEADER: ",".join(map(str, sorted(holds)))}
        reply = self._ask("GET", "/batch", deadline=deadline, headers=headers)
        if reply.get("status") == "error":
            raise TrainerNotRegistered(f"the rollout API at {self.url} says: {reply.get('message')}")
        if reply.get("batch") is None:
            return None, str(reply.get("waiting") or "")
        return Delivery(reply["batch"], reply.get("batch_id")), ""

    def acknowledge(self, trainer: TrainerRegistration, ids: Sequence[int], *, deadline: Deadline) -> None:
        """Acknowledge batches, which the API then drops.

        Raises:
            Replaced: another trainer has registered, or the API was restarted without its state.
            DeadlineExceeded: the API does not answer.
        """
        self._ask("POST", "/batch/ack", deadline=deadline, body={"uuid": trainer.uuid, "batch_ids": list(ids)})

    def environment_names(self) -> list[str]:
        """Return the names of environments by id, if the API is ours and answers."""
        try:
            found = self._send("GET", "/overview", timeout=_CONNECT_S).json()
            return [str(environment["name"]) for environment in found["environments"]]
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return []

    def leave(self, trainer: TrainerRegistration, *, limit_s: float) -> None:
        """Unregister, so that this trainer's options no longer bind environments; skipped if the API is away."""
        try:
            timeout = httpx.Timeout(limit_s)
            self._http.post(f"{self.url}/disconnect", json={"uuid": trainer.uuid}, timeout=timeout)
        except httpx.HTTPError as error:
            logger.debug("the rollout API at %s could not be told that the trainer ends: %s", self.url, error)

    def situation(self, *, batch_size: int) -> str:
        """Describe the API's state in a line while the trainer waits; the API may be away.

        The plain protocol says nothing about environments, so an empty queue is explained by its most common cause.
        """
        try:
            status = self._send("GET", "/status", timeout=_CONNECT_S).json()
            overview = self._send("GET", "/overview", timeout=_CONNECT_S)
        except (httpx.TransportError, ValueError) as error:
            return f"the API does not answer ({error or type(error).__name__})"
        queued = int(status.get("queue_size", 0))
        if overview.is_success and not overview.json()["environments"]:
            return "no environment has registered yet"
        if not queued:
            empty = "the queue is empty: no environment has sent a group yet, or none is left; their logs say why"
            ends = f" (one whose --env.group_size is above the batch of {batch_size} ends at its start)"
            return empty if overview.is_success else empty + ends
        return f"{queued} groups are queued, but their sizes do not add up to a batch yet"

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def _ask(
        self,
        method: str,
        path: str,
        *,
        deadline: Deadline,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON answer; retries while the API is away or overloaded."""
        retry = Retry(
            deadline,
            first_s=_FIRST_PAUSE_S,
            # A single failure is not reported: an idle connection may be closed at any time.
            told_at=2,
            say=lambda reason: logger.warning("%s; trying again", reason),
        )
        while True:
            try:
                response = self._send(method, path, json=body, headers=headers, timeout=self._timeout(deadline))
            except httpx.TransportError as error:
                reason = f"Atropos API not reachable at {self.url}{path} ({error or type(error).__name__})"
            else:
                if response.is_success:
                    if retry.failures > 1:
                        logger.warning("the rollout API at %s answers again", self.url)
                    return _document(response)
                reason = f"{self.url}{path} answers {response.status_code}: {' '.join(response.text.split())[:300]}"
                self._refuse(response, reason)
            self._wait(retry, reason)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return call_watched(partial(self._http.request, method, self.url + path, **options), watch=self._watch)

    def _refuse(self, response: httpx.Response, reason: str) -> None:
        """Raise for an answer that will be the same next time."""
        status = response.status_code
        if status == 409:
            raise Replaced(
                f"another trainer has registered at the rollout API {self.url}, so this one gets no more batches",
                remedy="give each trainer its own API, or stop the other and resume with --resume",
            )
        if 400 <= status < 500 and status not in (408, 425, 429, 499):
            raise DataError(f"the rollout API refuses the trainer: {reason}", remedy="correct this value")

    def _timeout(self, deadline: Deadline) -> httpx.Timeout:
        remaining = deadline.remaining_s()
        return httpx.Timeout(_PATIENCE_S if remaining is None else min(_PATIENCE_S, remaining + 1), connect=_CONNECT_S)

    def _wait(self, retry: Retry, reason: str) -> None:
        pause_s = retry.after(reason)
        self._watch()
        time.sleep(pause_s)


def start_remedy(url: str) -> str:
    """Return the remedy for an address without a rollout API."""
    port = httpx.URL(url).port or 80
    return f"start it with `lachesis run-api --port {port}`, or give its address (source.url, --atropos-url)"


def _document(response: httpx.Response) -> dict[str, Any]:
    remedy = start_remedy(str(response.request.url))
    try:
        document = response.json()
    except ValueError as error:
        raise EngineError(f"{response.request.url} answers with invalid JSON: {error}", remedy=remedy) from error
    if not isinstance(document, dict):
        raise EngineError(f"{response.request.url} answers with {type(document).__name__}", remedy=remedy)
    return document


def api_url(url: str) -> str:
    """Return ``http://host:port`` of a rollout API. Raises ConfigError if it is not such an address."""
    wrong = ConfigError(f"{url!r} is not an address of a rollout API", remedy="write it like http://127.0.0.1:8002")
    try:
        parts = httpx.URL(url.strip())
    except httpx.InvalidURL as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not parts.host or not 0 < (parts.port or 80) <= 65535:
        raise wrong
    return str(parts).rstrip("/")
