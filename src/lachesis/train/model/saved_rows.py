"""Loading of a model by rows: each rank reads only its own, so that none ever has the whole in memory.

The model is built with untouched memory, which costs addresses only. Sharding keeps a rank's rows of each parameter,
and only then are they read from the checkpoint's files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from lachesis.bridges.sent_weights import as_saved, own_name

logger = logging.getLogger(__name__)

# The bytes to read before a file is unmapped, because pages read from a mapped file count as memory until then.
_WINDOW_BYTES = 64 * 2**20
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Locations of the rows of a model's parameters in files.

    Attributes:
        files: the file of each tensor of the checkpoint.
        parts: the tensors that a parameter consists of: itself; or, for each row of stacked experts, those that are
            concatenated in the first dimension.
    """

    files: Mapping[str, Path]
    parts: Mapping[str, str | tuple[tuple[str, ...], ...]]

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Read this rank's rows of every parameter of the model that the checkpoint has, in place."""
        with closing(_Files(self.files)) as files:
            for name, parameter in model.named_parameters():
                parts = self.parts.get(own_name(name))
                if parts is not None:
                    local, first = local_rows(parameter)
                    self._read(files, parts, first=first, into=local)

    def _read(self, files: _Files, parts: str | tuple[tuple[str, ...], ...], *, first: int, into: Tensor) -> None:
        if not isinstance(parts, str):
            for row, names in zip(into, parts[first:], strict=False):
                row.copy_(torch.cat([files.all(name) for name in names]))
        elif into.ndim == 0:
            into.copy_(files.all(parts))
        else:
            step = max(1, _WINDOW_BYTES // max(1, into[:1].nbytes))
            for start in range(0, len(into), step):
                some = into[start : start + step]
                some.copy_(files.rows(parts, first + start, first + start + len(some)))


class _Files:
    """Reader of files that keeps one open at a time, for a short while."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._path: Path | None = None
        self._open: Any = None
        self._read = 0

    def all(self, name: str) -> Tensor:
        """Return a tensor; it is valid until the next call."""
        return self._counted(self._file_of(name).get_tensor(name))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor, valid until the next call."""
        return self._counted(self._file_of(name).get_slice(name)[start:stop])

    def _file_of(self, name: str) -> Any:
        path = self._files[name]
        if path != self._path or self._read > _WINDOW_BYTES:
            self.close()
            self._open = safe_open(path, framework="pt").__enter__()
            self._path, self._read = path, 0
        return self._open

    def _counted(self, tensor: Tensor) -> Tensor:
        self._read += tensor.nbytes
        return tensor

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._path = None


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """Return this rank's part of a parameter, live, and which row of the whole it begins with."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    local = parameter.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return local, offset[0]


def find_rows(
    model: PreTrainedModel, path: str, *, revision: Mapping[str, str], left_out: bool = False
) -> SavedRows | None:
    """Locate the parameters of a model in the safetensors files of ``path``, and read its buffers from there.

    Returns ``None``, with a log message, if any of them is not stored there unchanged, or others are; loading the whole
    model then reports what is wrong.

    Args:
        left_out: the checkpoint's architecture has more than this model.
    """
    changed = [o for c in get_model_conversion_mapping(model, add_legacy=False) for o in getattr(c, "operations", ())]
    if not all(isinstance(operation, MergeModulelist | Concatenate) for operation in changed):
        logger.info("%s differs from its files in its tensors: every rank loads the whole model", type(model).__name__)
        return None
    files = tensor_files(path, revision)
    if files is None:
        logger.info("%s has no safetensors files: every rank loads the whole model", path)
        return None
    shapes = dict(_shapes(files))
    parts = {name: _parts(model, name, p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if not _fits(parts[name], tuple(parameter.shape), shapes):
            logger.info("the files of %s do not have %s as one tensor: every rank loads the whole model", path, name)
            return None
    known = fill_buffers(model, files)
    for saved in parts.values():
        known |= {saved} if isinstance(saved, str) else {name for names in saved for name in names}
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]  # pyright: ignore[reportPrivateUsage]
    unknown = [name for name in files if name not in known and not any(re.search(pattern, name) for pattern in ignored)]
    if unknown and not left_out:
        logger.info("%s in the files of %s is unknown, so every rank loads the whole model", unknown[0], path)
        return None
    return SavedRows(files, parts)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, files: Mapping[str, Path]) -> set[str]:
    """Read the buffers that a model saves, such as a router's biases, in place; return their names in the files."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: set[str] = set()
    with closing(_Files(files)) as reader:
        for name, buffer in model.state_dict(keep_vars=True).items():
            if name not in parameters:
                ((saved, _),) = as_saved(model, [(name, torch.empty_like(buffer, device="meta"))])
                if saved in files:
                    buffer.copy_(reader.all(saved))
                    found.add(saved)
    return found


def untouched(model: PreTrainedModel) -> PreTrainedModel:
    """Give the parameters of a model on the meta device untouched memory, in place; ties are kept."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device="cpu")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
    return model


def _parts(model: PreTrainedModel, name: str, parameter: Tensor) -> str | tuple[tuple[str, ...], ...]:
    """Return the sources of a parameter, as :attr:`SavedRows.parts`.

    Stacked parameters are those that files store one by one, numbered by row.
    """
    saved = [key for key, _ in as_saved(model, [(name, torch.empty_like(parameter, device="meta"))])]
    if len(saved) == 1:
        return saved[0]
    return tuple(tuple(key for key in saved if str(row) in key.split(".")[-3:]) for row in range(len(parameter)))


def _fits(parts: str | tuple[tuple[str, ...], ...], shape: Shape, shapes: Mapping[str, Shape]) -> bool:
    if isinstance(parts, str):
        return shapes.get(parts) == shape
    found = [[shapes.get(name, ()) for name in names] for names in parts]
    return all(row and (sum(part[0] if part else 0 for part in row), *row[0][1:]) == shape[1:] for row in found)


def tensor_files(path: str, revision: Mapping[str, str]) -> dict[str, Path] | None:
    """Return the file of each tensor, downloaded if necessary; None without safetensors files."""
    options: dict[str, Any] = dict(revision)
    look = {**options, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **look)
    if index is not None:
        found, metadata = get_checkpoint_shard_files(path, index, **options)
        by_name = {Path(file).name: Path(file) for file in found or ()}
        return {name: by_name[file] for name, file in metadata["weight_map"].items()}
    single = cached_file(path, SAFE_WEIGHTS_NAME, **look)
    if single is None:
        return None
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), Path(single))


def _shapes(files: Mapping[str, Path]) -> Iterator[tuple[str, Shape]]:
    for path in {*files.values()}:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is not a mapping
                yield name, tuple(file.get_slice(name).get_shape())
