"""A server's session: its identity, and the token with which a local client may change its weights. No torch."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from lachesis.common.errors import EngineError
from lachesis.common.files import write_atomic
from lachesis.common.http import url_host
from lachesis.common.json_values import is_object
from lachesis.process.managed import process_exists

TOKEN_VARIABLE = "LACHESIS_SESSION_TOKEN"
DIRECTORY_VARIABLE = "LACHESIS_SESSION_DIR"


@dataclass(frozen=True, slots=True)
class Session:
    """The lifetime of a server process.

    ``session_id`` is in all its answers about weights; ``token`` is its secret. Adapters and checkpoints load only from
    inside ``adapter_roots``, which are absolute.
    """

    session_id: str
    token: str = field(repr=False)
    url: str
    port: int
    pid: int
    adapter_roots: tuple[Path, ...] = ()


def new_session(*, host: str, port: int, adapter_roots: tuple[Path, ...] = (), token: str | None = None) -> Session:
    """Return an unwritten session of this process, with ``token``, else the environment's, else a random one."""
    return Session(
        session_id=uuid.uuid4().hex,
        token=token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32),
        url=f"http://{url_host(host)}:{port}",
        port=port,
        pid=os.getpid(),
        adapter_roots=tuple(Path(root).resolve() for root in adapter_roots),
    )


def session_directory() -> Path:
    """Return the directory for the session files of this user's servers."""
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        return Path(directory)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) if runtime else Path.home() / ".cache") / "lachesis" / "sessions"


def session_path(port: int) -> Path:
    """Return the session file of the server that listens on ``port``."""
    return session_directory() / f"{port}.json"


def write_session(session: Session) -> Path:
    """Write the session where clients of the same user find it, readable only by that user.

    Raises:
        EngineError: the directory cannot be written.
    """
    path = session_path(session.port)
    document = asdict(session) | {"adapter_roots": [str(root) for root in session.adapter_roots]}
    # The umask is process-wide, but servers write their session before they start threads.
    before = os.umask(0o077)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise EngineError(
            f"the session file {path} cannot be written: {error.strerror or error}",
            remedy=f"set {DIRECTORY_VARIABLE} to a writable directory",
        ) from error
    finally:
        os.umask(before)
    return path


def remove_session(session: Session) -> None:
    """Remove the session's file, unless another server has replaced it. Idempotent."""
    path = session_path(session.port)
    try:
        written = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if is_object(written) and written.get("session_id") == session.session_id:
        path.unlink(missing_ok=True)


def read_session(url: str) -> Session | None:
    """Read the session of the server at ``url`` if it runs on this machine under this user; else ``None``.

    Raises:
        EngineError: the file exists, but is damaged or may have been written by another user.
    """
    parts = urlsplit(url)
    if not _is_local(parts.hostname or ""):
        return None
    path = session_path(parts.port or (443 if parts.scheme == "https" else 80))
    try:
        status = path.stat()
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngineError(f"the session file {path} cannot be read: {error.strerror or error}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise EngineError(
            f"the session file {path} belongs to another user, or others may access it",
            remedy="remove it and start the server again",
        )
    try:
        document = json.loads(text)
        session = Session(**document | {"adapter_roots": tuple(map(Path, document["adapter_roots"]))})
    except (ValueError, TypeError, KeyError) as error:
        raise EngineError(
            f"the session file {path} is damaged: {error}", remedy="remove it and start the server again"
        ) from error
    return session if process_exists(session.pid) else None


def session_token(url: str) -> str:
    """Return the token for the server at ``url``, from the environment or its session file.

    Raises:
        EngineError: neither exists.
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    session = read_session(url)
    if session is None:
        raise EngineError(
            f"no token is known for the server at {url}",
            remedy=f"set {TOKEN_VARIABLE} for server and client, or run both as one user on one machine "
            f"(looked in {session_directory()})",
        )
    return session.token


def _is_local(host: str) -> bool:
    if host in ("localhost", "0.0.0.0", "::", "::1", socket.gethostname()) or host.startswith("127."):
        return True
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
        # An address belongs to this machine if and only if a socket can be bound to it.
        for address in addresses:
            with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
                probe.bind((address, 0))
    except OSError:
        return False
    return True
