"""The client of one inference server's operations. Synchronous; every call has a deadline. No torch."""

from __future__ import annotations

import json
import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from lachesis.common.deadline import Deadline
from lachesis.common.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnreachable,
    LachesisError,
    ModelError,
    StaleWeights,
)
from lachesis.common.http import server_url
from lachesis.common.types import CanaryReading
from lachesis.engines.base import PauseMode
from lachesis.engines.serving import operations as ops
from lachesis.engines.serving.backend import (
    MEMORY_PARTS,
    DigestRequest,
    MemoryPart,
    ReceiverSpec,
    ReceiverStatus,
    Refused,
    TensorInfo,
)
from lachesis.engines.serving.bodies import Request, fault_of
from lachesis.engines.serving.operations import Operation, ServerInfo
from lachesis.engines.serving.session import session_token
from lachesis.engines.serving.tokens import TokensBody

# Number of retries of connecting; safe, because nothing has been sent yet.
CONNECT_RETRIES = 2
_CONNECT_S = 10.0
# Shorter than the 5 s after which uvicorn closes idle connections, to avoid using one that is about to close.
KEEP_ALIVE_S = 2.0
# Server errors that callers distinguish; all others become EngineErrors here.
_SERVER_ERRORS: dict[str, type[LachesisError]] = {
    kind.__name__: kind for kind in (DeadlineExceeded, EngineUnreachable, ModelError, StaleWeights)
}
# Answers of servers that do not know a path, or not with this method.
_NO_ROUTE = (404, 405, 501)

Q = TypeVar("Q", bound=Request)
A = TypeVar("A", bound=BaseModel)
Send = Callable[..., httpx.Response]


def tls(url: str) -> ssl.SSLContext | bool:
    """Return the TLS verification for ``url``; loading certificates is slow, so it is created only for https."""
    return httpx.create_ssl_context() if url.startswith("https:") else False


