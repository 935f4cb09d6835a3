"""Tensors that two processes map at once: CUDA IPC on a GPU, a file in shared memory on the CPU. No pickle.

An exported tensor is described by a :class:`SharedTensor`, which goes to the other process as JSON and is mapped there
by :class:`Attachments`. What either side writes, the other reads; nothing else synchronizes them, so the writer waits
for its device (``torch.cuda.synchronize()``) before it announces a write. The exporter's memory must outlive the
importer's use.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from lachesis.common.errors import EngineError, first_line

_PLACE = ("shape", "stride", "tensor_offset", "dtype")
# First byte of torch's handle of memory in expandable segments.
_EXPANDABLE_SEGMENT = ord("e")
# Prefix of the names of shared files, and the multiple at which tensors in them start.
_FILE_PREFIX = "lachesis-weights-"
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class CudaStorage:
    """Storage on a GPU: ``storage_size`` bytes at byte ``storage_offset`` of the exporter's allocation.

    ``device_index`` counts the exporter's visible devices, ``device_uuid`` identifies the GPU; only CUDA and torch
    understand the fields that end in ``_b64``.
    """

    device_index: int
    ipc_handle_b64: str
    storage_size: int
    storage_offset: int
    ref_counter_handle_b64: str
    ref_counter_offset: int
    event_handle_b64: str
    event_sync_required: bool
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class FileStorage:
    """Storage that is a whole file, ``storage_size`` bytes long."""

    path: str
    storage_size: int


# The eight items of a CUDA IPC export, in torch's order.
CUDA_ITEMS = tuple(field.name for field in fields(CudaStorage) if field.name != "device_uuid")
_CUDA, _FILE = TypeAdapter(CudaStorage), TypeAdapter(FileStorage)


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Place of a tensor in a shared storage: shape and stride, offset in elements, dtype by torch's name."""

    storage: CudaStorage | FileStorage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    tensor_offset: int
    dtype: str

    @property
    def device(self) -> str:
        """Return the tensor's device, as its exporter numbers devices."""
        return f"cuda:{self.storage.device_index}" if isinstance(self.storage, CudaStorage) else "cpu"

    def to_json(self) -> dict[str, Any]:
        """Return one flat object of numbers, strings and lists."""
        place = {key: getattr(self, key) for key in _PLACE}
        return {**asdict(self.storage), **place, "shape": list(self.shape), "stride": list(self.stride)}

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> SharedTensor:
        """Parse what :meth:`to_json` returned.

        Raises:
            EngineError: fields are missing or wrong, or the tensor does not fit into its storage.
        """
        try:
            shape = tuple(int(n) for n in entry["shape"])
            tensor = cls(
                storage=_parse_storage(name, entry),
                shape=shape,
                # The documented form has neither stride nor offset; a whole, contiguous storage needs neither.
                stride=tuple(int(n) for n in entry["stride"]) if "stride" in entry else _contiguous(shape),
                tensor_offset=int(entry.get("tensor_offset", 0)),
                dtype=dtype_name(parse_dtype(str(entry["dtype"]))),
            )
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise EngineError(
                f"the description of the shared tensor {name!r} is wrong: {type(error).__name__}: {error}",
                remedy="have the engine export its weights again",
            ) from error
        _check_fits(name, tensor)
        return tensor


