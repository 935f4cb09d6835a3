"""The adapter is saved and swapped into the running engine, with CUDA graphs on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from lachesis.bridges.adapters import VersionedDirectories, save_adapter
from lachesis.bridges.base import PolicyT
from lachesis.bridges.external import ExternalBridge, ProofBuilder
from lachesis.common.deadline import Deadline
from lachesis.engines.http.client import HttpEngine

logger = logging.getLogger(__name__)

AdapterTensors = Callable[[PolicyT], Mapping[str, Tensor]]
AdapterConfig = Callable[[PolicyT], bytes]


class LoraSwapBridge(ExternalBridge[PolicyT]):
    """``lora_only``: a directory for each version, which the servers are told to load in place of the last.

    Args:
        engine: the servers; ``directory`` has to be one of their adapter roots.
        directory: as ``<run>/adapters``.
        keep_last: saved adapters that stay.
        tensors: the adapter's tensors by name, as :func:`lachesis.bridges.extract.lora_tensors`.
        config: its ``adapter_config.json``, as :func:`lachesis.bridges.adapters.adapter_config`; asked once.
        adapter_name: under which requests may ask for it.
        proof_builder, sync_s, every_steps: as in :class:`ExternalBridge`.
    """

    kind = "lora_only"

    def __init__(
        self,
        *,
        engine: HttpEngine,
        directory: Path,
        keep_last: int,
        tensors: AdapterTensors[PolicyT],
        config: AdapterConfig[PolicyT],
        proof_builder: ProofBuilder[PolicyT] | None,
        adapter_name: str = "policy",
        sync_s: float | None = None,
        every_steps: int = 1,
    ) -> None:
        super().__init__(
            kind=self.kind, engine=engine, proof_builder=proof_builder, sync_s=sync_s, every_steps=every_steps
        )
        self._saved = VersionedDirectories(directory, keep_last=keep_last)
        self._tensors = tensors
        self._config = config
        self._config_bytes: bytes | None = None
        self._adapter_name = adapter_name

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        started = time.perf_counter()
        path = self._save(version)
        self._load(path, version=version, deadline=deadline)
        self._saved.prune(serving=path)
        logger.info("[LORA] ✓ Hot-swapped adapter: version %d in %.3f s", version, time.perf_counter() - started)

    def _save(self, version: int) -> Path:
        """Raises EngineError where the disk is full or cannot be written; the engine has not been told then."""
        if self._config_bytes is None:
            self._config_bytes = self._config(self.policy)
        with self._saved.writing(version) as directory:
            save_adapter(directory, tensors=self._tensors(self.policy), config=self._config_bytes)
        return self._saved.path(version)

    def _load(self, path: Path, *, version: int, deadline: Deadline) -> None:
        name = self._adapter_name
        self._engine.on_all(lambda server: server.load_adapter(path, name=name, version=version, deadline=deadline))
