"""Bridges through a directory: saved by the trainer, then loaded by the running or a newly started engine.

Directories are read once, minutes at most after they were written, by a process on this machine or on a file system
shared with it. So they are not forced to disk: that would take longer than all else, and a run that a power cut
ended resumes from its checkpoints, not from these.
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # a path of what?
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lachesis.bridges.base import EngineLeftOut, PolicyT
from lachesis.bridges.external import Command, ExternalBridge, Servers
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, EngineUnreachable, ModelError, StaleWeights
from lachesis.common.files import atomic_directory, clean_leftovers
from lachesis.config.schema import BridgeCapabilities
from lachesis.engines.embedded.adapters import is_adapted
from lachesis.engines.http.control import ServerControl

logger = logging.getLogger(__name__)

# Under which requests may ask for the policy's adapter.
ADAPTER_NAME = "policy"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
# A file of a checkpoint holds about this much, which bounds what is in memory twice while it is written.
SHARD_BYTES = 512 * 2**20

# Writes a policy's weights into an empty directory.
Save = Callable[[PolicyT, Path], None]
# Has a server take the weights in a directory as those of a version.
Load = Callable[[ServerControl, Path, int, Deadline], None]


class SavedBridge(ExternalBridge[PolicyT]):
    """Bridge with a directory for each version, which running servers load, or servers started for it.

    They are started anew where ``capabilities`` say that the bridge owns its engine; ``sync_s`` covers that start.

    Args:
        directory: as ``<run>/adapters``; the servers have to be allowed to load from it.
        keep_last: directories that stay; the one that is being served always does.
        save: what is saved, an :class:`AdapterWriter` or :class:`CheckpointFiles`.
        load: how a server takes it, :func:`load_adapter`, :func:`load_checkpoint` or :func:`started_on_it`.
        done: logged after each transfer, of its version and its seconds.
        command: where servers are started on the directory, makes the command that does so.
    """

    def __init__(
        self,
        servers: Servers[PolicyT],
        *,
        capabilities: BridgeCapabilities,
        directory: Path,
        keep_last: int,
        save: Save[PolicyT],
        load: Load,
        done: str,
        command: Command | None = None,
    ) -> None:
        super().__init__(servers, capabilities=capabilities)
        self._saved = VersionedDirectories(directory, keep_last=keep_last)
        self._save = save
        self._load = load
        self._done = done
        self._command = command

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        """Save and load the weights. Raises EngineError, before the engine is told, if the disk cannot be written."""
        started = time.perf_counter()
        with self._saved.writing(version) as directory:
            self._save(self.policy, directory)
        path = self._saved.path(version)
        if self.capabilities.owns_engine:
            assert self._owned is not None, "config.rules checks it"
            self._owned.restart(deadline=deadline, command=self._command, checkpoint=path)
        self._load_on_all(path, version, deadline)
        if self.capabilities.owns_engine:
            self._build_proof()
        self._saved.prune(serving=path)
        logger.info(self._done, version, time.perf_counter() - started)

    def _load_on_all(self, path: Path, version: int, deadline: Deadline) -> None:
        """Have all servers load what was saved.

        Raises:
            EngineLeftOut: some could not, and are dead from now on.
            EngineError, DeadlineExceeded: none could.
        """
        failed: dict[str, EngineError | DeadlineExceeded] = {}
        loaded: list[str] = []

        def load(server: ServerControl) -> None:
            try:
                self._load(server, path, version, deadline)
            except (EngineUnreachable, StaleWeights):
                raise
            except (EngineError, DeadlineExceeded) as error:
                failed[server.url] = error
            else:
                loaded.append(server.url)

        self.engine.on_all(load)
        if not failed:
            return
        first = next(iter(failed.values()))
        if not loaded:
            raise first
        for url, error in failed.items():
            self.engine.fleet.died(url, error.message)
        raise EngineLeftOut(first.message) from first


class VersionedDirectories:
    """Directories ``parent/v{version}`` of written versions, the latest few of which are kept.

    Args:
        parent: made at the first write; nothing else should live there.
        keep_last: how many of the latest writes stay, at least 1.
    """

    def __init__(self, parent: Path, *, keep_last: int) -> None:
        self.parent = Path(parent).absolute()
        self.keep_last = keep_last

    @contextmanager
    def writing(self, version: int) -> Generator[Path]:
        """Yield an empty directory that becomes that of ``version`` if the block ends without an error.

        An earlier directory of this version is replaced. An error removes what was written.

        Raises:
            EngineError: the disk is full or cannot be written.
        """
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            clean_leftovers(self.parent)
            with atomic_directory(self.path(version), durable=False) as temporary:
                yield temporary
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "no space is left" if full else f"{error.strerror or error}"
            raise EngineError(
                f"weight version {version} cannot be written to {self.path(version)}: {what}",
                remedy="free space on that disk, lower bridge.keep_last, or move run.dir to a larger disk"
                if full
                else "check the directory and its permissions",
            ) from error

    def path(self, version: int) -> Path:
        """Return the directory of a version."""
        return self.parent / f"v{version}"

    def prune(self, *, serving: Path) -> None:
        """Delete all but the ``keep_last`` latest writes; never ``serving``, which the engine may read again."""
        # By time, not by version: a run that went back to an earlier step writes lower versions anew.
        written = sorted(self.parent.glob("v*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in written[self.keep_last :]:
            if path != serving:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class AdapterWriter(Generic[PolicyT]):
    """Writer of a policy's adapter as peft saves it: its ``tensors`` by name, and its ``config``, requested once."""

    tensors: Callable[[PolicyT], Mapping[str, Tensor]]
    config: Callable[[PolicyT], bytes]
    _config_bytes: bytes | None = field(default=None, init=False)

    def __call__(self, policy: PolicyT, directory: Path) -> None:
        if self._config_bytes is None:
            self._config_bytes = self.config(policy)
        save_adapter(directory, tensors=self.tensors(policy), config=self._config_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles(Generic[PolicyT]):
    """Writer of all ``weights`` of a policy by Hugging Face's names, and its ``companions``, the other files."""

    weights: Callable[[PolicyT], Iterable[tuple[str, Tensor]]]
    companions: Callable[[PolicyT, Path], None]

    def __call__(self, policy: PolicyT, directory: Path) -> None:
        write_checkpoint(directory, self.weights(policy))
        self.companions(policy, directory)


def load_adapter(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """Have the server replace its adapter with the saved one."""
    server.load_adapter(path, name=ADAPTER_NAME, version=version, deadline=deadline)


def load_checkpoint(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """Have the server replace its weights with the checkpoint."""
    server.reload(path, version=version, deadline=deadline)


def started_on_it(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """Tell a server that was started on the checkpoint its version."""
    server.set_version(version, deadline=deadline)


def write_checkpoint(directory: Path, weights: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write weights as safetensors files with an index, as transformers and vLLM read them.

    They are taken one by one, and at most one file's worth is held. Files are named as transformers names them, which
    is by their number.
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
    written = sorted(set(places.values()))
    named = {name: _final_name(number, of=len(written)) for number, name in enumerate(written, start=1)}
    for name, final in named.items():
        (directory / name).rename(directory / final)
    weight_map = {name: named[file] for name, file in sorted(places.items())}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _final_name(number: int, *, of: int) -> str:
    return "model.safetensors" if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def save_companions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a checkpoint's files besides its weights: the configurations and the tokenizer."""
    config: Any = copy.deepcopy(model.config)
    # FSDP2 makes a class of its own of what it shards.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = model.dtype
    parts: list[Any] = [config, model.generation_config, tokenizer]
    for part in parts:
        if part is not None:
            part.save_pretrained(directory)


def save_adapter(directory: Path, *, tensors: Mapping[str, Tensor], config: bytes) -> None:
    """Write an adapter as peft does, into an empty directory.

    Args:
        tensors: by name without peft's prefix, on any device.
        config: the content of ``adapter_config.json``, see :func:`adapter_config`.
    """
    write_safetensors(
        directory / ADAPTER_WEIGHTS, {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    )
    (directory / ADAPTER_CONFIG).write_bytes(config)


def adapter_config(model: nn.Module) -> bytes:
    """Return the ``adapter_config.json`` that peft saves with the model's adapter.

    It is peft's own work, bytes and all, but takes longer than writing the tensors: it is made once, for it does
    not change while an adapter is trained.

    Raises:
        ModelError: the model has no adapter.
    """
    if not is_adapted(model):
        raise ModelError(
            f"PEFT library required: {type(model).__name__} has no adapter",
            remedy="set adapter.kind to lora, or use a bridge that transfers full weights",
        )
    with tempfile.TemporaryDirectory() as directory:
        # No tensors: the configuration is all that is wanted of peft here.
        model.save_pretrained(directory, state_dict={}, save_embedding_layers=False)
        return (Path(directory) / ADAPTER_CONFIG).read_bytes()


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, on any device and of any layout, in the safetensors format.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    try:
        save_file(on_host(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        full = os.strerror(errno.ENOSPC) in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error


@torch.no_grad()
def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous.

    An adapter is hundreds of small tensors, and fetching each from a GPU waits for the GPU each time: those on one
    are packed there and fetched at once.
    """
    found = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if not tensor.is_cuda}
    places = {(t.device, t.dtype) for t in tensors.values() if t.is_cuda}
    for device, dtype in places:
        group = {name: t for name, t in tensors.items() if t.device == device and t.dtype == dtype}
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group.values()])
        host = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat)
        parts = host.split_with_sizes([tensor.numel() for tensor in group.values()])
        found |= {name: part.view(t.shape) for (name, t), part in zip(group.items(), parts, strict=True)}
    return {name: found[name] for name in tensors}
