"""Addresses of a run's servers: entries of ``engine.urls``, resolved again each time.

An entry is the address of one server; ``dns+http://NAME:PORT``, a server at each current IP address of the name, such
as a headless service; or ``file:PATH``, a file with an address on each line.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lachesis.common.errors import ConfigError, EngineUnreachable
from lachesis.common.http import server_url, url_host
from lachesis.config.schema import SERVERS_DNS, SERVERS_FILE

# A function that returns the IP addresses of a host, as text.
Resolve = Callable[[str], Sequence[str]]


def resolve_host(name: str) -> Sequence[str]:
    """Return all addresses of a name, in order.

    Raises EngineUnreachable if it has none.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EngineUnreachable(
            f"the name {name!r} in engine.urls has no address: {error}", remedy="check the name and the name service"
        ) from error
    return sorted({str(address[0]) for *_, address in found})


def addresses(entries: Sequence[str], *, resolve: Resolve = resolve_host) -> list[str]:
    """Return the distinct servers as ``http://HOST:PORT``.

    Raises:
        ConfigError: an entry is not an address or is given twice, or its file cannot be read.
        EngineUnreachable: as ``resolve``.
    """
    if len(set(entries)) < len(entries):
        raise ConfigError(f"engine.urls names a server twice: {list(entries)}", remedy="name each server once")
    return list(dict.fromkeys(url for entry in entries for url in _of_entry(entry, resolve=resolve)))


def _of_entry(entry: str, *, resolve: Resolve) -> Iterator[str]:
    if entry.startswith(SERVERS_FILE):
        lines = map(str.strip, _lines(Path(entry.removeprefix(SERVERS_FILE))))
        yield from (server_url(line) for line in lines if line and not line.startswith("#"))
    elif entry.startswith(SERVERS_DNS):
        url = server_url(entry.removeprefix(SERVERS_DNS))
        parts = urlsplit(url)
        for address in resolve(parts.hostname or ""):
            yield f"{parts.scheme}://{url_host(address)}" + (f":{parts.port}" if parts.port else "") + parts.path
    else:
        yield server_url(entry)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the file {path} in engine.urls cannot be read: {error}", remedy="write one address per line into it"
        ) from error
