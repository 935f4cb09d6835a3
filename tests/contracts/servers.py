"""Inference servers as processes of their own, for the contract of the server. A server joins by a factory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedModel

from lachesis.engines.options import ServeOptions
from tests import warm
from tests.paths import SOURCE
from tests.ports import free_port
from tests.tiny import tiny_model, tiny_tokenizer

TOKEN = "the-token-of-the-tests"
MAX_LEN = 128
MAX_RANK = 8
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
EMBEDDED = """
import sys
from lachesis.plugins.embedded_server.app import serve_embedded
from lachesis.engines.options import ServeOptions
serve_embedded(ServeOptions.model_validate_json(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: clients with and without the token, and what it was started on.

    ``root`` is its adapter root, ``model`` the directory of the model inside of it, ``outside`` another place.
    """

    http: httpx.Client
    stranger: httpx.Client
    root: Path
    model: Path
    outside: Path
    log: Path

    def post(self, route: str, /, **body: Any) -> dict[str, Any]:
        """The answer of a POST with the token; any error fails the test with its text."""
        return answered(self.http.post(route, json=body))

    def get(self, route: str) -> dict[str, Any]:
        return answered(self.http.get(route))


@dataclass(frozen=True, slots=True)
class ServerFactory:
    """How to start a server, and what it can do.

    ``start(model, root, session_dir, log)`` yields its address; LoRA up to MAX_RANK, contexts of MAX_LEN, the
    token TOKEN. ``tolerance`` is how far a logprob may be off transformers', in nats; ``exports`` says that the
    parameters can be shared with another process.
    """

    name: str
    start: Callable[[Path, Path, Path, Path], AbstractContextManager[str]]
    build_model: Callable[[int], PreTrainedModel]
    tolerance: float
    exports: bool


def answered(reply: httpx.Response) -> dict[str, Any]:
    assert reply.is_success, f"{reply.request.url.path} answered {reply.status_code}: {reply.text[:500]}"
    return reply.json()


@contextmanager
def running(factory: ServerFactory, directory: Path) -> Iterator[Server]:
    """A server of the factory on a tiny model, below ``directory``."""
    root, outside = directory / "root", directory / "outside"
    root.mkdir()
    outside.mkdir()
    factory.build_model(0).save_pretrained(root / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(root / "model")
    log = directory / "server.log"
    with factory.start(root / "model", root, directory / "sessions", log) as url:
        limits = httpx.Limits(max_connections=None)
        with (
            httpx.Client(
                base_url=url, timeout=60, headers={"Authorization": f"Bearer {TOKEN}"}, limits=limits, trust_env=False
            ) as http,
            httpx.Client(base_url=url, timeout=60, trust_env=False) as stranger,
        ):
            yield Server(http, stranger, root, root / "model", outside, log)


def python_path(*before: Path) -> str:
    """For a process of its own: this package from its sources, then ``before``, then where this process looks."""
    return os.pathsep.join([str(SOURCE), *map(str, before), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def process(
    command: list[str],
    *,
    url: str,
    log: Path,
    start_s: float,
    popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
    **environment: str,
) -> Iterator[str]:
    """The command as a process until the block ends; yields once ``/health`` answers."""
    with log.open("wb") as output:
        started = popen(
            command, env={**os.environ, "PYTHONPATH": python_path(), **environment}, stdout=output, stderr=output
        )
        try:
            _wait(started, url=url, log=log, start_s=start_s)
            yield url
        finally:
            started.terminate()
            try:
                started.wait(timeout=20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def _wait(started: subprocess.Popen[bytes], *, url: str, log: Path, start_s: float) -> None:
    until = time.monotonic() + start_s
    while time.monotonic() < until and started.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-20_000:]}")


@contextmanager
def start_embedded(model: Path, root: Path, session_dir: Path, log: Path) -> Iterator[str]:
    options = ServeOptions(
        model=str(model), port=free_port(), max_model_len=MAX_LEN, enable_lora=True, max_lora_rank=MAX_RANK,
        adapter_roots=(root,), served_model_name="tiny",
    )  # fmt: skip
    command = [sys.executable, "-c", EMBEDDED, options.model_dump_json()]
    environment = {
        "LACHESIS_SESSION_DIR": str(session_dir), "LACHESIS_SESSION_TOKEN": TOKEN, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    url = options.url
    with process(command, url=url, log=log, start_s=60, popen=warm.Popen, **environment):
        yield url


EMBEDDED_SERVER = ServerFactory(
    name="embedded",
    start=start_embedded,
    build_model=lambda seed: tiny_model("qwen2", seed=seed),
    tolerance=1e-3,
    exports=True,
)
