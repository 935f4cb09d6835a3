"""Messages between the processes of a sandbox: JSON, each with its length before it, and never more than a limit.

Requests come from trusted processes and may be large; answers of the code may not.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

# Limits of an answer of the code, and of a request, whose tests and inputs come from the dataset.
MAX_BYTES = 32 << 20
MAX_REQUEST_BYTES = 1 << 30
_COPIED_BYTES = 1 << 16


class LinkClosed(Exception):
    """Error for an other end that is gone, or sends an invalid message."""


def send(link: socket.socket, message: Any, *, max_bytes: int = MAX_BYTES) -> None:
    """Send one message.

    Raises:
        LinkClosed: the other end is gone.
        ValueError: the message is too long; none of it was sent.
    """
    _send_content(link, pack(message, max_bytes=max_bytes))


def pack(message: Any, *, max_bytes: int) -> bytes:
    """Encode a message as JSON. Raises ValueError if it is too long."""
    content = json.dumps(message, separators=(",", ":")).encode()
    if len(content) > max_bytes:
        raise ValueError(f"a message of {len(content)} bytes, over the limit of {max_bytes}")
    return content


def send_packed(link: socket.socket, content: bytes, parts: Sequence[bytes]) -> None:
    """Send a message that :func:`pack` made, with bytes that are sent unchanged. Raises LinkClosed."""
    _send_content(link, content)
    for part in parts:
        _send_content(link, part)


def receive_part(link: socket.socket) -> bytes:
    """Return one of the parts of :func:`send_packed`. Raises LinkClosed."""
    return _exactly(link, int.from_bytes(_exactly(link, 4), "big"))


def receive(link: socket.socket, *, max_bytes: int = MAX_BYTES) -> Any:
    """Receive one message. Raises LinkClosed if the other end is gone, or sends an invalid message."""
    size = int.from_bytes(_exactly(link, 4), "big")
    if size > max_bytes:
        raise LinkClosed(f"a message of {size} bytes")
    try:
        return json.loads(_exactly(link, size))
    except (ValueError, RecursionError) as error:
        raise LinkClosed("no message") from error


def _send_content(link: socket.socket, content: bytes) -> None:
    try:
        size = len(content).to_bytes(4, "big")
        if len(content) > _COPIED_BYTES:
            link.sendall(size)
            link.sendall(content)
        else:  # a copy costs less than a system call
            link.sendall(size + content)
    except OSError as error:
        raise LinkClosed(str(error)) from error


def _exactly(link: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        try:
            part = link.recv(count - len(content))
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not part:
            raise LinkClosed("the other end is closed")
        content += part
    return bytes(content)
