"""Client of inference servers: it asks the least busy one, waits for one that restarts, and reads the answers."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from lachesis.common.deadline import Deadline, Retry
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError, LachesisError
from lachesis.common.http import server_url
from lachesis.common.types import (
    UNKNOWN_VERSIONS,
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    VersionSpan,
)
from lachesis.engines.http.control import malformed, read_reply, tls
from lachesis.engines.http.dispatch import request_body
from lachesis.plugins.atropos.environments.settings import ServerConfig, SlurmConfig

logger = logging.getLogger("lachesis.plugins.atropos.environments")

_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# Statuses of a restarting server, which will pass; any other error would come again.
_PASSING = frozenset({408, 425, 429, 502, 503, 504})
_FAILURES = 4
_SETTING = "--openai.timeout"
# A rounding error of a log-softmax; anything above is not a logprob.
_ROUNDING = 1e-4
_FINISH_REASONS: dict[Any, FinishReason] = {
    "stop": "stop", "length": "length", "abort": "abort", "tool_calls": "stop", "eos": "stop",
}  # fmt: skip
_NO_LOGPROBS = (
    "serve the model with `lachesis serve`, or with a server that returns the logprobs of sampled tokens; "
    "rollouts without them cannot be trained on"
)


class ServerBusy(EngineError):
    """Error of a server that cannot answer now, and may be asked again."""


@dataclass(slots=True)
class _Server:
    """Server with a pause until ``down_until`` on the monotonic clock, after ``failures`` in a row."""

    url: str
    http: httpx.AsyncClient
    in_flight: int = 0
    down_until: float = 0.0
    failures: int = 0


class InferenceClient:
    """Client that samples completions, with the logprob of each token under the distribution it was sampled from.

    Requests go to the server with the fewest sequences in flight among those that answer. A request that a server
    loses (it restarts, or its engine aborts) is sent again, until ``timeout`` has passed.

    Args:
        config: the section ``openai``.
        slurm: the section ``slurm``: how many requests may begin in which time.

    Raises:
        ConfigError: an address is malformed or given twice.
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
        """Addresses of the servers, without ``/v1``."""
        return tuple(server.url for server in self._servers)

    async def wait_until_ready(self) -> None:
        """Return once every server is healthy.

        Raises:
            DeadlineExceeded: one is not, after ``timeout`` seconds.
        """
        deadline = Deadline(f"waiting for the inference servers {', '.join(self.urls)}", self._config.timeout, _SETTING)
        await asyncio.gather(*(self._wait_for(server, deadline) for server in self._servers))

    async def model_name(self) -> str:
        """Return the model's name: the option, or the first model of the first server.

        Raises:
            EngineError: the server does not name it.
        """
        if self._model is None:
            self._model = str((await self._models())[0]["id"])
        return self._model

    async def model_path(self) -> str:
        """Return the directory or hub id of the served model, where its tokenizer is."""
        cards = await self._models()
        return str(cards[0].get("root") or cards[0]["id"])

    async def generate(
        self, prompt_ids: Sequence[int], *, params: SamplingParams, n: int = 1, seed: int | None = None
    ) -> list[Completion]:
        """Sample ``n`` completions of a prompt, in order.

        Raises:
            EngineError: the server refuses the request, or returns no logprobs.
            DeadlineExceeded: no server could answer within ``timeout`` seconds.
        """
        body = request_body(GenerationRequest(tuple(prompt_ids), params, n=n, seed=seed or 0))
        if seed is None:
            del body["seed"]
        name = f"generation of {n} completions by {', '.join(self.urls)}"
        deadline = Deadline(name, self._config.timeout, _SETTING)
        retry = Retry(deadline, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        async with self._slots:
            while True:
                server = await self._least_busy(deadline)
                await self._pace.wait()
                server.in_flight += n
                try:
                    completions = await self._ask(server, body, deadline)
                except ServerBusy as error:
                    self._failed(server, error.message)
                    server.down_until = time.monotonic() + retry.after(error.message) * (0.5 + random.random())
                    continue
                finally:
                    server.in_flight -= n
                self._answered(server)
                if all(completion.finish_reason != "abort" for completion in completions):
                    return completions
                await asyncio.sleep(retry.after("the engine keeps aborting requests"))

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        for server in self._servers:
            await server.http.aclose()

    async def _ask(self, server: _Server, body: dict[str, Any], deadline: Deadline) -> list[Completion]:
        """Send the body of our own ``/generate`` to the route that the server has, and return the completions."""
        rest, prompt_ids = {**body}, body["prompt_token_ids"]
        del rest["prompt_token_ids"]
        if self._config.server_type == "openai":
            asked = {"model": await self.model_name(), "prompt": prompt_ids, "logprobs": 1, "return_token_ids": True}
            reply = await self._post(server, "/v1/completions", rest | asked, deadline)
            return read_completions(reply, n=body["n"], url=server.url)
        # Servers like the original's read the prompt only under this name, and return logprobs only on request.
        asked = {"prompt": {"prompt_token_ids": prompt_ids}, "logprobs": 0}
        return read_generate(await self._post(server, "/generate", rest | asked, deadline), n=body["n"], url=server.url)

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
        try:
            return read_reply(response, url=server.url, route=route)
        except LachesisError as error:
            status = response.status_code
            if status in _PASSING or (status >= 500 and server.failures < _FAILURES):
                raise ServerBusy(str(error)) from error
            raise

    async def _least_busy(self, deadline: Deadline) -> _Server:
        """Return the server with the fewest sequences in flight that is not known to be down."""
        while True:
            now = time.monotonic()
            up = [server for server in self._servers if server.down_until <= now]
            if up:
                return min(up, key=lambda server: server.in_flight)
            deadline.check("no server answers")
            await asyncio.sleep(min(server.down_until for server in self._servers) - now)

    async def _wait_for(self, server: _Server, deadline: Deadline) -> None:
        retry = Retry(deadline, first_s=_FIRST_PAUSE_S)
        while reason := await _why_not_ready(server):
            self._failed(server, reason)
            await asyncio.sleep(retry.after(reason))
        self._answered(server)

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

    def _failed(self, server: _Server, reason: str) -> None:
        server.failures += 1
        if server.failures == 1:
            limit = f"{self._config.timeout:g} s ({_SETTING})"
            logger.info("waiting for the inference server at %s, for up to %s: %s", server.url, limit, reason)

    def _answered(self, server: _Server) -> None:
        if server.failures:
            logger.info("the inference server at %s answers", server.url)
        server.failures = 0


class _Pace:
    """Limit of ``count`` passes in any ``interval_s`` seconds; without a count, any number."""

    def __init__(self, count: int | None, interval_s: float) -> None:
        self._count = count
        self._interval_s = interval_s
        self._passes: deque[float] = deque()
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for a turn to pass."""
        if self._count is None:
            return
        async with self._lock:
            if len(self._passes) == self._count:
                oldest = self._passes.popleft()
                await asyncio.sleep(max(0.0, oldest + self._interval_s - time.monotonic()))
            self._passes.append(time.monotonic())


async def _why_not_ready(server: _Server) -> str:
    """Return why a server is not ready; empty if it is, or if it has no such route."""
    try:
        response = await server.http.get(f"{server.url}/health", timeout=_CONNECT_S)
    except httpx.TransportError as error:
        return f"{server.url}: {error or type(error).__name__}"
    ready = response.is_success or response.status_code == 404
    return "" if ready else f"{server.url}/health answered {response.status_code}: {response.text[:300]}"


def _http(url: str, api_key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    return httpx.AsyncClient(verify=tls(url), trust_env=False, limits=limits, headers=headers)


def read_generate(reply: Mapping[str, Any], *, n: int, url: str) -> list[Completion]:
    """Read the completions in an answer of ``/generate``: ours with its compact lists, or the documented form alone.

    The documented form has ``logprobs[completion][position] == [{token id: logprob}]``, the sampled token first.

    Raises:
        EngineError: there are no logprobs, or the answer is incomplete.
    """
    try:
        reasons = reply["finish_reasons"]
        if reply.get("token_logprobs") is not None and reply.get("token_ids") is not None:
            ids, logprobs = reply["token_ids"], reply["token_logprobs"]
        elif reply.get("logprobs"):
            pairs = [[next(iter(position[0].items())) for position in row] for row in reply["logprobs"]]
            ids = [[int(token) for token, _ in row] for row in pairs]
            logprobs = [[value for _, value in row] for row in pairs]
        else:
            raise _without(url)
        versions = reply.get("weight_version") or [None] * n
        return _completions(ids, logprobs, reasons, versions, n=n, url=url)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise malformed(url, "/generate", error) from error


def read_completions(reply: Mapping[str, Any], *, n: int, url: str) -> list[Completion]:
    """Read the completions in an answer of ``/v1/completions`` that was asked for token ids and logprobs.

    Raises:
        EngineError: there are no logprobs or no token ids, or the answer is incomplete.
    """
    try:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        logprobs: list[Any] = [(choice.get("logprobs") or {}).get("token_logprobs") for choice in choices]
        if any(row is None for row in logprobs):
            raise _without(url)
        ids: list[Any] = [choice.get("token_ids") for choice in choices]
        if any(row is None for row in ids):
            raise EngineError(
                f"{url}/v1/completions returned no token ids",
                remedy="use a server that supports return_token_ids, or --openai.server_type vllm",
            )
        reasons = [choice["finish_reason"] for choice in choices]
        return _completions(ids, logprobs, reasons, [None] * n, n=n, url=url)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise malformed(url, "/v1/completions", error) from error


def _completions(
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    reasons: Sequence[Any],
    versions: Sequence[Mapping[str, int] | None],
    *,
    n: int,
    url: str,
) -> list[Completion]:
    if not len(ids) == len(logprobs) == len(reasons) == len(versions) == n:
        raise ValueError(f"{len(ids)} completions with {len(logprobs)} lists of logprobs, instead of {n}")
    return [_sampled(*row, url=url) for row in zip(ids, logprobs, reasons, versions, strict=True)]


def _sampled(
    ids: Sequence[int], logprobs: Sequence[float], reason: Any, versions: Mapping[str, int] | None, *, url: str
) -> Completion:
    if len(ids) != len(logprobs) or any(value is None for value in logprobs):
        raise _without(url, f"for {len(ids)} tokens there are {sum(v is not None for v in logprobs)}")
    for position, value in enumerate(logprobs):
        if not -math.inf < value <= _ROUNDING:
            raise _without(url, f"the one at position {position} is {value}, which is not a logprob")
    # ``_FINISH_REASONS[reason]`` raises KeyError for a word that the contract of servers does not have.
    return Completion(
        token_ids=tuple(int(token) for token in ids),
        logprobs=tuple(min(0.0, float(value)) for value in logprobs),
        finish_reason=_FINISH_REASONS[reason],
        versions=UNKNOWN_VERSIONS if versions is None else VersionSpan(int(versions["first"]), int(versions["last"])),
    )


def _without(url: str, detail: str = "") -> EngineError:
    what = f": {detail}" if detail else ""
    return EngineError(f"the inference server at {url} returned no usable logprobs{what}", remedy=_NO_LOGPROBS)
