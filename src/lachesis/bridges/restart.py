"""A checkpoint of all weights is written, and the engine restarted on it or told to load it."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lachesis.bridges.adapters import VersionedDirectories, write_safetensors
from lachesis.bridges.base import PolicyT
from lachesis.bridges.external import ExternalBridge, ProofBuilder, RestartingBridge
from lachesis.bridges.owned import Command
from lachesis.common.deadline import Deadline
from lachesis.engines.http.client import HttpEngine

logger = logging.getLogger(__name__)

# A file of a checkpoint holds about this much, which bounds what is in memory twice while it is written.
SHARD_BYTES = 512 * 2**20

Weights = Callable[[PolicyT], Iterable[tuple[str, Tensor]]]
Companions = Callable[[PolicyT, Path], None]


class ReloadBridge(ExternalBridge[PolicyT]):
    """``reload``: a checkpoint for each version, which the running servers load in place of their weights.

    Args:
        engine: the servers; ``directory`` has to be one of their allowed roots.
        directory: as ``<run>/exports``.
        keep_last: checkpoints that stay; the one that is being served always does.
        weights: all weights by Hugging Face's names, one by one, as :func:`lachesis.bridges.extract.full_weights`.
        companions: writes what else a checkpoint has into its directory, as :func:`save_companions`.
        proof_builder, sync_s, every_steps: as in :class:`ExternalBridge`.
    """

    kind = "reload"

    def __init__(
        self,
        *,
        engine: HttpEngine,
        directory: Path,
        keep_last: int,
        weights: Weights[PolicyT],
        companions: Companions[PolicyT],
        proof_builder: ProofBuilder[PolicyT] | None,
        sync_s: float | None = None,
        every_steps: int = 1,
    ) -> None:
        super().__init__(
            kind=self.kind, engine=engine, proof_builder=proof_builder, sync_s=sync_s, every_steps=every_steps
        )
        self._saved = VersionedDirectories(directory, keep_last=keep_last)
        self._weights = weights
        self._companions = companions

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        started = time.perf_counter()
        path = self._save(version)
        self._serve(path, version=version, deadline=deadline)
        self._saved.prune(serving=path)
        logger.info("[CHECKPOINT] Engine serves version %d after %.1f s", version, time.perf_counter() - started)

    def _save(self, version: int) -> Path:
        """Raises EngineError where the disk is full or cannot be written; the engine has not been told then."""
        with self._saved.writing(version) as directory:
            write_checkpoint(directory, self._weights(self.policy))
            self._companions(self.policy, directory)
        return self._saved.path(version)

    def _serve(self, path: Path, *, version: int, deadline: Deadline) -> None:
        self._engine.on_all(lambda server: server.reload(path, version=version, deadline=deadline))


class RestartBridge(RestartingBridge[PolicyT], ReloadBridge[PolicyT]):
    """``none``: the engine is restarted on each checkpoint.

    Args:
        command: makes the command that serves a checkpoint.
        stop_first: stop the engine before the checkpoint is written, for its memory.
        owned, **options: as :class:`RestartingBridge` and :class:`ReloadBridge`. ``sync_s`` has to cover the
            engine's start.
    """

    kind = "none"

    def __init__(self, *, command: Command, stop_first: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._command = command
        self._stop_first = stop_first

    def _save(self, version: int) -> Path:
        if self._stop_first:
            self._owned.stop()
        return super()._save(version)

    def _serve(self, path: Path, *, version: int, deadline: Deadline) -> None:
        self._owned.restart(deadline=deadline, command=self._command, checkpoint=path)
        self._engine.on_all(lambda server: server.set_version(version, deadline=deadline))
        self._build_proof()


def write_checkpoint(directory: Path, weights: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write weights as safetensors files with an index, as transformers and vLLM read them.

    They are taken one by one, and at most one file's worth is held.

    Raises:
        OSError: as the file system says.
    """
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = held = 0

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        write_safetensors(directory / name, shard)
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in weights:
        if shard and held + tensor.nbytes > shard_bytes:
            flush()
            held = 0
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def save_companions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a checkpoint's files besides its weights: the configurations and the tokenizer."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
