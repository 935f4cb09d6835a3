"""Weights go through a directory: saved by the trainer, then loaded by the running engine or by one that is started."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Generic

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lachesis.bridges.adapters import VersionedDirectories, save_adapter, write_safetensors
from lachesis.bridges.base import PolicyT
from lachesis.bridges.external import ExternalBridge, ProofBuilder
from lachesis.bridges.owned import Command, OwnedEngine
from lachesis.common.deadline import Deadline
from lachesis.config.schema import BridgeCapabilities
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl

logger = logging.getLogger(__name__)

# Under which requests may ask for the policy's adapter.
ADAPTER_NAME = "policy"
# A file of a checkpoint holds about this much, which bounds what is in memory twice while it is written.
SHARD_BYTES = 512 * 2**20

# Writes a policy's weights into an empty directory.
Save = Callable[[PolicyT, Path], None]
# Has a server take the weights in a directory as those of a version.
Load = Callable[[ServerControl, Path, int, Deadline], None]


class SavedBridge(ExternalBridge[PolicyT]):
    """A directory for each version, from which the servers load it: as they run, or each time started anew.

    They are started anew where ``capabilities`` say that the bridge owns its engine; ``sync_s`` covers that start.

    Args:
        directory: as ``<run>/adapters``; the servers have to be allowed to load from it.
        keep_last: directories that stay; the one that is being served always does.
        save: what is saved, an :class:`AdapterFiles` or :class:`CheckpointFiles`.
        load: how a server takes it, :func:`load_adapter`, :func:`load_checkpoint` or :func:`started_on_it`.
        done: logged after each transfer, of its version and its seconds.
        command: where servers are started on the directory, makes the command that does so.
        capabilities, engine, proof_builder, owned, trains_in_engine, sync_s, every_steps: as in
            :class:`ExternalBridge`.
    """

    def __init__(
        self,
        *,
        capabilities: BridgeCapabilities,
        engine: HttpEngine,
        directory: Path,
        keep_last: int,
        save: Save[PolicyT],
        load: Load,
        done: str,
        proof_builder: ProofBuilder[PolicyT] | None,
        command: Command | None = None,
        owned: OwnedEngine | None = None,
        trains_in_engine: bool = False,
        sync_s: float | None = None,
        every_steps: int = 1,
    ) -> None:
        super().__init__(
            capabilities=capabilities,
            engine=engine,
            proof_builder=proof_builder,
            owned=owned,
            trains_in_engine=trains_in_engine,
            sync_s=sync_s,
            every_steps=every_steps,
        )
        self._saved = VersionedDirectories(directory, keep_last=keep_last)
        self._save = save
        self._load = load
        self._done = done
        self._command = command

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        """Raises EngineError where the disk is full or cannot be written; the engine has not been told then."""
        started = time.perf_counter()
        with self._saved.writing(version) as directory:
            self._save(self.policy, directory)
        path = self._saved.path(version)
        if self.capabilities.owns_engine:
            assert self._owned is not None, "config.rules checks it"
            self._owned.restart(deadline=deadline, command=self._command, checkpoint=path)
        self._engine.on_all(lambda server: self._load(server, path, version, deadline))
        if self.capabilities.owns_engine:
            self._build_proof()
        self._saved.prune(serving=path)
        logger.info(self._done, version, time.perf_counter() - started)


class AdapterFiles(Generic[PolicyT]):
    """Saves a policy's adapter as peft does.

    Args:
        tensors: the adapter's tensors by name, as :func:`lachesis.bridges.extract.lora_tensors`.
        config: its ``adapter_config.json``, as :func:`lachesis.bridges.adapters.adapter_config`; asked once.
    """

    def __init__(
        self, *, tensors: Callable[[PolicyT], Mapping[str, Tensor]], config: Callable[[PolicyT], bytes]
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._config_bytes: bytes | None = None

    def __call__(self, policy: PolicyT, directory: Path) -> None:
        if self._config_bytes is None:
            self._config_bytes = self._config(policy)
        save_adapter(directory, tensors=self._tensors(policy), config=self._config_bytes)


class CheckpointFiles(Generic[PolicyT]):
    """Saves all weights of a policy, an adapter merged into them, with what else a checkpoint has.

    Args:
        weights: all weights by Hugging Face's names, one by one, as :func:`lachesis.bridges.extract.full_weights`.
        companions: writes the other files, as :func:`save_companions`.
    """

    def __init__(
        self,
        *,
        weights: Callable[[PolicyT], Iterable[tuple[str, Tensor]]],
        companions: Callable[[PolicyT, Path], None],
    ) -> None:
        self._weights = weights
        self._companions = companions

    def __call__(self, policy: PolicyT, directory: Path) -> None:
        write_checkpoint(directory, self._weights(policy))
        self._companions(policy, directory)


def load_adapter(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """The server takes the adapter in place of the one before."""
    server.load_adapter(path, name=ADAPTER_NAME, version=version, deadline=deadline)


def load_checkpoint(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """The server takes the checkpoint in place of its weights."""
    server.reload(path, version=version, deadline=deadline)


def started_on_it(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """The server was started on the checkpoint, and learns its version."""
    server.set_version(version, deadline=deadline)


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
