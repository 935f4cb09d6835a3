"""The endpoints without a network: what a request to the application gives. The contracts go over a real one."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from lachesis.plugins.atropos.api import routes
from lachesis.plugins.atropos.api.server import ServerOptions, build_app
from tests.unit.plugins.atropos.api.processes import ENVIRONMENT, REGISTRATION, full_disk, marks, scored

Talk = Callable[[httpx.AsyncClient], Awaitable[Any]]


def ask(talk: Talk, *, app: Starlette | None = None, client: str = "127.0.0.1", **options: Any) -> Any:
    """Have a conversation with a fresh application."""

    async def conversation() -> Any:
        transport = httpx.ASGITransport(app or build_app(ServerOptions(**options)), client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await talk(http)

    return asyncio.run(conversation())


async def start(http: httpx.AsyncClient, **changes: Any) -> int:
    await http.post("/register", json=REGISTRATION | changes)
    await http.get("/batch")
    return (await http.post("/register-env", json=ENVIRONMENT)).json()["env_id"]


def test_repeated_posts_get_the_first_reply():
    async def talk(http: httpx.AsyncClient) -> None:
        env_id = await start(http)
        for _ in range(3):
            reply = await http.post("/scored_data", json=scored(3, env_id=env_id), headers={"Idempotency-Key": "a"})
            assert reply.json() == {"status": "buffered", "buffer_size": 3}
        listed = [scored(4), scored(4)]
        for _ in range(2):
            reply = await http.post("/scored_data_list", json=listed, headers={"Idempotency-Key": "b"})
            assert reply.json() == {"status": "received", "groups_processed": 2}
        assert (await http.get("/status")).json()["queue_size"] == 2
        # A refused post is no post: the same key may be used once it is mended.
        assert (await http.post("/scored_data", content=b"{", headers={"Idempotency-Key": "c"})).status_code == 422
        reply = await http.post("/scored_data", json=scored(4), headers={"Idempotency-Key": "c"})
        assert reply.json() == {"status": "received"}
        reply = await http.post("/scored_data", json=scored(4), headers={"Idempotency-Key": "d" * 201})
        assert reply.status_code == 422

    ask(talk)


def test_replies_are_compressed_for_other_machines_only():
    async def talk(http: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        await start(http)
        await http.post("/scored_data", json=scored(8, length=100))
        small = await http.get("/status")
        return small, await http.get("/batch")

    small, batch = ask(talk, client="10.0.0.7")
    assert "content-encoding" not in small.headers
    assert batch.headers["content-encoding"] == "gzip" and batch.headers["vary"] == "Accept-Encoding"
    assert marks(batch.json()["batch"]) == [0]
    _, batch = ask(talk, client="127.0.0.1")
    assert "content-encoding" not in batch.headers


def test_large_compressed_bodies():
    async def talk(http: httpx.AsyncClient) -> None:
        await start(http, batch_size=1)
        content = gzip.compress(json.dumps(scored(1, images=os.urandom(400_000).hex())).encode())
        assert len(content) > 256 << 10
        reply = await http.post("/scored_data", content=content, headers={"Content-Encoding": "gzip"})
        assert reply.json() == {"status": "received"}

    ask(talk)


def test_bodies_without_a_length_are_limited_too():
    async def talk(http: httpx.AsyncClient) -> httpx.Response:
        async def parts():
            for _ in range(40):
                yield b" " * 1000

        return await http.post("/scored_data", content=parts())

    assert ask(talk, max_body_mb=0.02).status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Lachesis-Trainer": "x"}, 422),
        ({"X-Lachesis-Trainer": "5"}, 409),
        ({"X-Lachesis-Holds": "x"}, 200),
        ({"X-Lachesis-Trainer": "9" * 5000}, 422),
        ({"X-Lachesis-Trainer": "5", "X-Lachesis-Holds": "9" * 5000}, 422),
    ],
)
def test_headers_of_the_trainer(headers: dict[str, str], status: int):
    async def talk(http: httpx.AsyncClient) -> httpx.Response:
        await start(http)
        return await http.get("/batch", headers=headers)

    assert ask(talk).status_code == status


NUMBERS = (0, -1, 1 << 40, 1 << 62, -(1 << 63), 10**400, 1e308, -1e308, 1e-320, 0.5)


def test_no_number_of_one_registration_stops_the_run_of_all():
    """Each is refused or of use: the trainer gets its batch, and others their status, after each."""

    async def talk(http: httpx.AsyncClient) -> None:
        env_id = await start(http)
        for path, record in (("/register-env", ENVIRONMENT), ("/register", REGISTRATION)):
            names = [name for name, value in record.items() if isinstance(value, int | float)]
            for name, number in [(name, number) for name in [*names, "min_batch_allocation"] for number in NUMBERS]:
                asked = await http.post(path, json=record | {name: number})
                assert asked.status_code in (200, 422), (name, number)
                other = asked.json().get("env_id", env_id)
                await http.post("/register", json=REGISTRATION)
                groups = [scored(4, env_id=env_id), scored(2, env_id=other), scored(4, env_id=env_id)]
                assert (await http.post("/scored_data_list", json=groups)).status_code == 200, (name, number)
                assert (await http.get("/overview")).status_code == 200, (name, number)
                for one in (env_id, other):
                    asked = await http.request("GET", "/status-env", json={"env_id": one})
                    assert asked.status_code == 200, (name, number)
                assert (await http.get("/batch")).status_code == 200, (name, number)
                await http.post("/disconnect-env", json={"env_id": other}) if other != env_id else None

    ask(talk)


def test_a_disk_that_fills_up_and_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What could not be written was not taken, changes are refused for a while, and then all goes on."""
    clock = [100.0]
    monkeypatch.setattr(routes.time, "monotonic", lambda: clock[0])

    async def talk(http: httpx.AsyncClient) -> None:
        await start(http)
        await http.post("/scored_data", json=scored(4, mark=1))
        with full_disk(largest=128 << 10):
            reply = await http.post("/scored_data", json=scored(4, mark=2, length=20_000))
            assert reply.status_code == 503 and reply.headers["Retry-After"] == "5"
            assert "could not be written: disk" in reply.json()["detail"]
        assert (await http.get("/status")).json() == {"current_step": 0, "queue_size": 1}
        assert (await http.get("/healthz")).status_code == 503
        assert (await http.post("/scored_data", json=scored(4, mark=3))).status_code == 503
        clock[0] += 6
        assert (await http.post("/scored_data", json=scored(4, mark=4))).status_code == 200
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        assert marks((await http.get("/batch")).json()["batch"]) == [1, 4]

    ask(talk, state_dir=tmp_path)


