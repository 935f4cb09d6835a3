"""Rollout API servers as processes of their own, and what is sent to them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.paths import SOURCE
from tests.ports import free_port
from tests.waiting import LONG_S

START_S = 120.0
OURS = """
import sys
from pathlib import Path
from lachesis.plugins.atropos.api.server import ServerOptions, serve
options = eval(sys.argv[1])
serve(ServerOptions(**options))
"""
REGISTRATION = {
    "wandb_group": "group", "wandb_project": "project", "batch_size": 8, "max_token_len": 512,
    "checkpoint_dir": "/checkpoints", "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 100,
}  # fmt: skip
ENVIRONMENT = {"max_token_length": 512, "desired_name": "env", "weight": 1.0, "group_size": 4}


class Server:
    """A running server and a client for it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=LONG_S, headers={"Accept-Encoding": "gzip"}
        )

    def get(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        reply = self.http.request("GET", path, json=body, headers=headers)
        reply.raise_for_status()
        return reply.json()

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        reply = self.http.post(path, json=body, headers=headers)
        reply.raise_for_status()
        return reply.json()

    def register(self, **changes: Any) -> Any:
        return self.post("/register", REGISTRATION | changes)

    def start(self, **changes: Any) -> None:
        """Register a trainer and have it poll once, so that environments may register."""
        self.register(**changes)
        assert self.get("/batch") == {"batch": None}

    def register_env(self, **changes: Any) -> int:
        return self.post("/register-env", ENVIRONMENT | changes)["env_id"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=LONG_S)


def scored(size: int, *, mark: int = 0, env_id: int | None = None, length: int = 3, **fields: Any) -> dict[str, Any]:
    """A sound group of ``size`` sequences whose tokens all are ``mark``."""
    return {
        "tokens": [[mark] * length] * size,
        "masks": [[-100] + [mark] * (length - 1)] * size,
        "scores": [0.5] * size,
        "inference_logprobs": [[1.0] + [-0.25] * (length - 1)] * size,
        "env_id": env_id,
        **fields,
    }


@contextmanager
def full_disk(*, largest: int) -> Iterator[None]:
    """Files of this process grow no further than ``largest`` bytes, until the block ends."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def marks(batch: list[dict[str, Any]]) -> list[int]:
    """Which groups a batch has, by the mark they were made with."""
    return [group["tokens"][0][0] for group in batch]


@contextmanager
def running(command: list[str], *, port: int, cwd: Path) -> Iterator[Server]:
    """The server that the command starts on that port, until the block ends."""
    log = cwd / f"server_{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=output, stderr=output
        )
    server = Server(process, port)
    try:
        _wait(server, log)
        yield server
    finally:
        server.http.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def ours(cwd: Path, **options: Any) -> Iterator[Server]:
    """Our server; ``options`` are those of ``ServerOptions``."""
    port = options.setdefault("port", free_port())
    with running([sys.executable, "-c", OURS, repr(options)], port=port, cwd=cwd) as server:
        yield server


def _wait(server: Server, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.process.poll() is None:
        try:
            server.http.get("/")
            return
        except httpx.TransportError:
            time.sleep(0.02)
    raise AssertionError(f"the server did not start: {log.read_text()}")
