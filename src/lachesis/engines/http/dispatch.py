"""Dispatch of concurrent generation requests to the engines of a fleet, on one event loop. No torch."""

from __future__ import annotations

import asyncio
import logging
import math
import string
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import numpy as np

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, EngineUnreachable, LachesisError, StaleWeights
from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import Completion, GenerationRequest, SamplingParams, VersionSpan
from lachesis.engines.base import Finished
from lachesis.engines.fleet import Fleet, State, Ticket
from lachesis.engines.http.control import CONNECT_RETRIES, KEEP_ALIVE_S, ServerControl, malformed, read_reply, tls
from lachesis.engines.serving.backend import Refused
from lachesis.engines.serving.generation import ARRAYS, read_arrays
from lachesis.metrics.meters import BusyTime
from lachesis.metrics.values import Mean
from lachesis.process.tasks import cancel

logger = logging.getLogger("lachesis")
ROUTE = "/generate"
SESSION_HEADER = "X-Session-ID"
_CONNECT_S = 10.0
# Seconds before connecting is tried again.
_PAUSES_S = (0.0, 0.5)
# The trainer decodes tokens itself.
_WITHOUT_TEXT = {"text": False}
_FINISH_REASONS = ("stop", "length", "abort")
# Seconds between checks of busy engines, and the time that an engine gets to answer a check.
_LOOK_S = 1.0
_ANSWER_S = 10.0
# Number of progress checks within the time after which an engine counts as hanging.
_LOOKS = 4
# A request fails after failing with this many live engines.
_MOST_FAILURES = 2