def test_a_restart_keeps_the_replies_to_posts(tmp_path: Path):
    async def talk(http: httpx.AsyncClient) -> int:
        await http.post("/scored_data", json=scored(4), headers={"Idempotency-Key": "once"})
        return (await http.get("/status")).json()["queue_size"]

    for _ in range(2):
        app = build_app(ServerOptions(state_dir=tmp_path))
        assert ask(talk, app=app) == 1
        asyncio.run(end(app))


async def end(app: Starlette) -> None:
    """Run the application's start and end, as a server does: the end releases the state directory."""
    async with app.router.lifespan_context(app):
        pass


def test_every_group_in_latest_example_and_set_aside():
    async def talk(http: httpx.AsyncClient) -> None:
        await start(http)
        await http.post("/scored_data", json=scored(4, mark=6))
        assert (await http.get("/latest_example")).json()["tokens"][0] == [6, 6, 6]
        assert (await http.get("/set_aside")).json() == {"count": 0, "last": []}

    ask(talk)


def test_the_overview_says_who_is_there_and_what_is_awaited():
    async def talk(http: httpx.AsyncClient) -> None:
        env_id = await start(http)
        await http.post("/scored_data", json=scored(4, mark=3, env_id=env_id))
        found = (await http.get("/overview")).json()
        assert (found["step"], found["waiting"], found["outstanding"]) == (0, "4 of 8 sequences are queued", 0)
        (environment,) = found["environments"]
        assert environment.pop("silent_s") < 60
        assert environment == {
            "name": "env_0", "state": "here", "queued": 4, "groups": 1, "set_aside": 0, "score": 0.5,
        }  # fmt: skip
        await http.post("/disconnect-env", json={"env_id": env_id})
        assert (await http.get("/overview")).json()["environments"][0]["state"] == "left"
        await http.get("/reset_data")
        assert (await http.get("/overview")).json()["environments"] == []

    ask(talk)
