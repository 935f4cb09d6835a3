"""Messages between the processes of a sandbox: JSON, each with its length before it, and never more than a limit."""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_BYTES = 32 << 20


class LinkClosed(Exception):
    """The other end is gone, or sends what is no message."""


def send(link: socket.socket, message: Any) -> None:
    """Raises LinkClosed; ValueError where the message is too long."""
    content = json.dumps(message, separators=(",", ":")).encode()
    if len(content) > MAX_BYTES:
        raise ValueError(f"a message of {len(content)} bytes")
    try:
        link.sendall(len(content).to_bytes(4, "big") + content)
    except OSError as error:
        raise LinkClosed(str(error)) from error


def receive(link: socket.socket) -> Any:
    """Raises LinkClosed."""
    size = int.from_bytes(_exactly(link, 4), "big")
    if size > MAX_BYTES:
        raise LinkClosed(f"a message of {size} bytes")
    try:
        return json.loads(_exactly(link, size))
    except (ValueError, RecursionError) as error:
        raise LinkClosed("no message") from error


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
