"""Sampling by vLLM servers: many adapters of one base model at once, each proved before its samples count.

A server is vLLM's own, started with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. It reads adapters
from files, so it has to see the directory of checkpoints under the same path.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lachesis.bridges.canary import Allowance, NoiseScale, disagreement
from lachesis.common.errors import ConfigError, DataError, EngineError, EngineUnreachable
from lachesis.common.http import server_url
from lachesis.common.json_values import is_list, is_object
from lachesis.engines.http.control import KEEP_ALIVE_S
from lachesis.plugins.tinker.completions import completion_body, read_prompt, read_sampled
from lachesis.plugins.tinker.records import Sampled, SampleRequest
from lachesis.plugins.tinker.sampling import Prepared, Weights
from lachesis.process.threads import LoopThread

logger = logging.getLogger("lachesis")

# Adapters that a server has loaded; those used last stay.
_LOADED = 32
# Seconds without requests for a server that did not answer, between two health checks, and to answer one.
_DOWN_S, _LOOK_S, _ANSWER_S = 5.0, 2.0, 10.0
# A request fails once this many servers have lost it.
_MOST_LOST = 4
# A server that has the adapter is preferred unless it has more than this many requests more than another.
_PREFER_LOADED = 4
_SHOWN = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Text whose logprobs prove that a server has the right weights.

    Args:
        token_ids: [T], which the base model finds likely.
        base: the trainer's logprobs [T - 1] of them without an adapter.
        limit: the largest mean difference that rounding explains, in nats of logit noise (`bridges.canary`).
    """

    token_ids: tuple[int, ...]
    base: tuple[float, ...]
    limit: float


@dataclass(slots=True, eq=False)
class Server:
    """State of a vLLM server: its adapters, its work in progress, and its health."""

    url: str
    base: str = ""
    max_context: int = 0
    in_flight: int = 0
    sampled_tokens: int = 0
    proofs: int = 0
    worst: float = 0.0
    down_until: float = 0.0
    down_reason: str = ""
    loaded: OrderedDict[str, asyncio.Task[None]] = field(default_factory=OrderedDict)
    using: dict[str, int] = field(default_factory=dict)
    requests: set[asyncio.Task[Any]] = field(default_factory=set)

    def is_down(self, now: float) -> bool:
        """Return True if the server gets no requests for now."""
        return now < self.down_until


class _UnknownAdapter(EngineError):
    """Error for an adapter that the server no longer has, because it was restarted."""