def export_cuda(tensor: Tensor) -> SharedTensor:
    """Describe a CUDA tensor so that another process on the same GPU can map it. The tensor has to stay alive.

    Raises:
        EngineError: it is not on a GPU, or its memory cannot be shared.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        raise EngineError(f"CUDA IPC cannot share a tensor on {tensor.device}", remedy="share it through a file")
    try:
        share: Any = tensor.untyped_storage()._share_cuda_  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]  # private, and the only way
        items: tuple[Any, ...] = share()
    except RuntimeError as error:
        raise EngineError(
            f"the GPU memory of a tensor {tuple(tensor.shape)} cannot be shared: {first_line(error)}",
            remedy="start the engine without --enable-sleep-mode, whose allocator cannot share memory, and with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
        ) from error
    values: list[Any] = [base64.b64encode(x).decode("ascii") if isinstance(x, bytes) else x for x in items]
    storage = CudaStorage(**dict(zip(CUDA_ITEMS, values, strict=True)), device_uuid=gpu_uuid(tensor.device))
    return _described(tensor, storage)


def export_from_file(tensor: Tensor, file: SharedFile) -> SharedTensor:
    """Describe a tensor that lies in ``file`` (see :func:`share_tensors`)."""
    storage = FileStorage(path=str(file.path), storage_size=file.nbytes)
    return _described(tensor.detach(), storage)


class Attachments:
    """Storages of other processes, each mapped into this one once.

    They live until :meth:`close`.

    Tensors keep their storage alive by themselves; this holds them all, because CUDA may move a mapping that is closed
    and reopened.
    """

    def __init__(self) -> None:
        self._storages: dict[CudaStorage | FileStorage, torch.UntypedStorage] = {}

    def tensor(self, name: str, shared: SharedTensor) -> Tensor:
        """Return a view of the other process's memory: its values are that process's, and writes go there.

        Raises:
            EngineError: the memory is gone, on a GPU that this process does not see, or cannot be shared.
        """
        key = shared.storage
        if isinstance(key, CudaStorage):
            # Two exports of one storage have a reference counter and an event each.
            key = replace(
                key, ref_counter_handle_b64="", ref_counter_offset=0, event_handle_b64="", event_sync_required=False
            )
        if key not in self._storages:
            if isinstance(shared.storage, CudaStorage):
                self._storages[key] = _open_cuda(name, shared.storage)
            else:
                self._storages[key] = map_file(name, shared.storage.path, shared.storage.storage_size)
        storage = self._storages[key]
        empty = torch.empty(0, dtype=parse_dtype(shared.dtype), device=storage.device)
        return empty.set_(storage, shared.tensor_offset, shared.shape, shared.stride)

    def close(self) -> None:
        """Forget the storages; each is unmapped when its last tensor is gone. Idempotent."""
        self._storages.clear()


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of the dtype without the module, as in "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(text: str) -> torch.dtype:
    """Return the dtype with this name, with or without ``torch.``.

    Raises ValueError if there is none.
    """
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype")
    return dtype


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _described(tensor: Tensor, storage: CudaStorage | FileStorage) -> SharedTensor:
    return SharedTensor(
        storage=storage,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        tensor_offset=int(tensor.storage_offset()),
        dtype=dtype_name(tensor.dtype),
    )


def _parse_storage(name: str, entry: Mapping[str, Any]) -> CudaStorage | FileStorage:
    if "path" in entry:
        return _FILE.validate_python(entry)
    missing = [item for item in CUDA_ITEMS if item not in entry]
    if missing:
        raise EngineError(
            f"the CUDA IPC handle of {name!r} lacks {', '.join(missing)}: expected a tuple of 8 items, "
            f"found {len(CUDA_ITEMS) - len(missing)}",
            remedy="have this version of the engine export its weights again",
        )
    return _CUDA.validate_python(entry)


def _check_fits(name: str, tensor: SharedTensor) -> None:
    if len(tensor.stride) != len(tensor.shape) or min((*tensor.shape, *tensor.stride, tensor.tensor_offset, 0)) < 0:
        raise EngineError(
            f"the shared tensor {name!r} has shape {list(tensor.shape)}, stride {list(tensor.stride)} and offset "
            f"{tensor.tensor_offset}, which cannot be a tensor's",
            remedy="have the engine export its weights again",
        )
    last = tensor.tensor_offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    needed = (last + 1) * parse_dtype(tensor.dtype).itemsize if 0 not in tensor.shape else 0
    if needed > tensor.storage.storage_size:
        raise EngineError(
            f"size mismatch: the shared tensor {name!r} {list(tensor.shape)} in {tensor.dtype} needs {needed} bytes, "
            f"but its storage has {tensor.storage.storage_size}",
            remedy="have the engine export its weights again",
        )


def _open_cuda(name: str, storage: CudaStorage) -> torch.UntypedStorage:
    device = _local_device(name, storage)
    torch.cuda.init()
    try:
        handles = {key: base64.b64decode(getattr(storage, key), validate=True) for key in CUDA_ITEMS if "_b64" in key}
        open_shared: Any = torch.UntypedStorage._new_shared_cuda  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]  # private, and the only way
        return open_shared(
            device,
            handles["ipc_handle_b64"],
            storage.storage_size,
            storage.storage_offset,
            handles["ref_counter_handle_b64"],
            storage.ref_counter_offset,
            handles["event_handle_b64"],
            storage.event_sync_required,
        )
    except (RuntimeError, binascii.Error, TypeError) as error:
        expandable = base64.b64decode(storage.ipc_handle_b64 + "==")[:1] == bytes([_EXPANDABLE_SEGMENT])
        cause = "it lies in expandable segments, which this process may not open" if expandable else "CUDA refused"
        remedy = (
            "start the engine with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            if expandable
            else "check that the engine still runs, that it is another process under the same user, and that both "
            "containers, if any, share the IPC namespace (docker: --ipc=host)"
        )
        raise EngineError(
            f"the engine's tensor {name!r} cannot be mapped: {cause}: {first_line(error)}", remedy=remedy
        ) from error


def gpu_uuid(device: torch.device | int) -> str:
    """Return the UUID of a GPU, whatever its number in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # untyped in torch


