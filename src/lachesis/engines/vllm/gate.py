"""The gate in front of vLLM's engine: pausing, sleeping, and waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from lachesis.engines.base import PauseMode
from lachesis.engines.serving.backend import MEMORY_PARTS, MemoryPart, Refused


class Gate:
    """A gate at which requests of all routes wait while the engine is paused or asleep.

    This lets ``engine``, vLLM's ``EngineClient``, run briefly to read a canary: only requests already in flight
    continue.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._open = asyncio.Event()
        self._open.set()
        self._switching = asyncio.Lock()
        self.paused = False
        self.asleep: frozenset[MemoryPart] = frozenset()

    @property
    def sleeping(self) -> bool:
        """Return True while any part of the engine's memory is released."""
        return bool(self.asleep)

    @property
    def is_open(self) -> bool:
        """Return True while the engine generates."""
        return self._open.is_set()

    async def wait(self) -> None:
        """Wait until the engine generates."""
        await self._open.wait()

    def refuse_asleep(self, what: str, *, without: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Raise Refused (409) while the engine is asleep; ``what`` names the act that needs the parts ``without``."""
        if self.asleep.intersection(without):
            raise Refused(f"while the engine is asleep {what}", status=409, remedy="wake it up first")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine inside the context, even if it is paused. Raise Refused (409) while it is asleep."""
        async with self._switching:
            self.refuse_asleep("nothing is computed")
            if self.paused:
                await self._engine.resume_generation()
            try:
                yield
            finally:
                if self.paused:
                    await self._freeze()

    async def pause(self, mode: PauseMode) -> None:
        """Pause: ``keep`` freezes requests in flight, ``drain`` awaits their end, ``abort`` ends them. Caches stay."""
        async with self._switching:
            self.paused = True
            self._open.clear()
            if self.sleeping:
                return
            if mode == "keep":
                await self._freeze()
            else:
                await self._engine.pause_generation(mode="wait" if mode == "drain" else "abort", clear_cache=False)

    async def resume(self) -> None:
        """Undo :meth:`pause`."""
        async with self._switching:
            self.paused = False
            if not self.sleeping:
                await self._engine.resume_generation()
                self._open.set()

    async def sleep(self, level: int) -> bool:
        """Free memory; return False if the engine is already asleep."""
        async with self._switching:
            if self.sleeping:
                return False
            self.asleep = frozenset(MEMORY_PARTS)
            self._open.clear()
            # Requests in flight continue after waking, with a recomputed cache; without weights they are aborted.
            await self._engine.sleep(level=level, mode="keep" if level == 1 else "abort")
            return True

    async def wake_up(self, tags: Collection[MemoryPart], restore: Callable[[], Awaitable[object]]) -> None:
        """Reallocate parts of memory and ``restore`` the weights.

        Once no part is missing the engine generates, or stays paused if it was.
        """
        async with self._switching:
            waking = self.asleep.intersection(tags)
            if not waking:
                return
            await self._engine.wake_up(tags=sorted(waking))
            if "weights" in waking:
                await restore()
            self.asleep -= waking
            if self.asleep:
                return
            if self.paused:
                await self._freeze()
            else:
                self._open.set()

    async def _freeze(self) -> None:
        """Stop the scheduler; requests in flight keep their state and cache.

        vLLM's ``pause_generation`` does this and then waits for callers to collect their last outputs.
        """
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
