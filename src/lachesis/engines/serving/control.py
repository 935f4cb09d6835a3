"""What a server knows besides its engine: its session, its owner, the version of the weights, who is changing them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from lachesis.engines.serving.served import Refused, ServedEngine
from lachesis.engines.serving.session import TOKEN_VARIABLE, Session, session_path
from lachesis.engines.serving.versions import VersionClock


class Control:
    """The state behind the routes.

    Args:
        served: the engine.
        session: of this server.
        adapter_roots: adapters, checkpoints and bridge files are inside of these directories only.
    """

    def __init__(self, served: ServedEngine, *, session: Session, adapter_roots: Sequence[Path]) -> None:
        self.served = served
        self.session = session
        self.clock = VersionClock()
        self.owner: str | None = None
        self.roots = tuple(Path(root).resolve() for root in adapter_roots)
        self._changing: str | None = None

    @property
    def stamp(self) -> dict[str, object]:
        """What every answer about weights has: whose they are and of which version."""
        return {"weight_version": self.clock.current, "session_id": self.session.session_id}

    def check_token(self, authorization: str | None) -> None:
        """Raise Refused (401) unless the header is ``Bearer`` and the session's token."""
        scheme, _, token = (authorization or "").partition(" ")
        where = f"it is in {session_path(self.session.port)} of the server's user, or in {TOKEN_VARIABLE}"
        if scheme.lower() != "bearer" or not token:
            raise Refused(
                "this route needs the session's token", status=401, remedy=f"send Authorization: Bearer TOKEN; {where}"
            )
        if not hmac.compare_digest(token.strip().encode("latin-1", "replace"), self.session.token.encode()):
            raise Refused("the token is not that of this server's session", status=401, remedy=where)

    def claim(self, owner: str, *, takeover: bool) -> None:
        """Note that ``owner`` changes the weights from now on. Refused (409) where another one does."""
        if self.owner not in (None, owner) and not takeover:
            raise Refused(
                f"this engine belongs to {self.owner!r}; {owner!r} cannot have it",
                status=409,
                remedy="stop the other run and start the engine anew, or take it over (engine.takeover: true)",
            )
        self.owner = owner

    def release(self, owner: str) -> None:
        """The reverse of :meth:`claim`. Idempotent; the claim of another run stays."""
        if self.owner == owner:
            self.owner = None

    def inside_roots(self, path: str) -> Path:
        """``path`` without symbolic links.

        Raises:
            Refused: (403) it, or an entry of the directory it names, is outside of the adapter roots.
        """
        try:
            resolved = Path(path).expanduser().resolve()
            entries = list(resolved.iterdir()) if resolved.is_dir() else []
            targets = [resolved, *(entry.resolve() for entry in entries if entry.is_symlink())]
        except (OSError, RuntimeError, ValueError) as error:
            raise Refused(f"the path {path!r} cannot be resolved: {error}", remedy="name a directory") from error
        for target in targets:
            if not any(target.is_relative_to(root) for root in self.roots):
                allowed = ", ".join(map(str, self.roots)) or "none is set"
                raise Refused(
                    f"{path!r} leads outside of the allowed directories ({allowed})",
                    status=403,
                    remedy="put it inside one of them, or start the server with --adapter-root DIRECTORY",
                )
        return resolved

    async def change_weights(self, what: str, change: Callable[[], Awaitable[object]], *, version: int | None) -> None:
        """Run ``change``, drop what was cached under the old weights, then record the version.

        A change that fails leaves the version. It runs to its end even if the client has gone.

        Args:
            what: in the error of a second caller, as in "loading an adapter".
            change: makes the new weights the engine's, wholly or not at all.
            version: of the new weights; ``None`` counts one up.

        Raises:
            Refused: (409) another change is running.
        """
        if self._changing is not None:
            raise Refused(f"the weights are being changed: {self._changing}", status=409, remedy="wait for its end")
        self._changing = what
        await asyncio.shield(asyncio.ensure_future(self._change(change, version)))

    async def _change(self, change: Callable[[], Awaitable[object]], version: int | None) -> None:
        try:
            await change()
            await self.served.reset_prefix_cache()
            self.clock.record(self.clock.current + 1 if version is None else version)
        finally:
            self._changing = None
