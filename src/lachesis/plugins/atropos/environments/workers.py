"""Worker pool that makes many groups at a time, each with a time limit, and counts failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lachesis.common.errors import DataError, LachesisError
from lachesis.plugins.atropos.environments.base import FATAL, Environment
from lachesis.plugins.atropos.environments.outputs import Counters
from lachesis.plugins.atropos.environments.records import UsableGroup
from lachesis.process.tasks import cancel

logger = logging.getLogger("lachesis.plugins.atropos.environments")

_IN_A_ROW = 10


@dataclass(kw_only=True, eq=False)
class GroupWorkers:
    """Makers of groups of an environment, on its event loop."""

    environment: Environment[Any, Any]
    deliver: Callable[[UsableGroup], None]
    counters: Callable[[], Counters]
    tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    exhausted: bool = field(default=False, init=False)
    _in_a_row: int = field(default=0, init=False)

    async def fill(self, room: int) -> None:
        """Start groups until ``room`` of them are in progress, or there are no more problems."""
        while len(self.tasks) < room and not self.exhausted:
            item = await self.environment.get_next_item()
            if item is None:
                self.exhausted = True
                return
            self.tasks.add(asyncio.create_task(self._make(item)))

    def reap(self) -> None:
        """Drop finished groups. Raises the first error that ends the environment."""
        done = {task for task in self.tasks if task.done()}
        self.tasks -= done
        # Several may fail for the same reason: all are read, one is raised.
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def stop(self) -> None:
        """Cancel all groups in progress."""
        await cancel(self.tasks)
        self.tasks.clear()

    async def _make(self, item: Any) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.environment.config.worker_timeout):
                group = await self._collect(item)
        except FATAL:
            raise
        except TimeoutError:
            self._failed(
                DataError(
                    f"a group took longer than {self.environment.config.worker_timeout:g} s and was dropped",
                    remedy="raise --env.worker_timeout or lower --env.max_new_tokens",
                )
            )
        except LachesisError as error:
            self._failed(error)
        else:
            self._in_a_row = 0
            self.counters().group_seconds += time.monotonic() - started
            if group is not None:
                self.deliver(group)

    async def _collect(self, item: Any) -> UsableGroup | None:
        try:
            return await self.environment.collect_trajectories(item)
        except (LachesisError, TimeoutError):
            raise
        except Exception as error:
            name = self.environment.name
            raise DataError(
                f"the environment {name} raised {type(error).__name__}: {error}", remedy="correct its code"
            ) from error

    def _failed(self, error: LachesisError) -> None:
        self.counters().failures += 1
        self._in_a_row += 1
        logger.info("no group: %s", error)
        if self._in_a_row == _IN_A_ROW:
            raise DataError(
                f"{_IN_A_ROW} groups in a row failed, the last one: {error.message}", remedy=error.remedy
            ) from error
