"""Sampling by vLLM servers, against one that answers as vLLM does and refuses what vLLM refuses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis.common.errors import ConfigError, EngineError
from lachesis.common.http import http_server, listen, url_of
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.http.control import KEEP_ALIVE_S
from lachesis.plugins.tinker.engines import Canary, Engines
from lachesis.plugins.tinker.records import LoraShape, Sampled, SampleRequest
from lachesis.plugins.tinker.sampling import Prepared, Weights

TOKENS = (2, 3, 4, 5, 6, 7, 8, 9)
VOCABULARY = 12


def logprob(token: int, shift: float) -> float:
    """Of a token, by a model whose adapter has the number ``shift``."""
    return -1.0 - 0.1 * token - shift


class Vllm:
    """A vLLM server whose adapters are numbers, in the file ``adapter`` of their directories.

    Args:
        processed: logprobs are those after the temperature.
        lora: adapters may be loaded at run time.
        shift: added to the logprobs of the base model, and of adapters.
        applies: adapters change logprobs.
    """

    def __init__(self, *, processed: bool = True, lora: bool = True, shift: float = 0.0, applies: bool = True) -> None:
        self.processed, self.lora, self.shift, self.applies = processed, lora, shift, applies
        self.adapters: dict[str, float] = {}
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.hangs = False
        self.requests = 0

    def app(self) -> Starlette:
        routes = [Route("/v1/models", self.models), Route("/health", self.health)]
        routes.append(Route("/v1/completions", self.completions, methods=["POST"]))
        if self.lora:
            routes.append(Route("/v1/load_lora_adapter", self.load, methods=["POST"]))
            routes.append(Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]))
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        rows = [{"id": "base", "parent": None, "max_model_len": 64}]
        return JSONResponse({"data": [*rows, *({"id": name, "parent": "base"} for name in self.adapters)]})

    async def health(self, request: Request) -> Response:
        await self.hang()
        return Response()

    async def load(self, request: Request) -> Response:
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return JSONResponse({"error": "has already been loaded"}, status_code=400)
        self.adapters[body["lora_name"]] = float(Path(body["lora_path"], "adapter").read_text())
        self.loads.append(body["lora_name"])
        return Response("Success")

    async def unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return JSONResponse({"error": "cannot be found"}, status_code=404)
        del self.adapters[name]
        self.unloads.append(name)
        return Response("Success")

    async def completions(self, request: Request) -> Response:
        await self.hang()
        body = await request.json()
        self.requests += 1
        if body["model"] not in {"base", *self.adapters}:
            return JSONResponse({"error": {"message": "The model does not exist"}}, status_code=404)
        if not 0 <= body.get("temperature", 1.0) <= 2:
            return JSONResponse({"error": {"message": "temperature must be in [0, 2]"}}, status_code=400)
        if len(body["prompt"]) + body["max_tokens"] > 64:
            return JSONResponse({"error": {"message": "longer than the context"}}, status_code=400)
        shift = self.shift + (self.adapters.get(body["model"], 0.0) if self.applies else 0.0)
        return JSONResponse({"choices": [choice(body, i, shift, self.processed) for i in range(body.get("n", 1))]})

    async def hang(self) -> None:
        while self.hangs:
            await asyncio.sleep(0.01)


def choice(body: dict[str, Any], index: int, shift: float, processed: bool) -> dict[str, Any]:
    tokens = list(range(2, 2 + body["max_tokens"]))
    scale = 1 / body["temperature"] if processed and body.get("temperature") else 1.0
    tops = [{f"token_id:{t}": logprob(t, shift) * scale for t in (0, 1)} for _ in tokens]
    prompt = None
    if "prompt_logprobs" in body:
        count = body["prompt_logprobs"]
        prompt = [None] + [
            {str(t): {"logprob": logprob(t, shift)} for t in {token, *range(count)}} for token in body["prompt"][1:]
        ]
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [logprob(t, shift) for t in tokens], "top_logprobs": tops},
        "finish_reason": "length",
        "prompt_logprobs": prompt,
    }


@contextmanager
def listening(vllm: Vllm) -> Iterator[str]:
    listener = listen("127.0.0.1", 0)
    server = http_server(vllm.app(), shutdown_s=1)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield url_of(listener)
    finally:
        vllm.hangs = False
        server.should_exit = True
        thread.join(10)
        listener.close()


class ClosingProxy:
    """A way to a server on which a request is lost if its connection was idle for longer than ``idle_s``.

    So it is with vLLM where the request meets the end of an idle connection on the way.
    """

    def __init__(self, url: str, *, idle_s: float) -> None:
        self._port, self._idle_s = int(url.rpartition(":")[2]), idle_s

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.ensure_future(self._copy(server_reader, writer))
        last = time.monotonic()
        while data := await reader.read(65536):
            if time.monotonic() - last > self._idle_s:
                break
            server_writer.write(data)
            last = time.monotonic()
        back.cancel()
        server_writer.close()
        writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    @contextmanager
    def listening(self) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self.connected, "127.0.0.1", 0), loop)
        server = started.result(10)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


class Tenant:
    """Where adapters come from: their numbers by key, and how often each was asked for."""

    def __init__(self, directory: Path, *, said: float | None = None) -> None:
        self._directory = directory
        self._said = said
        self.asked: list[str] = []

    def __call__(self, weights: Weights) -> Future[Prepared]:
        self.asked.append(weights.key)
        place = self._directory / str(len(self.asked))
        place.mkdir(parents=True)
        number = float(weights.key) if self._said is None else self._said
        place.joinpath("adapter").write_text(weights.key)
        prepared: Future[Prepared] = Future()
        prepared.set_result(Prepared(place, tuple(logprob(token, number) for token in TOKENS[1:])))
        return prepared


def weights(number: float) -> Weights:
    return Weights(str(number), lambda: (LoraShape(rank=1, seed=0), {}), lambda: False)


def request(**options: int) -> SampleRequest:
    params = SamplingParams(max_tokens=3)
    return SampleRequest(generation=GenerationRequest(prompt_ids=(4, 5, 6), params=params, n=2, seed=1), **options)


def connected(urls: Sequence[str], directory: Path, **options: float) -> Engines:
    base = tuple(logprob(token, 0.0) for token in TOKENS[1:])
    return Engines(urls, canary=Canary(token_ids=TOKENS, base=base, limit=1e-3), directory=directory, **options)


@pytest.fixture
def tenant(tmp_path: Path) -> Tenant:
    return Tenant(tmp_path / "adapters")


@contextmanager
def engine(tmp_path: Path, *vllms: Vllm, **options: float) -> Iterator[Engines]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        urls = [stack.enter_context(listening(vllm)) for vllm in vllms]
        engines = connected(urls, tmp_path / "engines", **options)
        try:
            yield engines
        finally:
            engines.close()


def sampled(engines: Engines, number: float | None, tenant: Callable[[Weights], Future[Prepared]]) -> Sampled:
    chosen = None if number is None else weights(number)
    return engines.submit(chosen, request(), prepare=tenant).result(timeout=20)


def test_an_adapter_is_prepared_loaded_and_proved_once_for_all_that_sample_with_it(tmp_path: Path, tenant: Tenant):
    vllm = Vllm()
    with engine(tmp_path, vllm) as engines:
        found = [engines.submit(weights(0.5), request(), prepare=tenant) for _ in range(10)]
        results = [future.result(timeout=20) for future in found]
        assert (tenant.asked, len(vllm.loads)) == (["0.5"], 1)
        assert engines.servers[0].proofs == 2  # the base model and the adapter
    for result in results:
        assert [completion.token_ids for completion in result.completions] == [(2, 3, 4)] * 2
        assert result.completions[0].logprobs == pytest.approx([logprob(token, 0.5) for token in (2, 3, 4)])


def test_the_base_model_needs_no_adapter(tmp_path: Path, tenant: Tenant):
    with engine(tmp_path, Vllm()) as engines:
        assert sampled(engines, None, tenant).completions[0].logprobs[0] == pytest.approx(logprob(2, 0.0))
    assert tenant.asked == []


def test_logprobs_of_prompts_are_read_with_the_likeliest_tokens(tmp_path: Path, tenant: Tenant):
    with engine(tmp_path, Vllm()) as engines:
        asked = request(prompt_logprobs=2, top_prompt_logprobs=2)
        found = engines.submit(weights(0.5), asked, prepare=tenant).result(timeout=20)
    assert found.prompt_logprobs is not None and found.top_ids is not None and found.top_logprobs is not None
    assert np.isnan(found.prompt_logprobs[0])
    assert found.prompt_logprobs[1:].tolist() == pytest.approx([logprob(5, 0.5), logprob(6, 0.5)])
    assert found.top_ids.tolist() == [[0, 0], [0, 1], [0, 1]]
    assert found.top_logprobs[1].tolist() == pytest.approx([logprob(0, 0.5), logprob(1, 0.5)])


def test_an_engine_that_leaves_the_adapter_out_gives_no_samples(tmp_path: Path, tenant: Tenant):
    with engine(tmp_path, Vllm(applies=False)) as engines:
        with pytest.raises(
            EngineError, match=r"different logprobs with the adapter 0\.5: .* they are the base model's"
        ):
            sampled(engines, 0.5, tenant)
        assert sampled(engines, None, tenant).completions  # others sample on


def test_an_engine_with_other_weights_than_the_trainer_gives_no_samples(tmp_path: Path):
    stale = Tenant(tmp_path / "adapters", said=0.7)
    with engine(tmp_path, Vllm()) as engines, pytest.raises(EngineError, match=r"different logprobs with the adapter"):
        sampled(engines, 0.5, stale)


def test_a_server_of_another_base_model_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(EngineError, match=r"different logprobs with the base model"), engine(tmp_path, Vllm(shift=0.3)):
        pass


def test_a_server_whose_logprobs_are_before_the_temperature_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"processed_logprobs"), engine(tmp_path, Vllm(processed=False)):
        pass


def test_a_server_that_loads_no_adapters_says_how_it_is_started(tmp_path: Path, tenant: Tenant):
    with engine(tmp_path, Vllm(lora=False)) as engines, pytest.raises(EngineError, match=r"--enable-lora"):
        sampled(engines, 0.5, tenant)


def test_nobody_there_is_an_error_at_the_start(tmp_path: Path):
    with pytest.raises(EngineError, match=r"does not answer"):
        connected(["http://127.0.0.1:9"], tmp_path)


def test_a_server_that_was_started_again_gets_its_adapters_anew(tmp_path: Path, tenant: Tenant):
    vllm = Vllm()
    with engine(tmp_path, vllm) as engines:
        sampled(engines, 0.5, tenant)
        vllm.adapters.clear()
        assert sampled(engines, 0.5, tenant).completions[0].logprobs[0] == pytest.approx(logprob(2, 0.5))
        assert (len(vllm.loads), engines.servers[0].proofs) == (2, 3)


def test_files_of_adapters_that_nobody_uses_any_more_are_deleted(tmp_path: Path, tenant: Tenant):
    vllm = Vllm()
    with engine(tmp_path, vllm) as engines:
        for number in range(1, 35):
            sampled(engines, number / 100, tenant)
        assert len(vllm.adapters) == 32
        assert sorted(int(place.name) for place in (tmp_path / "adapters").iterdir()) == [*range(3, 35)]


def test_a_full_server_loads_an_adapter_once_for_all_that_come_at_once(tmp_path: Path, tenant: Tenant):
    vllm = Vllm()
    with engine(tmp_path, vllm) as engines:
        for number in range(1, 33):
            sampled(engines, number / 100, tenant)
        found = [engines.submit(weights(0.5), request(), prepare=tenant) for _ in range(5)]
        assert all(future.result(timeout=20).completions for future in found)
        assert (len(vllm.loads), len(vllm.adapters)) == (33, 32)


def test_an_adapter_that_a_server_still_has_is_replaced(tmp_path: Path, tenant: Tenant):
    vllm = Vllm()
    with engine(tmp_path, vllm) as engines:
        sampled(engines, 0.5, tenant)
        engines.servers[0].loaded.clear()  # as when it was given up
        assert sampled(engines, 0.5, tenant).completions


def test_requests_of_a_server_that_hangs_go_to_another(tmp_path: Path, tenant: Tenant):
    first, second = Vllm(), Vllm()
    with engine(tmp_path, first, second, look_s=0.05, answer_s=0.2) as engines:
        first.hangs = True
        found = [engines.submit(weights(0.5), request(), prepare=tenant) for _ in range(6)]
        assert all(future.result(timeout=20).completions for future in found)
        assert engines.servers[0].is_down(time.monotonic())


def test_a_request_after_a_pause_takes_no_connection_that_the_server_may_be_closing(tmp_path: Path, tenant: Tenant):
    vllm = Vllm()
    with listening(vllm) as behind, ClosingProxy(behind, idle_s=KEEP_ALIVE_S + 0.1).listening() as url:
        engines = connected([url], tmp_path / "engines")
        try:
            asked = [engines.submit(weights(0.5), request(), prepare=tenant) for _ in range(6)]  # connections to keep
            assert all(future.result(timeout=20).completions for future in asked)
            time.sleep(KEEP_ALIVE_S + 0.3)
            assert sampled(engines, 0.7, tenant).completions
            assert not engines.servers[0].down_reason
        finally:
            engines.close()


def test_where_no_server_answers_the_request_fails_and_says_why(tmp_path: Path, tenant: Tenant):
    vllm = Vllm()
    with engine(tmp_path, vllm, look_s=0.05, answer_s=0.2) as engines:
        vllm.hangs = True
        with pytest.raises(EngineError, match=r"no engine answers \(http://127"):
            sampled(engines, 0.5, tenant)


def test_a_request_that_the_engine_refuses_is_the_clients_fault(tmp_path: Path, tenant: Tenant):
    long = SampleRequest(generation=GenerationRequest(prompt_ids=(2,) * 70, params=SamplingParams(max_tokens=1)))
    with engine(tmp_path, Vllm()) as engines:
        with pytest.raises(Exception, match=r"longer than the context") as caught:
            engines.submit(None, long, prepare=tenant).result(timeout=20)
        assert type(caught.value).__name__ == "DataError"