def _local_device(name: str, storage: CudaStorage) -> int:
    """Return this process's number for the exporter's GPU.

    CUDA_VISIBLE_DEVICES renumbers GPUs in each process.
    """
    count = torch.cuda.device_count()
    if not storage.device_uuid:
        found = [storage.device_index] if storage.device_index < count else []
    else:
        found = [i for i in range(count) if gpu_uuid(i) == storage.device_uuid]
    if found:
        return found[0]
    raise EngineError(
        f"the engine's tensor {name!r} is on GPU {storage.device_uuid or storage.device_index}, which is not among "
        f"the {count} GPU{'s' * (count != 1)} that this process sees",
        remedy="put trainer and engine on the same GPU (CUDA_VISIBLE_DEVICES)",
    )


class SharedFile:
    """File that serves as a storage, readable and writable by this user alone.

    Its maker holds a lock on it as long as it lives, so that files of processes that were killed can be told
    from those in use; :func:`create_file` removes the former.
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


def memory_directory() -> Path:
    """Return /dev/shm, which is memory, or the directory of temporary files if there is none."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def create_file(nbytes: int, directory: Path | None = None) -> SharedFile:
    """Create a file of ``nbytes`` zeros.

    Raises:
        EngineError: there is no room for it, or the directory cannot be written.
    """
    directory = directory or memory_directory()
    nbytes = max(nbytes, 1)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_orphans(directory)
        descriptor, name = tempfile.mkstemp(prefix=_FILE_PREFIX, dir=directory)  # mode 0600
    except OSError as error:
        raise EngineError(
            f"no shared memory can be created in {directory}: {error.strerror}", remedy="choose a writable directory"
        ) from error
    path = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink == 0:  # taken for an orphan before it was locked
            os.close(descriptor)
            return create_file(nbytes, directory)
        # Reserve it now: a process that writes to memory that is not available is killed without a message.
        os.posix_fallocate(descriptor, 0, nbytes)
        return SharedFile(path, nbytes, descriptor)
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise EngineError(
            f"{nbytes / 2**20:.1f} MiB of shared memory cannot be allocated in {directory}: {error}",
            remedy="free some of it or enlarge it (docker: --shm-size), or choose a directory on a disk",
        ) from error


def map_file(name: str, path: str | Path, nbytes: int) -> torch.UntypedStorage:
    """Map another process's file.

    Raises:
        EngineError: the file is gone, of another size, or not this user's own.
    """
    remedy = "start the engine, or have it export its weights again"
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise EngineError(
            f"the shared memory {path} of tensor {name!r} is gone: {error.strerror}", remedy=remedy
        ) from error
    ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    if not ours or not Path(path).name.startswith(_FILE_PREFIX):
        raise EngineError(
            f"the shared memory {path} of tensor {name!r} was not made by an engine of this user",
            remedy="run trainer and engine under the same user",
        )
    if status.st_size != nbytes:
        raise EngineError(
            f"size mismatch: the shared memory {path} of tensor {name!r} has {status.st_size} bytes, not {nbytes}",
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
            raise EngineError(f"a shared file cannot hold a tensor on {tensor.device}", remedy="use CUDA IPC")
    starts: list[int] = []
    end = 0
    for tensor in unique:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    file = create_file(end, directory)
    for tensor, start in zip(unique, starts, strict=True):
        shape, dtype = tensor.shape, tensor.dtype
        stride = _contiguous(shape)
        place = torch.empty(0, dtype=dtype).set_(file.storage, start // dtype.itemsize, shape, stride)
        place.copy_(tensor)
        tensor.data = place
    return file


def _mapped(path: str | Path, nbytes: int) -> torch.UntypedStorage:
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    return storage


def _remove_orphans(directory: Path) -> None:
    """Remove this user's files whose maker has died."""
    for path in directory.glob(f"{_FILE_PREFIX}*"):
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
