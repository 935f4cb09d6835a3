"""The engine is restarted with the new adapter every N steps. It is documented, and `lora_only` beats it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lachesis.bridges.base import PolicyT
from lachesis.bridges.lora_swap import LoraSwapBridge
from lachesis.bridges.owned import OwnedEngine
from lachesis.deadline import Deadline

logger = logging.getLogger(__name__)


class LoraRestartBridge(LoraSwapBridge[PolicyT]):
    """``lora_restart``: saved as by ``lora_only``, then loaded by an engine that has just been started.

    Args:
        owned: the engine and its processes, which this bridge starts, restarts and stops.
        **options: as :class:`LoraSwapBridge`, without ``engine``. ``sync_s`` has to cover the engine's start.
    """

    kind = "lora_restart"

    def __init__(self, *, owned: OwnedEngine, **options: Any) -> None:
        super().__init__(engine=owned.engine, **options)
        self._owned = owned

    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        # The proof is of a session, and before the first start there is none.
        self._policy = policy_builder()
        return self._policy

    def renew(self) -> None:
        """Nothing: each start has its own proof."""

    def close(self) -> None:
        super().close()
        self._owned.stop()

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        started = time.perf_counter()
        path = self._save(version)
        self._start_with(path, version=version, deadline=deadline)
        self._saved.prune(serving=path)
        logger.info("[LORA] Engine restarted with version %d in %.1f s", version, time.perf_counter() - started)

    def _start_with(self, path: Path, *, version: int, deadline: Deadline) -> None:
        self._owned.restart(deadline=deadline)
        self._load(path, version=version, deadline=deadline)
        self._build_proof()
