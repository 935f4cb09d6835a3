"""Many generation requests in flight over several servers, on one event loop. No torch."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import httpx

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, GenerationRequest, SamplingParams, VersionSpan
from lachesis.engines.base import Finished
from lachesis.engines.http.control import CONNECT_RETRIES, KEEP_ALIVE_S, ServerControl, malformed, read_reply, tls
from lachesis.engines.serving.generation import ARRAYS, read_arrays

ROUTE = "/generate"
_CONNECT_S = 10.0
# httpcore goes through all connections of a pool for each request: many small pools stay cheap.
_POOLS_PER_SERVER = 16
# The trainer decodes what it needs itself.
_WITHOUT_TEXT = {"text": False}
_FINISH_REASONS = ("stop", "length", "abort")


class GenerationCalls:
    """Sends requests to the least busy server. Its coroutines run on one event loop.

    Args:
        servers: the servers, for their addresses and their last known state.
        max_in_flight: most requests sent at the same time.
        check_session: raises if the answer of a server is of a session that it should not be of.
    """

    def __init__(
        self,
        servers: Sequence[ServerControl],
        *,
        max_in_flight: int,
        check_session: Callable[[ServerControl, str], None],
    ) -> None:
        self._routes = [_Route(server) for server in servers]
        self._slots = asyncio.Semaphore(max_in_flight)
        self._check_session = check_session
        self._tasks: set[asyncio.Task[Any]] = set()
        self._callers: set[asyncio.Task[Any]] = set()

    async def generate(
        self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """See :meth:`Engine.generate`; all requests of all calls share the slots, first come first served."""
        deadline.check("nothing was sent")
        caller = asyncio.current_task()
        assert caller is not None
        tasks = [asyncio.create_task(self._complete(i, request, finished)) for i, request in enumerate(requests)]
        self._callers.add(caller)
        self._tasks.update(tasks)
        try:
            done, pending = await asyncio.wait(
                tasks, timeout=deadline.remaining_s(), return_when=asyncio.FIRST_EXCEPTION
            )
            failed = [task for task in tasks if task in done and (task.cancelled() or task.exception())]
            if failed and failed[0].cancelled():
                raise EngineError("the engine client was closed while it generated", remedy="close it after generating")
            if failed:
                failed[0].result()
            if pending:
                raise self._routes[0].server.expired(
                    deadline, f"{ROUTE}: {len(done)} of {len(tasks)} requests finished"
                )
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            # Connections of cancelled requests are closed, which makes the servers abort them.
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)
            self._callers.discard(caller)

    async def close(self) -> None:
        """Cancel what is in flight, wait until its callers know, and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)
        for route in self._routes:
            await route.close()

    async def _complete(self, index: int, request: GenerationRequest, finished: Finished | None) -> list[Completion]:
        async with self._slots:
            route = min(self._routes, key=lambda one: one.in_flight)
            route.in_flight += request.n
            try:
                reply = await route.post(request_body(request) | _WITHOUT_TEXT)
            finally:
                route.in_flight -= request.n
        try:
            completions = read_completions(reply, n=request.n)
            session_id = str(reply["session_id"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise malformed(route.server.url, ROUTE, error) from error
        self._check_session(route.server, session_id)
        route.server.saw(f"generating at weight version {completions[-1].versions.last}, session {session_id}")
        if finished is not None:
            finished(index, completions)
        return completions


class _Route:
    """The connections to one server, and how many sequences it is at work on."""

    def __init__(self, server: ServerControl) -> None:
        self.server = server
        self.in_flight = 0
        verify = tls(server.url)
        self._clients = [_client(verify) for _ in range(_POOLS_PER_SERVER)]
        self._turn = 0

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sent once; only connecting is tried again. Cancelled by the caller at the deadline."""
        self._turn = (self._turn + 1) % len(self._clients)
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            response = await self._clients[self._turn].post(
                f"{self.server.url}{ROUTE}", json=body, headers={"Accept": ARRAYS}, timeout=timeout
            )
        except httpx.TransportError as error:
            raise self.server.unreachable(error) from error
        if response.is_success and response.headers.get("content-type") == ARRAYS:
            try:
                return read_arrays(response.content)
            except (KeyError, TypeError, ValueError) as error:
                raise malformed(self.server.url, ROUTE, error) from error
        return read_reply(response, url=self.server.url, route=ROUTE)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def _client(verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
    transport = httpx.AsyncHTTPTransport(verify=verify, retries=CONNECT_RETRIES, limits=limits)
    return httpx.AsyncClient(transport=transport, trust_env=False)


def request_body(request: GenerationRequest) -> dict[str, Any]:
    """The body of ``/generate`` for a request. What changes nothing is left out, so that every server takes it."""
    params = request.params
    neutral = SamplingParams(max_tokens=0)
    changed = {name: value for name, value in asdict(params).items() if value != getattr(neutral, name)}
    regex, extra = changed.pop("guided_regex", None), changed.pop("extra", {})
    body = {
        "prompt_token_ids": request.prompt_ids,
        "n": request.n,
        "seed": request.seed,
        "temperature": params.temperature,
        "skip_special_tokens": False,
    }
    return body | changed | ({} if regex is None else {"structured_outputs": {"regex": regex}}) | extra


def read_completions(reply: dict[str, Any], *, n: int) -> list[Completion]:
    """The ``n`` completions of an answer.

    Raises:
        KeyError, TypeError, ValueError: the answer is not whole.
    """
    columns = [reply[name] for name in ("token_ids", "token_logprobs", "finish_reasons", "weight_version")]
    if any(len(column) != n for column in columns):
        raise ValueError(f"{[len(column) for column in columns]} completions, asked for {n}")
    completions = []
    for token_ids, logprobs, reason, versions in zip(*columns, strict=True):
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
        if reason not in _FINISH_REASONS:
            raise ValueError(f"the finish reason {reason!r}")
        if not all(math.isfinite(value) for value in logprobs):
            raise ValueError("a logprob that is not finite")
        completions.append(
            Completion(
                token_ids=tuple(token_ids),
                logprobs=tuple(logprobs),
                finish_reason=reason,
                versions=VersionSpan(int(versions["first"]), int(versions["last"])),
            )
        )
    return completions
