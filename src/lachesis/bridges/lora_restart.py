"""The engine is restarted with the new adapter every N steps. It is documented, and `lora_only` beats it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from lachesis.bridges.base import PolicyT
from lachesis.bridges.external import RestartingBridge
from lachesis.bridges.lora_swap import LoraSwapBridge
from lachesis.common.deadline import Deadline

logger = logging.getLogger(__name__)


class LoraRestartBridge(RestartingBridge[PolicyT], LoraSwapBridge[PolicyT]):
    """``lora_restart``: saved as by ``lora_only``, then loaded by an engine that has just been started.

    Args:
        owned, **options: as :class:`RestartingBridge` and :class:`LoraSwapBridge`. ``sync_s`` has to cover the
            engine's start.
    """

    kind = "lora_restart"

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
