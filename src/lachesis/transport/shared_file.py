"""Memory that processes on one machine share through a file, in /dev/shm where there is one."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lachesis.common.errors import EngineError

_PREFIX = "lachesis-weights-"
_ALIGNMENT = 64


class SharedFile:
    """A file that is a storage, readable and writable by this user alone.

    Its maker holds a lock on it as long as it lives, so that files of processes that were killed can be told
    from those in use; :func:`create_file` removes them.
    """

    def __init__(self, path: Path, nbytes: int, descriptor: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.storage = _mapped(path, nbytes)
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Remove the file. Memory that is mapped stays until its last tensor is gone. Idempotent."""
        if self._descriptor is None:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None


def default_directory() -> Path:
    """/dev/shm, which is memory, or where there is none the directory of temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def create_file(nbytes: int, directory: Path | None = None) -> SharedFile:
    """A new file of ``nbytes`` zeros.

    Raises:
        EngineError: there is no room for it, or the directory cannot be written.
    """
    directory = directory or default_directory()
    nbytes = max(nbytes, 1)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_orphans(directory)
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)  # mode 0600
    except OSError as error:
        raise EngineError(
            f"no shared memory can be made in {directory}: {error.strerror}",
            remedy="name a directory that can be written",
        ) from error
    path = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink == 0:  # taken for an orphan before it was locked
            os.close(descriptor)
            return create_file(nbytes, directory)
        # Reserved now: memory that is not there kills a process that writes to it, without a message.
        os.posix_fallocate(descriptor, 0, nbytes)
        return SharedFile(path, nbytes, descriptor)
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise EngineError(
            f"{nbytes / 2**20:.1f} MiB of shared memory cannot be had in {directory}: {error}",
            remedy="free or enlarge it (docker: --shm-size), or name a directory on a disk",
        ) from error


def map_file(name: str, path: str | Path, nbytes: int) -> torch.UntypedStorage:
    """Map another process's file.

    Raises:
        EngineError: it is gone, of another size, or not this user's own.
    """
    remedy = "start the engine, or have it export its weights anew"
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise EngineError(
            f"the shared memory {path} of tensor {name!r} is gone: {error.strerror}", remedy=remedy
        ) from error
    ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    if not ours or not Path(path).name.startswith(_PREFIX):
        raise EngineError(
            f"the shared memory {path} of tensor {name!r} was not made by an engine of this user",
            remedy="run trainer and engine under the same user",
        )
    if status.st_size != nbytes:
        raise EngineError(
            f"size mismatch: the shared memory {path} of tensor {name!r} has {status.st_size} bytes, {nbytes} expected",
            remedy=remedy,
        )
    return _mapped(path, nbytes)


@torch.no_grad()
def share_tensors(tensors: Iterable[Tensor], directory: Path | None = None) -> SharedFile:
    """Move tensors on the CPU into one shared file. They stay the same objects with the same values.

    A tensor that is listed twice is moved once, so tied parameters stay tied. Tensors become contiguous.

    Raises:
        EngineError: as :func:`create_file`, or a tensor is not on the CPU.
    """
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    for tensor in unique:
        if tensor.device.type != "cpu":
            raise EngineError(f"a tensor on {tensor.device} cannot lie in a shared file", remedy="use CUDA IPC")
    starts: list[int] = []
    end = 0
    for tensor in unique:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    file = create_file(end, directory)
    for tensor, start in zip(unique, starts, strict=True):
        shape, dtype = tensor.shape, tensor.dtype
        stride = torch.empty(shape, device="meta").stride()
        place = torch.empty(0, dtype=dtype).set_(file.storage, start // dtype.itemsize, shape, stride)
        place.copy_(tensor)
        tensor.data = place
    return file


def share_module_parameters(module: torch.nn.Module, directory: Path | None = None) -> SharedFile:
    """Move a module's parameters into one shared file, ties included; buffers stay private.

    Raises:
        EngineError: as :func:`share_tensors`.
    """
    return share_tensors(module.parameters(), directory)


def _mapped(path: str | Path, nbytes: int) -> torch.UntypedStorage:
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    return storage


def _remove_orphans(directory: Path) -> None:
    """Remove this user's files whose maker has died."""
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # of another user, or just removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
