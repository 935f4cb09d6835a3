"""Adapters and checkpoints on their way to an engine: directories by version, each wholly there or not at all.

They are read once, minutes at most after they were written, by a process on this machine or on a file system
shared with it. So they are not forced to disk: that would take longer than all else, and a run that a power cut
ended resumes from its checkpoints, not from these.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lachesis.common.errors import EngineError, ModelError
from lachesis.common.files import atomic_directory, clean_leftovers

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


class VersionedDirectories:
    """``parent/v{version}`` for each version that was written, the latest few of which are kept.

    Args:
        parent: made at the first write; nothing else should live there.
        keep_last: how many of the latest writes stay, at least 1.
    """

    def __init__(self, parent: Path, *, keep_last: int) -> None:
        self.parent = Path(parent).absolute()
        self.keep_last = keep_last

    @contextmanager
    def writing(self, version: int) -> Generator[Path]:
        """Yield an empty directory that becomes that of ``version`` when the block ends without error.

        A directory that this version had before is replaced. An error removes what was written.

        Raises:
            EngineError: the disk is full or cannot be written.
        """
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            clean_leftovers(self.parent)
            with atomic_directory(self.path(version), durable=False) as temporary:
                yield temporary
        except OSError as error:
            raise self._write_error(error, version=version) from error

    def path(self, version: int) -> Path:
        """The directory of a version."""
        return self.parent / f"v{version}"

    def prune(self, *, serving: Path) -> None:
        """Delete all but the ``keep_last`` latest writes; never ``serving``, which the engine may read again."""
        # By time, not by version: a run that went back to an earlier step writes lower versions anew.
        written = sorted(self.parent.glob("v*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in written[self.keep_last :]:
            if path != serving:
                shutil.rmtree(path, ignore_errors=True)

    def _write_error(self, error: OSError, *, version: int) -> EngineError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space is left" if full else f"{error.strerror or error}"
        return EngineError(
            f"weight version {version} cannot be written to {self.path(version)}: {what}",
            remedy="free space on that disk, lower bridge.keep_last, or move run.dir to a larger disk"
            if full
            else "check the directory and its permissions",
        )


def save_adapter(directory: Path, *, tensors: Mapping[str, Tensor], config: bytes) -> None:
    """Write an adapter as peft does, into an empty directory.

    Args:
        tensors: by name without peft's prefix, on any device.
        config: the content of ``adapter_config.json``, see :func:`adapter_config`.

    Raises:
        OSError: as the file system says.
    """
    write_safetensors(
        directory / ADAPTER_WEIGHTS, {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    )
    (directory / ADAPTER_CONFIG).write_bytes(config)


def adapter_config(model: nn.Module) -> bytes:
    """The ``adapter_config.json`` that peft saves with the model's adapter.

    It is peft's own work, bytes and all, but takes longer than writing the tensors: it is made once, for it does
    not change while an adapter is trained.

    Raises:
        ModelError: the model has no adapter.
    """
    if not isinstance(model, PeftModel):
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
    """The tensors on the CPU, contiguous.

    An adapter is hundreds of small tensors, and fetching each from a GPU waits for the GPU each time: those on one
    are packed there and fetched at once.
    """
    found = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if not tensor.is_cuda}
    places = {(t.device, t.dtype) for t in tensors.values() if t.is_cuda}
    for device, dtype in places:
        group = {name: t for name, t in tensors.items() if t.device == device and t.dtype == dtype}
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group.values()])
        host = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat)
        parts = host.split([tensor.numel() for tensor in group.values()])
        found |= {name: part.view(t.shape) for (name, t), part in zip(group.items(), parts, strict=True)}
    return {name: found[name] for name in tensors}
