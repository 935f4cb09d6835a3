"""Batching of single turns from many conversations into engine calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, GenerationRequest
from lachesis.engines.base import Engine, Finished
from lachesis.process.threads import fail, settle

# Seconds to wait for further turns: turns requested together arrive some milliseconds apart.
_GATHER_S = 0.004
_PAUSED_S = 0.05


class Completer(Protocol):
    """The contract for completing single prompts on an event loop: an engine, or inference servers."""

    deadline: Deadline

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return one completion of a prompt."""
        ...

    async def stop(self) -> None:
        """Start no further completions, and wait for running ones. Idempotent."""
        ...


class CallBatcher:
    """Completes single prompts on one event loop; prompts that wait at the same time share one engine call.

    ``deadline`` applies to future calls. By default there is none: callers that wait for a turn have their own limit.

    Args:
        at_once: maximum number of concurrent engine calls. An engine in the trainer's process handles one at a time.
    """

    def __init__(self, engine: Engine, *, at_once: int) -> None:
        self.deadline = Deadline("single turns", None)
        self._engine = engine
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="lachesis-turns")
        self._slots = asyncio.Semaphore(at_once)
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[list[Completion]]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return one completion of a prompt. Raises as :meth:`Engine.generate`."""
        return (await self.completions(request))[0]

    async def completions(self, request: GenerationRequest) -> list[Completion]:
        """Return all ``n`` completions of a prompt. Raises as :meth:`Engine.generate`."""
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if len(self._waiting) == 1:
            call = asyncio.create_task(self._call())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await future

    async def stop(self) -> None:
        """Start no further calls, and wait for running ones, which an engine cannot cancel. Idempotent."""
        self._closed = True
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self) -> None:
        await asyncio.sleep(_GATHER_S)
        async with self._slots:
            taken, self._waiting = self._waiting, []
            wanted = [(request, future) for request, future in taken if not future.cancelled()]
            if not wanted:
                return
            loop = asyncio.get_running_loop()

            def finished(place: int, completions: list[Completion]) -> None:
                loop.call_soon_threadsafe(settle, wanted[place][1], completions)

            try:
                requests = [request for request, _ in wanted]
                await loop.run_in_executor(self._threads, self._generate, requests, finished)
            except Exception as error:  # pass any error on to the waiting callers
                for _, future in wanted:
                    fail(future, error)

    def _generate(self, requests: Sequence[GenerationRequest], finished: Finished) -> None:
        deadline = self.deadline
        while True:
            try:
                self._engine.generate(requests, deadline=deadline, finished=finished)
                return
            except EngineError:
                # Weights are being transferred; nothing of the call has begun.
                if self._closed or not self._engine.health().paused:
                    raise
                deadline.check("the engine is paused")
                time.sleep(_PAUSED_S)
