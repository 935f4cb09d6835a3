"""Generation over inference servers: the least busy one is asked, and one that restarts is waited for. No torch."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError
from lachesis.common.http import server_url
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.engines.http.control import malformed, tls
from lachesis.engines.http.generation import request_body
from lachesis.environments.replies import read_completions, read_generate
from lachesis.environments.settings import ServerConfig, SlurmConfig

logger = logging.getLogger("lachesis.environments")

_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# A server that starts again answers these until it is there; what it answers otherwise, it will answer again.
_PASSING = frozenset({408, 425, 429, 502, 503, 504})
_FAILURES = 4
_SETTING = "--openai.timeout"


class ServerBusy(EngineError):
    """A server that cannot be reached or cannot answer now: worth asking again."""


@dataclass(slots=True)
class _Server:
    """One server. ``down_until`` is when it may be asked again, on the monotonic clock; ``failures`` in a row."""

    url: str
    http: httpx.AsyncClient
    in_flight: int = 0
    down_until: float = 0.0
    failures: int = 0


class InferenceClient:
    """Samples completions, with the logprob of each token under the distribution it was sampled from.

    Requests go to the server with the fewest sequences in flight among those that answer. A request that a server
    loses (it restarts, or its engine aborts) is sent again, until ``timeout`` has passed.

    Args:
        config: the section ``openai``.
        slurm: the section ``slurm``: how many requests may begin in which time.

    Raises:
        ConfigError: an address is none, or is there twice.
    """

    def __init__(self, config: ServerConfig, *, slurm: SlurmConfig | None = None) -> None:
        urls = [server_url(url) for url in config.base_url]
        if len(set(urls)) < len(urls):
            raise ConfigError(f"--openai.base_url names a server twice: {', '.join(urls)}", remedy="name each once")
        self._config = config
        self._servers = [_Server(url, _http(url, config.api_key)) for url in urls]
        self._slots = asyncio.Semaphore(config.num_max_requests_at_once)
        self._pace = _Pace(slurm.num_requests_per_time_interval, slurm.time_interval) if slurm else _Pace(None, 0.0)
        self._model = config.model_name

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, without ``/v1``."""
        return tuple(server.url for server in self._servers)

    async def wait_until_ready(self) -> None:
        """Return once every server is healthy.

        Raises:
            DeadlineExceeded: one is not, after ``timeout`` seconds.
        """
        deadline = Deadline(f"waiting for the inference servers {', '.join(self.urls)}", self._config.timeout, _SETTING)
        await asyncio.gather(*(self._wait_for(server, deadline) for server in self._servers))

    async def model_name(self) -> str:
        """What the model is called: the option, or the first model of the first server.

        Raises:
            EngineError: the server does not say.
        """
        if self._model is None:
            self._model = await self._ask_for_model()
        return self._model

    async def model_path(self) -> str:
        """The directory or hub id of the served model, where its tokenizer is."""
        cards = await self._models()
        return str(cards[0].get("root") or cards[0]["id"])

    async def generate(
        self, prompt_ids: Sequence[int], *, params: SamplingParams, n: int = 1, seed: int | None = None
    ) -> list[Completion]:
        """``n`` completions of a prompt, in order.

        Raises:
            EngineError: the server refuses the request, or returns no logprobs.
            DeadlineExceeded: no server could answer within ``timeout`` seconds.
        """
        name = f"generation of {n} completions by {', '.join(self.urls)}"
        deadline = Deadline(name, self._config.timeout, _SETTING)
        pause = _FIRST_PAUSE_S
        async with self._slots:
            while True:
                server = await self._least_busy(deadline)
                await self._pace.wait()
                server.in_flight += n
                try:
                    completions = await self._ask(server, prompt_ids, params=params, n=n, seed=seed, deadline=deadline)
                except ServerBusy as error:
                    self._failed(server, error)
                    deadline.check(error.message)
                    server.down_until = time.monotonic() + pause * (0.5 + random.random())
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                    continue
                finally:
                    server.in_flight -= n
                self._answered(server)
                if all(completion.finish_reason != "abort" for completion in completions):
                    return completions
                deadline.check("the engine keeps aborting requests")
                await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        for server in self._servers:
            await server.http.aclose()

    async def _ask(
        self,
        server: _Server,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams,
        n: int,
        seed: int | None,
        deadline: Deadline,
    ) -> list[Completion]:
        body = request_body(GenerationRequest(tuple(prompt_ids), params, n=n, seed=seed or 0))
        if seed is None:
            del body["seed"]
        if self._config.server_type == "openai":
            del body["prompt_token_ids"]
            body |= {"model": await self.model_name(), "prompt": list(prompt_ids), "logprobs": 1}
            reply = await self._post(server, "/v1/completions", body | {"return_token_ids": True}, deadline)
            return read_completions(reply, n=n, url=server.url)
        # Servers of the original's kind know the prompt under no other name, and give logprobs only when asked.
        body |= {"prompt": {"prompt_token_ids": body.pop("prompt_token_ids")}, "logprobs": 0}
        return read_generate(await self._post(server, "/generate", body, deadline), n=n, url=server.url)

    async def _post(self, server: _Server, route: str, body: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        timeout = httpx.Timeout(deadline.remaining_s(), connect=_CONNECT_S, pool=None)
        try:
            response = await server.http.post(f"{server.url}{route}", json=body, timeout=timeout)
        except httpx.ReadTimeout as error:
            raise DeadlineExceeded(
                f"{deadline.name} took longer than {deadline.limit_s:g} s", remedy=f"raise {_SETTING}"
            ) from error
        except httpx.TransportError as error:
            raise ServerBusy(f"{server.url}: {error or type(error).__name__}") from error
        if response.is_success:
            return _object(response, server.url, route)
        what = f"{server.url}{route} answered {response.status_code}: {_reason(response)}"
        passing = response.status_code in _PASSING
        if passing or (response.status_code >= 500 and server.failures < _FAILURES):
            raise ServerBusy(what)
        raise EngineError(what, remedy="look at the server's log" if response.status_code >= 500 else "")

    async def _least_busy(self, deadline: Deadline) -> _Server:
        """The server with the fewest sequences in flight, of those that are not known to be down."""
        while True:
            now = time.monotonic()
            up = [server for server in self._servers if server.down_until <= now]
            if up:
                return min(up, key=lambda server: server.in_flight)
            deadline.check("no server answers")
            await asyncio.sleep(min(server.down_until for server in self._servers) - now)

    async def _wait_for(self, server: _Server, deadline: Deadline) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                response = await server.http.get(f"{server.url}/health", timeout=_CONNECT_S)
                if response.is_success or response.status_code == 404:
                    return self._answered(server)
                reason = f"{server.url}/health answered {response.status_code}: {_reason(response)}"
            except httpx.TransportError as error:
                reason = f"{server.url}: {error or type(error).__name__}"
            self._failed(server, ServerBusy(reason))
            deadline.check(reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _ask_for_model(self) -> str:
        return str((await self._models())[0]["id"])

    async def _models(self) -> list[dict[str, Any]]:
        server = self._servers[0]
        try:
            response = await server.http.get(f"{server.url}/v1/models", timeout=_CONNECT_S)
            cards = response.raise_for_status().json()["data"]
            return cards if cards[0]["id"] else []
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(
                f"{server.url}/v1/models does not say which model is served: {error}",
                remedy="name it with --openai.model_name, and its tokenizer with --env.tokenizer_name",
            ) from error

    def _failed(self, server: _Server, error: ServerBusy) -> None:
        server.failures += 1
        if server.failures == 1:
            limit = f"{self._config.timeout:g} s ({_SETTING})"
            logger.info("waiting for the inference server at %s, for up to %s: %s", server.url, limit, error.message)

    def _answered(self, server: _Server) -> None:
        if server.failures:
            logger.info("the inference server at %s answers", server.url)
        server.failures = 0


class _Pace:
    """At most ``count`` passes in any ``interval_s`` seconds; without a count, any number."""

    def __init__(self, count: int | None, interval_s: float) -> None:
        self._count = count
        self._interval_s = interval_s
        self._passes: deque[float] = deque()
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Pass, in turn."""
        if self._count is None:
            return
        async with self._lock:
            if len(self._passes) == self._count:
                oldest = self._passes.popleft()
                await asyncio.sleep(max(0.0, oldest + self._interval_s - time.monotonic()))
            self._passes.append(time.monotonic())


def _http(url: str, api_key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    return httpx.AsyncClient(verify=tls(url), trust_env=False, limits=limits, headers=headers)


def _object(response: httpx.Response, url: str, route: str) -> dict[str, Any]:
    try:
        reply = response.json()
    except ValueError as error:
        raise malformed(url, route, error) from error
    if not isinstance(reply, dict):
        raise malformed(url, route, ValueError(f"not a JSON object: {response.text[:80]!r}"))
    return reply


def _reason(response: httpx.Response) -> str:
    """What a server says is wrong, in one line: our servers' message and remedy, or the text of others."""
    try:
        error = json.loads(response.content)["error"]
        return " -> ".join(part for part in (str(error["message"]), str(error.get("remedy") or "")) if part)
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(response.text.split())[:300] or response.reason_phrase