@dataclass(eq=False)
class GenerationCalls:
    """Sends requests to the engines that the fleet picks, and resends a request whose engine is lost.

    Its coroutines run on one event loop.

    Args:
        fleet: chooses an engine for each request, and records failures.
        server: returns the client of the engine at an address.
        check_session: raises if a server answers from a session that is not the expected one.
    """

    fleet: Fleet
    _: KW_ONLY
    server: Callable[[str], ServerControl]
    check_session: Callable[[ServerControl, str], None]

    def __post_init__(self) -> None:
        self._routes: dict[str, _Route] = {}
        self._busy: dict[str, BusyTime] = {}
        self._prefixes = PrefixHits()
        # Requests wait here in order of arrival; the first one waits for a free engine.
        self._door = asyncio.Lock()
        self._room = asyncio.Event()
        self._visits: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
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
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        try:
            for task in tasks:
                task.add_done_callback(lambda task: None if _has_failed(task) else deadline.progressed())
            done, pending = set[asyncio.Task[list[Completion]]](), set(tasks)
            while pending and deadline.remaining_s() != 0.0 and not any(map(_has_failed, done)):
                done, pending = await asyncio.wait(
                    tasks, timeout=deadline.remaining_s(), return_when=asyncio.FIRST_EXCEPTION
                )
            failed = [task for task in tasks if task in done and _has_failed(task)]
            if failed and failed[0].cancelled():
                raise EngineError("the engine client was closed during generation", remedy="close it after generating")
            if failed:
                failed[0].result()
            if pending:
                route = next(iter(self._routes.values()))
                raise route.server.expired(deadline, f"{ROUTE}: {len(done)} of {len(tasks)} requests finished")
            return [task.result() for task in tasks]
        finally:
            # Connections of cancelled requests are closed, which makes the servers abort them.
            await cancel(tasks)
            self._tasks.difference_update(tasks)
            self._callers.discard(caller)
            if not self._callers and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    def take_busy(self) -> dict[str, float]:
        """Return each engine's busy seconds since the last call, by address. Thread-safe."""
        return {url: busy.take() for url, busy in [*self._busy.items()]}

    def take_prefix_hits(self) -> dict[str, Mean]:
        """Return the share of prompts that each engine had cached since the last call, by address. From any thread."""
        return self._prefixes.take()

    async def close(self) -> None:
        """Cancel the requests in flight, wait until their callers are notified, and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)
        for task in self._visits.values():
            task.cancel()
        for route in self._routes.values():
            await route.close()

    async def _complete(self, index: int, request: GenerationRequest, finished: Finished | None) -> list[Completion]:
        failures = 0
        while True:
            ticket = await self._ticket(request)
            lengths: list[int] = []
            try:
                with self._busy.setdefault(ticket.url, BusyTime()).span():
                    completions = await self._answer(ticket, request)
                lengths = [len(completion.token_ids) for completion in completions]
                break
            except (DeadlineExceeded, Refused):
                raise
            except EngineError as error:
                self.fleet.lost(ticket, error.message)
                self._visit(ticket.url)
                failures += not isinstance(error, EngineUnreachable | StaleWeights)
                if not self.fleet.admitted or failures >= _MOST_FAILURES:
                    raise
                logger.warning("%s; its request goes to another engine", error.message)
            finally:
                self.fleet.ended(ticket, lengths=lengths)
                self._room.set()
        if finished is not None:
            finished(index, completions)
        return completions

    async def _ticket(self, request: GenerationRequest) -> Ticket:
        """Wait for a free engine. Raise EngineUnreachable if no engine is admitted."""
        async with self._door:
            while True:
                self._room.clear()
                ticket = self.fleet.pick(
                    completions=request.n,
                    max_tokens=request.params.max_tokens,
                    group=request.conversation or request.prompt_ids,
                )
                if ticket is not None:
                    return ticket
                if not self.fleet.admitted:
                    raise nobody_serves(self.fleet)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), _LOOK_S)

    async def _answer(self, ticket: Ticket, request: GenerationRequest) -> list[Completion]:
        """Return the completions from the ticket's engine.

        Raises:
            EngineUnreachable: the engine is gone, or was declared dead while it had the request.
            StaleWeights: another engine answers at its address.
        """
        route = self._routes.get(ticket.url)
        if route is None:
            route = self._routes[ticket.url] = _Route(self.server(ticket.url))
        # They make a router send a conversation to one engine; invalid characters are escaped as in a URL.
        name = quote(request.conversation, safe=string.punctuation)
        headers = {SESSION_HEADER: name} if name else {}
        reply = await route.post(request_body(request) | _WITHOUT_TEXT, headers=headers)
        try:
            completions = read_completions(reply, n=request.n, routed=request.params.routed_experts)
            cached_tokens = read_cached_tokens(reply, n=request.n)
            session_id = str(reply["session_id"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise malformed(route.server.url, ROUTE, error) from error
        self.check_session(route.server, session_id)
        self._prefixes.add(ticket.url, cached_tokens, prompt_tokens=len(request.prompt_ids))
        route.server.saw(f"generating at weight version {completions[-1].versions.last}, session {session_id}")
        return completions

    async def _look(self) -> None:
        """During requests, give up those whose engine has died, and check engines without progress."""
        since = 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            for url in self.fleet.check_progress():
                logger.warning("giving up the engine at %s: %s", url, self.fleet.reason(url))
            since += _LOOK_S
            if self.fleet.hang_s is not None and since >= self.fleet.hang_s / _LOOKS:
                since = 0.0
                for url in self.fleet.at_work:
                    self._visit(url, patient=True)
            for url in self.fleet.having(State.SUSPECT):
                self._visit(url)
            for url, route in self._routes.items():
                if self.fleet.state(url) is State.DEAD:
                    route.give_up(self.fleet.reason(url))
            self._room.set()

    def _visit(self, url: str, *, patient: bool = False) -> None:
        """Check an engine in a background task; see :func:`visit`."""
        if url not in self._visits:
            work = asyncio.to_thread(visit, self.fleet, self.server(url), patient=patient)
            task = self._visits[url] = asyncio.create_task(work)
            task.add_done_callback(lambda _: (self._visits.pop(url, None), self._room.set()))


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def visit(fleet: Fleet, server: ServerControl, *, patient: bool = False, answer_s: float = _ANSWER_S) -> None:
    """Report to the fleet whether an engine answers, is in the same session, and how many tokens it has generated.

    An engine that does not answer in time is declared dead, unless ``patient``, which allows for a busy engine.
    """
    try:
        info = server.info(deadline=Deadline(f"an answer of {server.url}", answer_s))
    except LachesisError as error:
        if not (patient and isinstance(error, DeadlineExceeded)):
            fleet.died(server.url, error.message)
        return
    if info.session_id != fleet.session(server.url):
        fleet.died(server.url, f"it was restarted: session {info.session_id}")
        return
    if info.generated_tokens is not None:
        fleet.progressed(server.url, info.generated_tokens)
    if info.generated_tokens is None or info.paused or info.sleeping:
        fleet.excused(server.url)
    if fleet.state(server.url) is not State.DEAD:  # its weights are restored before it serves again
        fleet.met(server.url, info.session_id)


def nobody_serves(fleet: Fleet) -> EngineUnreachable:
    """Return the error for a fleet without an admitted engine."""
    stands = "; ".join(f"{row.url} is {row.state}{f': {row.reason}' if row.reason else ''}" for row in fleet.rows)
    return EngineUnreachable(f"no engine can serve: {stands}", remedy="look at the engines' logs")


class _Route:
    """The connections to one server, with the requests in flight; created on the event loop that uses it."""

    def __init__(self, server: ServerControl) -> None:
        self.server = server
        self._posts: set[asyncio.Task[dict[str, Any]]] = set()
        self._given_up = ""
        # aiohttp, because there are hundreds of requests, and httpx takes a millisecond of CPU for each, six times as
        # much. No proxies, as with all calls to servers of this run.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=tls(server.url))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())

    async def post(self, body: dict[str, Any], *, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the answer to a request. Raise EngineUnreachable if there is none, or after :meth:`give_up`."""
        post = asyncio.create_task(self._post(body, headers))
        self._posts.add(post)
        try:
            return await post
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                post.cancel()
                raise
            raise EngineUnreachable(f"the engine at {self.server.url} was given up: {self._given_up}") from None
        finally:
            self._posts.discard(post)

    def give_up(self, reason: str) -> None:
        """Cancel the requests in flight, because their answers will not arrive."""
        self._given_up = reason
        for post in self._posts:
            post.cancel()

    async def _post(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Send a request once; only connecting is retried. The caller cancels at the deadline."""
        attempt = 0
        while True:
            try:
                return await self._sent(body, headers)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if attempt == CONNECT_RETRIES:
                    raise self.server.unreachable(error) from error
                await asyncio.sleep(_PAUSES_S[attempt])
                attempt += 1
            except (aiohttp.ClientError, OSError) as error:
                raise self.server.unreachable(error) from error

    async def _sent(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        url = f"{self.server.url}{ROUTE}"
        headers = {**headers, "Accept": ARRAYS}
        async with self._http.post(url, json=body, headers=headers, allow_redirects=False) as response:
            content = await response.read()
        kind = response.headers.get("content-type", "")
        if response.ok and kind == ARRAYS:
            try:
                return read_arrays(content)
            except (KeyError, TypeError, ValueError) as error:
                raise malformed(self.server.url, ROUTE, error) from error
        reply = httpx.Response(response.status, headers={"content-type": kind}, content=content)
        return read_reply(reply, url=self.server.url, route=ROUTE)

    async def close(self) -> None:
        await self._http.close()


def request_body(request: GenerationRequest) -> dict[str, Any]:
    """Build the body of ``/generate``; omits neutral parameters, so that every server accepts it."""
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
    if request.images is not None:
        body["images"] = request.images.encoded()
    return body | changed | ({} if regex is None else {"structured_outputs": {"regex": regex}}) | extra


def read_completions(reply: dict[str, Any], *, n: int, routed: bool = False) -> list[Completion]:
    """Read the ``n`` completions of an answer, with the experts that were used if ``routed``.

    Raises:
        KeyError, TypeError, ValueError: the answer is incomplete.
    """
    columns = [reply[name] for name in ("token_ids", "token_logprobs", "finish_reasons", "weight_version")]
    columns.append(reply["routed_experts"] if routed else [None] * n)
    if any(len(column) != n for column in columns):
        raise ValueError(f"{[len(column) for column in columns]} completions for a request of {n}")
    completions = []
    for token_ids, logprobs, reason, versions, chosen in zip(*columns, strict=True):
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
        if reason not in _FINISH_REASONS:
            raise ValueError(f"unknown finish reason {reason!r}")
        if not all(math.isfinite(value) for value in logprobs):
            raise ValueError("a logprob is not finite")
        completions.append(
            Completion(
                token_ids=tuple(token_ids),
                logprobs=tuple(logprobs),
                finish_reason=reason,
                versions=VersionSpan(int(versions["first"]), int(versions["last"])),
                routed=None if chosen is None else RoutedExperts.of(np.asarray(chosen)),
            )
        )
    return completions


def read_cached_tokens(reply: dict[str, Any], *, n: int) -> list[int | None]:
    """Read how many prompt tokens each of ``n`` completions found in the prefix cache; ``None`` if unknown.

    Raises:
        TypeError, ValueError: the numbers are not for ``n`` completions.
    """
    cached = reply.get("cached_tokens", [None] * n)
    if len(cached) != n:
        raise ValueError(f"cached_tokens of {len(cached)} completions for a request of {n}")
    return [None if tokens is None else int(tokens) for tokens in cached]


class PrefixHits:
    """Counter of prompt tokens, and of cached ones, by engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[str, Mean] = {}

    def add(self, url: str, cached_tokens: Iterable[int | None], *, prompt_tokens: int) -> None:
        """Count the prompt tokens of an answer, and those that each completion found in the cache, if known."""
        known = [cached for cached in cached_tokens if cached is not None]
        if not known:
            return
        answer = Mean(sum(known), prompt_tokens * len(known))
        with self._lock:
            before = self._counted.get(url)
            self._counted[url] = answer if before is None else before.merge(answer)

    def take(self) -> dict[str, Mean]:
        """Return the hit rates since the last call, for each engine that reported any."""
        with self._lock:
            counted, self._counted = self._counted, {}
        return counted
