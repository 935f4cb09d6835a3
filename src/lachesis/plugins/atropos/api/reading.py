"""Reader of posted groups, which parses long posts in a separate process, so that no other client waits for them.

Parsing JSON holds the interpreter: a body of 60 MB would keep all other clients waiting for ten seconds, even if a
thread parsed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lachesis.plugins.atropos.api.entries import StoredGroup
from lachesis.plugins.atropos.api.wire import Refusal, WrongGroup, parse_each, parse_group, parse_groups
from lachesis.process.workers import WorkerError, WorkerPool

# Bytes that are parsed within a tenth of a second, in the server's own process.
_SHORT = 512 << 10
_TIMEOUT_S = 120.0


class GroupReader:
    """Parser of the bodies of posts; ``check`` is that of :func:`lachesis.plugins.atropos.api.wire.parse_group`."""

    def __init__(self, *, check: bool) -> None:
        self._check = check
        self._pool: WorkerPool | None = None
        self._turn = asyncio.Lock()

    async def read(self, content: bytes, *, single: bool) -> Sequence[StoredGroup | WrongGroup]:
        """Return the groups of a body, in order; for a list also the invalid ones, if others are valid.

        Raises:
            Refusal: 422, no group in it can be used; 503, it could not be parsed now.
        """
        if len(content) <= _SHORT:
            return read_groups(content, single, self._check)
        async with self._turn:  # one at a time, so that waiting occupies no thread
            return await asyncio.to_thread(self._read_aside, content, single)

    def close(self) -> None:
        """End the process, if there is one, and its current work."""
        if self._pool is not None:
            self._pool.close()

    def _read_aside(self, content: bytes, single: bool) -> Sequence[StoredGroup | WrongGroup]:
        if self._pool is None:
            self._pool = WorkerPool(1, _nothing, name="processes that parse long posts")
        result: Any = self._pool.run(read_groups, [(content, single, self._check)], timeout_s=_TIMEOUT_S)[0]
        if isinstance(result, WorkerError):
            reason = f"a post of {len(content) / (1 << 20):.1f} MiB could not be parsed: its process {result}"
            raise Refusal(503, reason, headers={"Retry-After": "1"})
        return result


def read_groups(content: bytes, single: bool, check: bool) -> Sequence[StoredGroup | WrongGroup]:
    """Return the groups of a post of one group or of a list.

    Raises:
        Refusal: 422, no group in it can be used.
    """
    if single:
        return [parse_group(content, check=check)]
    try:
        return parse_groups(content, check=check)
    except Refusal:
        groups = parse_each(content, check=check)
        if not any(isinstance(group, StoredGroup) for group in groups):
            raise
        return groups


def _nothing() -> None:
    """Do nothing: the process only has to import its modules."""