class Engines:
    """Sampling by one or several vLLM servers of the same base model.

    Args:
        urls: addresses of the servers.
        canary: the text that proves their weights.
        directory: for the adapters' files; the servers see it under the same path.
        look_s: seconds between two health checks of servers with requests; ``answer_s``: seconds to answer one.

    Raises:
        ConfigError: an address is wrong, or a server cannot be used as it was started.
        EngineError: a server does not answer, or does not compute what the trainer's base model does.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        canary: Canary,
        directory: Path,
        look_s: float = _LOOK_S,
        answer_s: float = _ANSWER_S,
    ) -> None:
        self.servers = tuple(Server(url) for url in dict.fromkeys(map(server_url, urls)))
        self.directory = directory
        self.canary = canary
        self._look_s, self._answer_s = look_s, answer_s
        self._scale = NoiseScale(limit=canary.limit, floor=canary.limit / 100)
        # Each process names adapters anew: those of one that died may still be loaded.
        self._prefix = f"lachesis-{uuid.uuid4().hex[:8]}"
        self._prepared: dict[str, asyncio.Future[Prepared]] = {}
        self._http: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._loop = LoopThread("lachesis-tinker-engines", what="the Tinker server's engines")
        try:
            self._loop.run(self._connect())
        except BaseException:
            self.close()
            raise

    @property
    def max_context(self) -> int:
        """Longest sequence that every server takes."""
        return min(server.max_context for server in self.servers)

    def submit(
        self, weights: Weights | None, request: SampleRequest, *, prepare: Callable[[Weights], Future[Prepared]]
    ) -> Future[Sampled]:
        """Begin to sample.

        Args:
            prepare: writes an adapter's files and reads the canary with it; called once for each adapter and server.
        """
        return self._loop.submit(self._sample(weights, request, prepare))

    def close(self) -> None:
        """End all requests and close the connections."""
        self._loop.close(self._closed)

    async def _closed(self) -> None:
        for task in [*filter(None, [self._watch]), *(task for one in self.servers for task in one.requests)]:
            task.cancel()
        if self._http is not None:
            await self._http.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- the start --------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        self._http = aiohttp.ClientSession(
            # vLLM closes connections idle for 5 s; a request on one that it is closing would seem a dead engine.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._answer_s),
        )
        for server in self.servers:
            await self._meet(server)
        self._watch = asyncio.create_task(self._look())

    async def _meet(self, server: Server) -> None:
        """Learn which model a server serves, and prove its base weights."""
        models = (await self._call(server, "GET", "/v1/models")).get("data")
        rows = [row for row in models if is_object(row) and not row.get("parent")] if is_list(models) else []
        if not rows:
            raise ConfigError(f"{server.url}/v1/models names no base model", remedy="give the address of a vLLM server")
        server.base, server.max_context = str(rows[0]["id"]), int(rows[0].get("max_model_len") or 0)
        if not server.max_context:
            raise ConfigError(f"{server.url} does not report its max_model_len", remedy="use a vLLM server")
        await self._check_logprobs(server)
        await self._prove(server, server.base, self.canary.base, what="the base model")

    async def _check_logprobs(self, server: Server) -> None:
        """Raise ConfigError unless logprobs are those of the distribution that is sampled from."""
        odds: list[float] = []
        for temperature in (0.5, 1.0):
            body = completion_body(server.base, prompt_ids=self.canary.token_ids, max_tokens=1)
            reply = await self._call(
                server,
                "POST",
                "/v1/completions",
                body | {"temperature": temperature, "logprobs": 2, "return_tokens_as_token_ids": True},
            )
            top = sorted(reply["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
            odds.append(top[0] - top[1])
        if abs(odds[1] - odds[0] / 2) > 0.05 * odds[0] + 1e-3:
            raise ConfigError(
                f"the logprobs of {server.url} ignore the temperature, which those for clients have to include",
                remedy="start vLLM with --logprobs-mode processed_logprobs",
            )

    # --- sampling ---------------------------------------------------------------------------------------------

    async def _sample(
        self, weights: Weights | None, request: SampleRequest, prepare: Callable[[Weights], Future[Prepared]]
    ) -> Sampled:
        for last in [False] * _MOST_LOST + [True]:
            server = self._pick(weights)
            task = asyncio.ensure_future(self._sample_at(server, weights, request, prepare))
            server.requests.add(task)
            server.in_flight += 1
            try:
                return await task
            except _UnknownAdapter:
                self._forget(server)
                if last:
                    raise
            except EngineUnreachable as error:
                self._mark_down(server, str(error))
                if last:
                    raise
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if not server.is_down(time.monotonic()) or (current is not None and current.cancelling()):
                    task.cancel()
                    raise
            finally:
                server.in_flight -= 1
                server.requests.discard(task)
        raise EngineError("every engine that had the request stopped answering", remedy="see the engines' logs")

    def _pick(self, weights: Weights | None) -> Server:
        now = time.monotonic()
        up = [server for server in self.servers if not server.is_down(now)]
        if not up:
            said = "; ".join(f"{server.url}: {server.down_reason}" for server in self.servers)
            raise EngineError(f"no engine answers ({said})", remedy="restart an engine, and send the request again")

        def cost(server: Server) -> int:
            return server.in_flight - _PREFER_LOADED * (weights is not None and weights.key in server.loaded)

        return min(up, key=cost)

    async def _sample_at(
        self,
        server: Server,
        weights: Weights | None,
        request: SampleRequest,
        prepare: Callable[[Weights], Future[Prepared]],
    ) -> Sampled:
        if weights is None:
            return await self._complete(server, server.base, request)
        key = weights.key
        server.using[key] = server.using.get(key, 0) + 1
        try:
            await self._load(server, weights, prepare)
            return await self._complete(server, self._name(key), request)
        finally:
            server.using[key] -= 1
            if not server.using[key]:
                del server.using[key]

    async def _complete(self, server: Server, model: str, request: SampleRequest) -> Sampled:
        asked = request.generation
        body = completion_body(model, prompt_ids=asked.prompt_ids, max_tokens=asked.params.max_tokens, request=request)
        sampled = read_sampled(
            await self._call(server, "POST", "/v1/completions", body), request=request, url=server.url
        )
        server.sampled_tokens += sum(len(found.token_ids) for found in sampled.completions)
        return sampled

    # --- adapters ---------------------------------------------------------------------------------------------

    async def _load(self, server: Server, weights: Weights, prepare: Callable[[Weights], Future[Prepared]]) -> None:
        """Load and prove an adapter on a server, once for all requests that wait for it."""
        task = server.loaded.get(weights.key)
        if task is None:
            task = server.loaded[weights.key] = asyncio.ensure_future(self._loaded(server, weights, prepare))
        server.loaded.move_to_end(weights.key)
        try:
            await asyncio.shield(task)
        except BaseException:
            if task.done() and server.loaded.get(weights.key) is task:
                del server.loaded[weights.key]
            raise

    async def _loaded(self, server: Server, weights: Weights, prepare: Callable[[Weights], Future[Prepared]]) -> None:
        key = weights.key
        if key not in self._prepared:
            self._prepared[key] = asyncio.ensure_future(asyncio.wrap_future(prepare(weights)))
        try:
            prepared = await asyncio.shield(self._prepared[key])
            await self._make_room(server)
            body = {"lora_name": self._name(key), "lora_path": str(prepared.directory)}
            with suppress(EngineError):  # a server that was given up and came back
                await self._call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": self._name(key)})
            await self._call(server, "POST", "/v1/load_lora_adapter", body)
            await self._prove(server, self._name(key), prepared.logprobs, what=f"the adapter {key}")
        except BaseException:
            self._drop_files(key, but_for=server)
            raise

    async def _prove(self, server: Server, model: str, expected: Sequence[float], *, what: str) -> None:
        """Raise EngineError unless a server computes the canary as the trainer does with the same weights."""
        body = completion_body(model, prompt_ids=self.canary.token_ids, max_tokens=1)
        reply = await self._call(server, "POST", "/v1/completions", body | {"prompt_logprobs": 0})
        found = read_prompt(reply, token_ids=self.canary.token_ids, top=0, url=server.url).logprobs[1:].tolist()
        allowance = self._scale.allowance
        difference = disagreement(expected, found)
        if not difference.is_finite or allowance.ratio(difference) > 1:
            raise EngineError(
                f"{server.url} and the trainer compute different logprobs with {what}: those of the canary differ by "
                f"{difference.largest:.3g} nats at most, or {difference.mean:.3g} as mean logit noise "
                f"({allowance.mean:.3g} allowed){self._unused(found, allowance)}",
                remedy="start the engine with this server's model and dtype, and a large enough --max-lora-rank",
            )
        self._scale.accept(difference)
        server.proofs += 1
        server.worst = max(server.worst, difference.mean)

    def _unused(self, found: Sequence[float], allowance: Allowance) -> str:
        same = disagreement(self.canary.base, found)
        return "; they are the base model's" if same.is_finite and allowance.ratio(same) <= 1 else ""

    async def _make_room(self, server: Server) -> None:
        idle = [key for key, task in server.loaded.items() if key not in server.using and task.done()]
        for key in idle[: max(0, len(server.loaded) - _LOADED)]:
            del server.loaded[key]
            await self._call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": self._name(key)})
            self._drop_files(key)

    def _drop_files(self, key: str, *, but_for: Server | None = None) -> None:
        """Delete an adapter's files once no server needs them: vLLM reads them again when its own cache is full."""
        if any(key in server.loaded for server in self.servers if server is not but_for):
            return
        prepared = self._prepared.pop(key, None)
        if prepared is not None and prepared.done() and not prepared.cancelled() and prepared.exception() is None:
            shutil.rmtree(prepared.result().directory, ignore_errors=True)

    def _name(self, key: str) -> str:
        """Return an adapter's name at the servers."""
        return f"{self._prefix}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def _forget(self, server: Server) -> None:
        """Forget a restarted server's adapters."""
        logger.warning("the engine at %s was restarted: its adapters are loaded and proved again", server.url)
        server.loaded.clear()

    # --- servers that come and go -----------------------------------------------------------------------------

    def _mark_down(self, server: Server, reason: str) -> None:
        logger.warning("%s; its requests go to another engine", reason)
        server.down_until, server.down_reason = time.monotonic() + _DOWN_S, reason
        server.loaded.clear()
        for task in server.requests:
            task.cancel()

    async def _look(self) -> None:
        """Check repeatedly that servers with requests are alive: one that hangs does not answer."""
        while True:
            await asyncio.sleep(self._look_s)
            for server in self.servers:
                if server.in_flight and not server.is_down(time.monotonic()):
                    try:
                        await asyncio.wait_for(self._call(server, "GET", "/health"), self._answer_s)
                    except (TimeoutError, EngineError) as error:
                        self._mark_down(server, f"{server.url} does not answer: {error or 'no answer in time'}")

    async def _call(self, server: Server, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        assert self._http is not None
        try:
            async with self._http.request(method, server.url + route, json=body) as response:
                if response.ok:
                    return await response.json() if "json" in response.content_type else {}
                said = (await response.text())[:_SHOWN]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnreachable(f"{server.url}{route} does not answer: {error}") from error
        if response.status == 404 and "does not exist" in said:
            raise _UnknownAdapter(f"{server.url}: {said}")
        if response.status in (400, 413, 422) and route == "/v1/completions":
            raise DataError(f"the engine refuses the request: {said}", remedy="correct the request")
        remedy = "see the engine's log"
        if response.status == 404 and "lora" in route:
            remedy = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        raise EngineError(f"{server.url}{route} answered {response.status}: {said}", remedy=remedy)
