"""Bodies of requests and replies: size limits, gzip, JSON."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, NamedTuple

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from lachesis.common import http
from lachesis.common.http import BodyTooLong
from lachesis.plugins.atropos.api.wire import Refusal

# Limit of requests without groups, which have only names, sizes and ids of batches.
RECORD_BYTES = 1 << 20
_GZIP = 31
_LEVEL = 1
_WORTH_COMPRESSING = 1000
# Above this, a thread compresses and decompresses: zlib releases the interpreter's lock.
_LONG = 256 << 10
_MEMBERS = 16
# Clients on this machine, for which compressing costs more than it saves; those of a test have no address.
_LOCAL = ("127.0.0.1", "::1", "")


class Body(NamedTuple):
    """Content of a body, and the body as received if it was gzipped."""

    content: bytes
    packed: bytes = b""


async def read_body(request: Request, *, limit: int) -> Body:
    """Read the body of a request, inflated if it is gzipped; neither form may be longer than ``limit`` bytes.

    Raises:
        Refusal: 413, it is longer; 400, it is not gzip or ends too early; 499, the client went away.
    """
    try:
        body = await http.read_body(request, limit=limit)
    except BodyTooLong as error:
        raise _too_large(limit) from error
    except ClientDisconnect as error:
        raise Refusal(499, "the client went away", plain=True) from error
    if "gzip" not in request.headers.get("content-encoding", "").lower() or not body:
        return Body(body)
    if len(body) > _LONG:
        return Body(await asyncio.to_thread(inflate, body, limit=limit), packed=body)
    return Body(inflate(body, limit=limit), packed=body)


def inflate(body: bytes, *, limit: int) -> bytes:
    """Inflate gzip data of one or more members, and read no further than ``limit`` bytes.

    Raises:
        Refusal: 413, it is longer; 400, it is not gzip or ends too early.
    """
    parts: list[bytes] = []
    length, rest = 0, body
    for _ in range(_MEMBERS):
        reader = zlib.decompressobj(_GZIP)
        try:
            part = reader.decompress(rest, limit - length + 1)
        except zlib.error as error:
            raise Refusal(400, "Invalid gzip payload", plain=True) from error
        length += len(part)
        if length > limit:
            raise _too_large(limit)
        if not reader.eof:
            message = f"Invalid gzip payload: it ends early, after {len(body)} bytes that inflate to {length}"
            raise Refusal(400, message, plain=True)
        parts.append(part)
        rest = reader.unused_data.lstrip(b"\0")
        if not rest:
            return b"".join(parts)
    raise Refusal(400, f"Invalid gzip payload: it has more than {_MEMBERS} members", plain=True)


async def reply(request: Request, body: bytes) -> Response:
    """Return the JSON ``body`` as a reply, gzipped if the client accepts that and is on another machine."""
    headers: dict[str, str] = {}
    if len(body) >= _WORTH_COMPRESSING and (request.client.host if request.client else "") not in _LOCAL:
        headers["Vary"] = "Accept-Encoding"
        if _accepts_gzip(request.headers.get("accept-encoding", "")):
            headers["Content-Encoding"] = "gzip"
            body = await asyncio.to_thread(zlib.compress, body, _LEVEL, _GZIP)
    return Response(body, media_type="application/json", headers=headers)


def reply_with(value: Any, *, status: int = 200) -> Response:
    """Return a small value as a JSON response."""
    return Response(to_json(value), status_code=status, media_type="application/json")


def _too_large(limit: int) -> Refusal:
    if limit == RECORD_BYTES:
        return Refusal(413, f"the body is longer than {limit / (1 << 20):g} MiB")
    return Refusal(413, f"the body is longer than {limit / (1 << 20):g} MiB (--max-body-mb)")


def _accepts_gzip(accepted: str) -> bool:
    for part in accepted.lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
