"""HTTP servers in this process, and the addresses that they are reached by."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from lachesis.common.errors import ConfigError
from lachesis.common.http import LoopServer, bind, http_server, listen, url_host, url_of

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def app() -> Starlette:
    async def hello(request: object) -> PlainTextResponse:
        return PlainTextResponse("hello")

    return Starlette(routes=[Route("/", hello)])


def test_urls_write_ipv6_addresses_in_brackets():
    assert [url_host(host) for host in ("::1", "127.0.0.1", "name")] == ["[::1]", "127.0.0.1", "name"]
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_that_is_held_refuses_connections_until_a_server_listens():
    with bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        held.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_every_server_hides_its_name_and_keeps_connections_longer_than_clients_do():
    config = http_server(app()).config
    assert (config.server_header, config.access_log, config.timeout_keep_alive) == (False, False, 75)


def test_a_server_on_the_running_loop_starts_and_stops_cleanly():
    async def scenario() -> str:
        server = LoopServer(app())
        assert server.url == ""
        await server.start()
        async with httpx.AsyncClient() as client:
            answer = await client.get(server.url)
        await server.stop()
        await server.stop()
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url)
        assert "server" not in answer.headers
        return answer.text

    assert asyncio.run(scenario()) == "hello"


def test_the_body_of_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (HEAD, b"a: b\r\n"),
        (HEAD + b"a: ", b"bbbbbb"),
        (b"GET /", b"aaaaaa"),
        (CHUNKED + b"0\r\n", b"a: b\r\n"),
        (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ],
    ids=["headers", "a header", "an address", "trailers", "requests"],
)
def test_what_never_ends_ends_the_connection(start: bytes, part: bytes):
    """Before, 60 MiB of headers took 1.2 GB of memory, and 100 MiB of an address 26 s of the event loop."""

    async def scenario() -> int:
        server, sent = LoopServer(app()), len(start)
        await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        try:
            writer.write(start)
            while sent < 32 << 20:
                writer.write(part * 10_000)
                await writer.drain()
                sent += 10_000 * len(part)
        except ConnectionError:
            return sent
        finally:
            writer.transport.abort()
            await server.stop()
        return sent

    assert asyncio.run(scenario()) < 16 << 20


def test_long_bodies_and_requests_one_after_the_other_get_through():
    async def answered(request: object) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))  # type: ignore[attr-defined]

    async def scenario() -> list[str]:
        server = LoopServer(Starlette(routes=[Route("/", answered, methods=["POST"])]))
        await server.start()

        async def parts() -> object:
            for _ in range(64):
                yield b"a" * 10_000

        async with httpx.AsyncClient() as client:
            bodies = [b"", b"a" * 2_000_000, parts(), *([b"b"] * 40)]
            found = [(await client.post(server.url, content=body)).text for body in bodies]  # type: ignore[arg-type]
        await server.stop()
        return found

    assert asyncio.run(scenario()) == ["0", "2000000", "640000", *(["1"] * 40)]