class ServerControl:
    """A client of one server. Thread-safe. Methods are named as in ``EngineBackend``, which describes them.

    Each method raises :class:`EngineError` with the server's own message and remedy
    (:class:`~lachesis.engines.serving.backend.Refused`, with the HTTP status, for a caller's error), an EngineError
    with the server's last known state if it does not answer, and :class:`DeadlineExceeded` once the deadline passes.
    Only requests that change nothing are ever sent twice.

    Args:
        url: of the server, with or without ``/v1``.
        token: the session's token; by default :func:`session_token` looks it up when needed.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = server_url(url)
        self._given_token = token
        self._token = token
        self._seen: tuple[float, str] | None = None
        self._heard = -math.inf
        # No proxies: servers belong to this run, and a proxy from the environment often cannot reach them.
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(
                verify=tls(self.url), retries=CONNECT_RETRIES, limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
            ),
            trust_env=False,
        )

    def call(self, operation: Operation[Q, A], request: Q, *, deadline: Deadline) -> A:
        """Send an operation and return its answer. The class docstring lists the errors."""
        send = partial(self._send, operation, request, deadline=deadline)
        try:
            response = self._with_token(send) if operation.guarded else _once_more(send)
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        reply = read_reply(response, url=self.url, route=operation.path)
        self._heard = time.monotonic()
        if self._seen is None:
            self.saw("in order")
        try:
            return operation.answer.model_validate(reply)
        except ValidationError as error:
            raise malformed(self.url, operation.path, fault_of(error)) from error

    def info(self, *, deadline: Deadline) -> ServerInfo:
        """Return the server's identity and state."""
        info = self.call(ops.INFO, ops.Nothing(), deadline=deadline).model_copy(update={"url": self.url})
        state = " paused," * info.paused + " asleep," * info.sleeping
        self.saw(f"{state} at weight version {info.weight_version}, session {info.session_id}".lstrip())
        return info

    def claim(self, owner: str, *, takeover: bool = False, deadline: Deadline) -> None:
        """Make ``owner`` the only run that may change this engine's weights. Refused (409) if another one is."""
        self.call(ops.CLAIM, ops.Claim(owner=owner, takeover=takeover), deadline=deadline)

    def release(self, owner: str, *, deadline: Deadline) -> None:
        """Release a claim, so that any run may claim the engine. Idempotent; the claim of another run stays."""
        self.call(ops.RELEASE, ops.Release(owner=owner), deadline=deadline)

    def canary(self, token_ids: Sequence[int], *, deadline: Deadline) -> CanaryReading:
        """Return logprobs of a fixed sequence under the current weights, at temperature 1; works while paused."""
        found = self.call(ops.CANARY, ops.CanaryRequest(token_ids=tuple(token_ids)), deadline=deadline)
        self.saw(f"at weight version {found.weight_version}, session {found.session_id}")
        return _reading(found)

    def continue_greedily(self, prompt: Sequence[int], count: int, *, deadline: Deadline) -> tuple[int, ...]:
        """Return ``count`` greedily sampled tokens after ``prompt``; fewer if the completion ends."""
        sampling = {"temperature": 0.0, "max_tokens": count}
        body = TokensBody(token_ids=tuple(prompt), sampling_params=sampling)
        return self.call(ops.TOKENS, body, deadline=deadline).choices[0].token_ids

    def prove(
        self, token_ids: Sequence[int], wanted: DigestRequest, *, deadline: Deadline
    ) -> tuple[CanaryReading, Mapping[str, int]]:
        """Return :meth:`canary` and the ``wanted`` digests, for the same weights, in one answer."""
        if not wanted.asks:
            return self.canary(token_ids, deadline=deadline), {}
        request = ops.ProofRequest(token_ids=tuple(token_ids), slices=wanted.slices, adapter=wanted.adapter)
        found = self.call(ops.PROVE, request, deadline=deadline)
        self.saw(f"at weight version {found.weight_version}, session {found.session_id}")
        return _reading(found), found.digests

    def load_adapter(self, path: Path, *, name: str, version: int, deadline: Deadline) -> None:
        wanted = ops.LoadAdapter(adapter_path=path, adapter_name=name, weight_version=version)
        self.call(ops.LOAD_ADAPTER, wanted, deadline=deadline)

    def start_receiver(self, spec: ReceiverSpec, *, deadline: Deadline) -> None:
        """Make the engine join a channel, in the background; see :meth:`receiver_status`."""
        self.call(ops.START_RECEIVER, spec, deadline=deadline)

    def receiver_status(self, *, deadline: Deadline) -> ReceiverStatus:
        """Return the receiver's status, without its ``spec``."""
        found = self.call(ops.RECEIVER, ops.Nothing(), deadline=deadline)
        return ReceiverStatus(found.status, found.detail, updates=found.updates, copied=found.copied)

    def receive(self, version: int, *, deadline: Deadline) -> None:
        """Make the engine receive one update from the channel; return once it is loaded as ``version``."""
        self.call(ops.RECEIVE, ops.NewVersion(weight_version=version), deadline=deadline)

    def stop_receiver(self, *, deadline: Deadline) -> None:
        self.call(ops.STOP_RECEIVER, ops.Nothing(), deadline=deadline)

    def export_shared(self, path: Path, *, deadline: Deadline) -> None:
        self.call(ops.EXPORT, ops.ExportShared(path=path), deadline=deadline)

    def state_dict_info(self, *, deadline: Deadline) -> dict[str, TensorInfo]:
        return self.call(ops.STATE_DICT, ops.Nothing(), deadline=deadline).param_mappings

    def pause(self, *, mode: PauseMode = "keep", deadline: Deadline) -> None:
        self.call(ops.PAUSE, ops.Pause(mode=mode), deadline=deadline)

    def resume(self, *, deadline: Deadline) -> None:
        self.call(ops.RESUME, ops.Nothing(), deadline=deadline)

    def sleep(self, *, level: int = 1, deadline: Deadline) -> None:
        """Make the engine free its GPU memory. At level 1 the weights stay in host memory. Idempotent."""
        self.call(ops.SLEEP, ops.Sleep(level=level), deadline=deadline)

    def wake_up(self, tags: Sequence[MemoryPart] = MEMORY_PARTS, *, deadline: Deadline) -> None:
        """Make the engine reallocate these parts of its memory. Idempotent."""
        self.call(ops.WAKE_UP, ops.WakeUp(tags=tuple(tags)), deadline=deadline)

    def reload(self, path: Path, *, version: int, deadline: Deadline) -> None:
        self.call(ops.RELOAD, ops.Reload(path=path, weight_version=version), deadline=deadline)

    def set_version(self, version: int, *, deadline: Deadline) -> None:
        """Announce that the weights were changed in place and are now ``version``."""
        self.call(ops.SET_VERSION, ops.NewVersion(weight_version=version), deadline=deadline)

    def close(self) -> None:
        """Close the connections. Idempotent. The server keeps running."""
        self._http.close()

    def saw(self, state: str) -> None:
        """Record the server's state from its latest answer, for later error messages."""
        self._heard = time.monotonic()
        self._seen = (self._heard, state)

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the server last answered; infinity before its first answer."""
        return time.monotonic() - self._heard

    @property
    def last_state(self) -> str:
        """Describe the server's state when it last answered."""
        if self._seen is None:
            return "it has not answered this process before"
        when, state = self._seen
        return f"last seen {time.monotonic() - when:.1f} s ago {state}"

    def unreachable(self, error: Exception) -> EngineUnreachable:
        """Return the error for a server that did not answer."""
        return EngineUnreachable(
            f"the inference server at {self.url} does not answer ({type(error).__name__}: {error}); {self.last_state}",
            remedy="look at its log; if it is gone, start it with `lachesis serve` or `lachesis vllm-serve FILE`",
        )

    def expired(self, deadline: Deadline, route: str) -> DeadlineExceeded:
        """Return the error for an answer that did not arrive in time."""
        detail = f"{self.url}{route} has not answered; {self.last_state}"
        try:
            deadline.check(detail)
        except DeadlineExceeded as error:
            return error
        return DeadlineExceeded(f"{deadline.name}: {detail}", remedy="look at the engine's log")

    def _with_token(self, send: Send) -> httpx.Response:
        """Send a request with the session's token, and again with a new one if the server refused the old one.

        The retry is safe: a server that refuses a token has not done anything.
        """
        token = self._token or session_token(self.url)
        response = send(token)
        if response.status_code == 401 and self._given_token is None:
            token, before = session_token(self.url), token
            response = response if token == before else send(token)
        if response.status_code != 401:
            self._token = token
        return response

    def _send(
        self, operation: Operation[Any, Any], request: Request, token: str = "", *, deadline: Deadline
    ) -> httpx.Response:
        """Send one request. Raise DeadlineExceeded, EngineError (connecting too slow) or an httpx.TransportError."""
        url = f"{self.url}{operation.path}"
        deadline.check(f"no time was left for a request to {url}")
        remaining = deadline.remaining_s()
        timeout = httpx.Timeout(remaining, connect=_CONNECT_S if remaining is None else min(_CONNECT_S, remaining))
        body = None if operation.method == "GET" else request.model_dump(mode="json", exclude_unset=True)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            return self._http.request(operation.method, url, json=body, headers=headers, timeout=timeout)
        except httpx.ConnectTimeout as error:
            raise self.unreachable(error) from error
        except httpx.TimeoutException as error:
            raise self.expired(deadline, operation.path) from error
        except RuntimeError as error:  # httpx's error for a closed client
            raise EngineError(f"the client of {self.url} is closed", remedy="create a new one") from error


