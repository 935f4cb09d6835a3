"""An inference server that answers as it is told to, and the real rollout API, each in a thread of this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis.plugins.atropos.api.server import ServerOptions, build_app
from tests.threads import Thread
from tests.unit.plugins.atropos.api.processes import REGISTRATION
from tests.waiting import LONG_S

Body = dict[str, Any]
# Token ids of the completions of a prompt.
Answer = Callable[[list[int], int, Body], Sequence[Sequence[int]]]


class _Lines(logging.Handler):
    """Those of the thread in which it was made."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.lines.append(record.getMessage())


@contextmanager
def logged_lines() -> Iterator[list[str]]:
    """What environments of this thread say within."""
    logger, handler = logging.getLogger("lachesis.plugins.atropos.environments"), _Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


@dataclass
class FakeInference:
    """``answer`` gives the completions, ``reply`` (if set) the whole answer of a route instead.

    ``failing`` holds statuses that the next requests are answered with, one each.
    """

    answer: Answer = lambda prompt, n, body: [[5, 2]] * n
    reply: Callable[[str, Body], Response | None] = lambda route, body: None
    version: int = 0
    failing: list[int] = field(default_factory=list)
    requests: list[tuple[str, Body]] = field(default_factory=list)
    headers: list[str | None] = field(default_factory=list)

    @property
    def bodies(self) -> list[Body]:
        return [body for _, body in self.requests]

    def app(self) -> Starlette:
        async def health(request: Request) -> Response:
            return JSONResponse({})

        async def models(request: Request) -> Response:
            return JSONResponse({"data": [{"id": "served", "root": "/a/model"}]})

        async def generate(request: Request) -> Response:
            body = await request.json()
            self.requests.append((request.url.path, body))
            self.headers.append(request.headers.get("authorization"))
            if self.failing:
                return JSONResponse(
                    {"error": {"message": "not now", "remedy": "wait"}}, status_code=self.failing.pop(0)
                )
            told = self.reply(request.url.path, body)
            if told is not None:
                return told
            completion = request.url.path == "/v1/completions"
            prompt = body["prompt"] if completion else body["prompt"]["prompt_token_ids"]
            rows = [list(row) for row in self.answer(prompt, body["n"], body)]
            return JSONResponse(self._openai(rows) if completion else self.document(rows, body))

        return Starlette(
            routes=[
                Route("/health", health),
                Route("/v1/models", models),
                Route("/generate", generate, methods=["POST"]),
                Route("/v1/completions", generate, methods=["POST"]),
            ]
        )

    def document(self, rows: list[list[int]], body: Body) -> Body:
        """As ``lachesis serve`` answers /generate."""
        return {
            "token_ids": rows,
            "token_logprobs": [[-0.5] * len(row) for row in rows],
            "logprobs": [[[{str(token): -0.5}] for token in row] for row in rows],
            "finish_reasons": ["length" if len(row) == body["max_tokens"] else "stop" for row in rows],
            "weight_version": [{"first": self.version, "last": self.version}] * len(rows),
        }

    def _openai(self, rows: list[list[int]]) -> Body:
        choices = [
            {
                "index": index,
                "token_ids": row,
                "finish_reason": "stop",
                "logprobs": {"token_logprobs": [-0.5] * len(row)},
            }
            for index, row in enumerate(rows)
        ]
        return {"choices": choices[::-1]}


_idle: list[tuple[FakeInference, Thread]] = []


@contextmanager
def inference(**settings: Any) -> Iterator[tuple[FakeInference, str]]:
    """The fake server and its address. Servers are used again: to start and stop one takes longer than most tests."""
    fake, thread = _idle.pop() if _idle else _new()
    fresh = FakeInference(**settings)
    for one in fields(FakeInference):
        setattr(fake, one.name, getattr(fresh, one.name))
    try:
        yield fake, thread.url
    finally:
        _idle.append((fake, thread))


def _new() -> tuple[FakeInference, Thread]:
    fake = FakeInference()
    return fake, Thread(fake.app())


def client(url: str) -> httpx.Client:
    """Certificates, whose loading takes longer than most requests, are not needed here."""
    return httpx.Client(base_url=url, timeout=LONG_S, trust_env=False, verify=False)


class Api:
    """The real rollout API and a trainer's view of it."""

    def __init__(self, *, port: int = 0, **options: Any) -> None:
        self._options = ServerOptions(**{"strict": True, **options})
        self._thread = Thread(build_app(self._options), port=port, lifespan=True)
        self.url, self.port = self._thread.url, self._thread.port
        self.http = client(self.url)

    def start(self, **changes: Any) -> None:
        """A trainer that registers and asks for its first batch."""
        self.http.post("/register", json=REGISTRATION | changes).raise_for_status()
        assert self.batch() is None

    def batch(self) -> list[Body] | None:
        return self.http.get("/batch").raise_for_status().json()["batch"]

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def stop(self) -> None:
        self.http.close()
        self._thread.stop()


@contextmanager
def rollout_api(**options: Any) -> Iterator[Api]:
    """The rollout API, strict."""
    api = Api(**options)
    try:
        yield api
    finally:
        api.stop()
