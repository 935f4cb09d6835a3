"""Checkpoints of a sharded policy's tensors: each rank writes its own rows, and none holds them whole.

The format is that of torch.distributed.checkpoint (DCP), one file for each rank beside an index, ``.metadata``, which
locates every part: any number of ranks, or a process alone, reads back what it keeps. Ranks communicate only before the
first byte is written and after the last, so that a thread may write while they train. Torch's plans, results and index
are pickles, from which only torch's own records are read.
"""

from __future__ import annotations

import pickle
import threading
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.functional import pad

from lachesis.common.errors import CheckpointError, first_line
from lachesis.common.files import crc32_of
from lachesis.train.host_memory import host_copy, local_part

INDEX = ".metadata"
# Prefixes of the names that stand for tensors, by the owner of the tensor.
WEIGHTS, OPTIMIZER, REFERENCE, NOISE = "weights/", "optimizer/", "reference/", "noise/"
# The only classes that torch's pickles may name besides dtypes, because a pickle can call any function.
_ALLOWED = tomllib.loads(Path(__file__).with_name("pickled_records.toml").read_text(encoding="utf-8"))
_RECORDS = frozenset((module, name) for module, names in _ALLOWED.items() for name in names) | {(__name__, "Written")}


class Written(NamedTuple):
    """File that a rank has written, relative to the directory of the parts."""

    name: str
    size: int
    crc32: int


def sharded_as(like: DTensor, local: Tensor) -> DTensor:
    """Return a tensor of which this rank has ``local``, cut as ``like`` is.

    It stays on its device, regardless of that of ``like``.
    """
    shape = TensorMeta(like.shape, like.stride(), local.dtype)
    constructor: Any = DTensor  # its stub declares no arguments
    return constructor(
        local.detach(), DTensorSpec(like.device_mesh, like.placements, tensor_meta=shape), requires_grad=False
    )


def whole_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes that all ranks write together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class PartsSave:
    """Unfinished save of a checkpoint's parts, which all ranks begin and finish together.

    Args:
        tensors: by name: a DTensor, or a tensor that belongs to this rank.
        directory: the same for all ranks; created if missing.
        copied: write copies in host memory: the tensors may change as soon as this returns. Otherwise they must stay
            until the save is :attr:`written`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], directory: Path, *, copied: bool) -> None:
        self._writer = FileSystemWriter(directory)
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._directory = directory
        self._plan, self._metadata = self._agree(dict(tensors))
        self._results: list[Any] = []
        self._files: list[Written] = []
        self._failure = ""
        if copied:
            self._planner.state_dict = on_host(tensors)
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def written(self) -> bool:
        """Return True if this rank's part is on disk, or has failed."""
        return not self._thread.is_alive()

    def finish(self) -> list[Written]:
        """Wait for all ranks' parts, and write the index; rank 0 returns all files, others none.

        Raises:
            CheckpointError: on rank 0, if a rank could not write its part.
        """
        self._thread.join()
        told = _gathered((self._failure, self._results, self._files))
        if told is None:
            return []
        for rank, (failure, _, _) in enumerate(told):
            if failure:
                raise CheckpointError(
                    f"rank {rank} could not write its part of {self._directory}: {failure}",
                    remedy="check its permissions and the free disk space; earlier checkpoints are untouched",
                )
        self._writer.finish(self._metadata, [results for _, results, _ in told])
        return [*(file for _, _, files in told for file in files), _written(self._directory, INDEX)]

    def _agree(self, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
        """Agree with the other ranks on the writer of each tensor; one that several ranks hold is written once."""
        first = dist.get_rank() == 0
        self._planner.set_up_planner(tensors, self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first)
        plans = _gathered(self._writer.prepare_local_plan(self._planner.create_local_plan()))
        metadata = None
        if plans is not None:
            plans, metadata = self._planner.create_global_plan(plans)
            plans = self._writer.prepare_global_plan(plans)
        return self._planner.finish_plan(_dealt(plans)), metadata

    def _write(self) -> None:
        try:
            if self._device is not None:  # threads have separate current devices; torch waits for copies from that
                torch.cuda.set_device(self._device)
            self._results = self._writer.write_data(self._plan, self._planner).wait()
            names = {result.storage_data.relative_path for result in self._results}
            self._files = [_written(self._directory, name) for name in sorted(names)]
        except Exception as error:  # the ranks exchange any error when they meet
            self._failure = f"{type(error).__name__}: {first_line(error)}"
        self._planner.state_dict = {}


def _gathered(own: object) -> list[Any] | None:
    """Gather the objects of all ranks on rank 0.

    Like torch's gather_object, except that nothing received is executed.
    """
    data = _pickled(own)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()]))
    longest = max(int(size) for size in sizes)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(pad(data, (0, longest - data.numel())), received)
    return None if received is None else [_unpickled(one) for one in received]


def _dealt(parts: Sequence[object] | None) -> Any:
    """Return this rank's part of rank 0's list, as torch's scatter_object_list does."""
    sent = None if parts is None else [_pickled(part) for part in parts]
    longest = torch.tensor([0 if sent is None else max(data.numel() for data in sent)])
    dist.broadcast(longest, 0)
    room = torch.empty(int(longest), dtype=torch.uint8)
    padded = None if sent is None else [pad(data, (0, len(room) - data.numel())) for data in sent]
    dist.scatter(room, padded)
    return _unpickled(room)


def _pickled(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    """Load one pickle; ignore trailing bytes."""
    return _RecordsUnpickler(BytesIO(data.numpy().tobytes())).load()


@torch.no_grad()
def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors on the CPU, of DTensors their local parts."""
    locals_ = {name: local_part(tensor) for name, tensor in tensors.items()}
    copies = {name: host_copy(local.detach()) for name, local in locals_.items()}
    if any(local.is_cuda for local in locals_.values()):
        torch.cuda.synchronize()
    return {
        name: sharded_as(like, copies[name]) if isinstance(like, DTensor) else copies[name]
        for name, like in tensors.items()
    }


def saved_tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint's parts, on the meta device.

    Raises:
        CheckpointError: the index cannot be read.
    """
    with _read_errors(directory):
        found = _Reader(directory).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@torch.no_grad()
def read_parts(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place by name, a DTensor with this rank's part. Needs no other rank.

    Raises:
        CheckpointError: they are missing, or of other shapes.
    """
    with _read_errors(directory), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
        load(dict(tensors), storage_reader=_Reader(directory), no_dist=True)


def read_whole(directory: Path) -> dict[str, Tensor]:
    """Return all tensors whole, on the CPU, except those of a single rank.

    Raises CheckpointError.
    """
    shapes = {name: tensor for name, tensor in saved_tensors(directory).items() if not name.startswith(NOISE)}
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in shapes.items()}
    read_parts(directory, tensors)
    return tensors


class _Reader(FileSystemReader):
    """Unpickler for an index, which refuses to call anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self.path, INDEX).open("rb") as file:
            metadata: Metadata = _RecordsUnpickler(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _RecordsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _RECORDS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a checkpoint cannot contain {module}.{name}")


def _written(directory: Path, name: str) -> Written:
    path = directory / name
    return Written(name, path.stat().st_size, crc32_of(path))


@contextmanager
def _read_errors(directory: Path) -> Iterator[None]:
    """Turn torch's errors for an unreadable checkpoint into a CheckpointError."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is a BaseException
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise CheckpointError(
            f"the parts of the checkpoint in {directory} cannot be read: {type(cause).__name__}: {first_line(cause)}",
            remedy="resume with the settings and the version of torch with which the run saved it",
        ) from error