def _once_more(send: Send) -> httpx.Response:
    """Send a read-only request, and again if the connection broke."""
    try:
        return send()
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
        return send()


def read_reply(response: httpx.Response, *, url: str, route: str) -> dict[str, Any]:
    """Return the JSON object of an answer.

    Raises:
        Refused: the server rejects the request (4xx).
        EngineError: the server failed (5xx), or the answer is not from one of our servers. DeadlineExceeded,
        ModelError, StaleWeights: the server failed with these.
    """
    reply = parsed(response) if response.content else {}
    if response.is_success:
        if not isinstance(reply, dict):
            raise malformed(url, route, ValueError(f"not a JSON object: {response.text[:80]!r}"))
        return reply
    error = reply.get("error") if isinstance(reply, dict) else None
    if not isinstance(error, dict):
        error = {}
    if response.status_code in _NO_ROUTE and not error.get("type"):
        raise Refused(
            f"the server at {url} has no route {route}: it is not an inference server of Lachesis",
            status=response.status_code,
            remedy="start it with `lachesis serve` or `lachesis vllm-serve`, not with plain `vllm serve`",
        )
    remedy = str(error.get("remedy") or "")
    message = f"{url}{route} answered {response.status_code}: {said_by(response)}"
    if 400 <= response.status_code < 500:
        raise Refused(message, status=response.status_code, remedy=remedy)
    raise _SERVER_ERRORS.get(str(error.get("type")), EngineError)(message, remedy=remedy)


def malformed(url: str, route: str, error: Exception | str) -> EngineError:
    """Return the error for an answer that breaks the contract."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return EngineError(
        f"{url}{route} gave an unexpected answer: {reason}", remedy="use the same version of lachesis on both sides"
    )


def parsed(response: httpx.Response) -> Any:
    """Return the body of an answer; ``None`` if it is not JSON."""
    try:
        return json.loads(response.content)
    except ValueError:
        return None


def said_by(response: httpx.Response) -> str:
    """Return the reason in a refusal: from our servers, OpenAI's, others, or a proxy with a line of text."""
    reply = parsed(response)
    reply = reply if isinstance(reply, dict) else {}
    error = reply.get("error")
    own = error.get("message") if isinstance(error, dict) else error
    others = reply.get("detail") or reply.get("message")
    return str(own or others or _first_line(response) or response.reason_phrase)


def _first_line(response: httpx.Response) -> str:
    """Return the first line of plain text; empty for HTML, whose first line says nothing."""
    html = "html" in response.headers.get("content-type", "")
    return "" if html else response.text.strip().partition("\n")[0][:200]


def _reading(found: ops.Canary) -> CanaryReading:
    return CanaryReading(
        found.logprobs, version=found.weight_version, session_id=found.session_id, cached_tokens=found.cached_tokens
    )
