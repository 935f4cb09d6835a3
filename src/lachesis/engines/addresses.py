"""Addresses of a run's servers: entries of ``engine.urls``, read anew each time, and later requests for changes.

An entry is the address of one server; ``dns+http://NAME:PORT``, a server at each present address of the name, such as a
headless service; or ``file:PATH``, a file with an address on each line.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lachesis.common.errors import ConfigError, EngineUnreachable
from lachesis.common.http import server_url, url_host
from lachesis.config.schema import SERVERS_DNS, SERVERS_FILE

# The addresses of a host, as text.
Resolve = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """Requested changes to a running fleet: servers beside those of its configuration, and servers to leave."""

    added: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()

    def with_added(self, url: str) -> FleetChanges:
        """Return the changes with this server added."""
        return FleetChanges((*_without(self.added, url), url), _without(self.drained, url))

    def with_drained(self, url: str) -> FleetChanges:
        """Return the changes with this server drained."""
        return FleetChanges(_without(self.added, url), (*_without(self.drained, url), url))


def resolve_host(name: str) -> Sequence[str]:
    """Return all addresses of a name, in order.

    Raises EngineUnreachable if it has none.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EngineUnreachable(
            f"the name {name!r} of engine.urls has no address: {error}", remedy="check the name, and the name service"
        ) from error
    return sorted({str(address[0]) for *_, address in found})


def addresses(
    entries: Sequence[str], changes: FleetChanges | None = None, *, resolve: Resolve = resolve_host
) -> list[str]:
    """Return the servers as ``http://HOST:PORT``, each once, without those that were drained.

    Raises:
        ConfigError: an entry is not an address or is given twice, or its file cannot be read.
        EngineUnreachable: as ``resolve``.
    """
    changes = changes or FleetChanges()
    if len(set(entries)) < len(entries):
        raise ConfigError(f"the engine's servers are {list(entries)}", remedy="name each once")
    found = [url for entry in (*entries, *changes.added) for url in _of_entry(entry, resolve=resolve)]
    return [url for url in dict.fromkeys(found) if url not in changes.drained]


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
            f"the file {path} of engine.urls cannot be read: {error}", remedy="write one address on each line"
        ) from error


def _without(urls: Sequence[str], url: str) -> tuple[str, ...]:
    return tuple(one for one in urls if one != url)
