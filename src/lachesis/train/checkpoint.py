"""Atomic checkpoints, and models saved in the formats of transformers and peft.

A resumable checkpoint is a directory::

    checkpoints/step_000010/
        weights.safetensors   tensors by name
        state.pt              optimizer and random states, loadable with weights_only=True
        meta.json             JSON values: data position, configuration, versions
        manifest.json         sizes and CRC-32 of the others, and the number of this save

A sharded policy's checkpoint has the directory ``parts/`` instead of ``weights.safetensors``, in which each rank has
written its own rows of all tensors (:mod:`lachesis.train.distributed.sharded_checkpoint`); ``state.pt`` then has their
names.

It is written under a hidden name, forced to disk and renamed; only then are older ones deleted. A kill at any moment
leaves the last good checkpoint intact.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from lachesis.common.errors import CheckpointError, LachesisError, first_line
from lachesis.common.files import atomic_directory, clean_leftovers, crc32_of, restore_replaced
from lachesis.train.distributed.sharded_checkpoint import INDEX, WEIGHTS, Written, read_whole, saved_tensors
from lachesis.train.model.saved_check import check_saved, contents_to_save

logger = logging.getLogger("lachesis")

_WEIGHTS, _STATE, _META, _MANIFEST = "weights.safetensors", "state.pt", "meta.json", "manifest.json"
_PARTS = "parts"
_SLACK_BYTES = 2**20
# The number of files whose checksums are computed at once, because ranks may have written many.
_READERS = 4
_SHARED = "put run.dir on a disk that all nodes share, or set checkpoint.format: whole"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State that was saved at a step. Tensors are on the CPU; tied ones are one tensor again.

    If ranks are to read their own ``parts`` (the directory of the parts), tensors are on the meta device, and the state
    has their names instead of them.
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    meta: dict[str, Any]
    parts: Path | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Unfinished checkpoint, in a directory that is not yet recognised as one."""

    directory: Path
    number: int

    @property
    def parts(self) -> Path:
        """Return the directory in which ranks write their parts."""
        return self.directory / _PARTS

    def write(self, *, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Write everything except the tensors of weights or parts.

        Raises CheckpointError if it could not be read back.
        """
        with (self.directory / _STATE).open("wb") as file:  # given a path, torch does not say why a write failed
            torch.save(dict(state), file)
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(self.directory / _STATE):
            raise CheckpointError(
                f"the state to save has objects that could not be loaded again: {', '.join(sorted(unsafe))}",
                remedy="save only numbers, strings, lists, dicts and tensors",
            )
        (self.directory / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")

    def describe(self, *, aliases: Mapping[str, str] | None = None, parts: Sequence[Written] = ()) -> None:
        """Write the manifest, which completes the checkpoint.

        Args:
            aliases: names of tied tensors.
            parts: files that ranks have written, with their checksums.

        Raises:
            CheckpointError: ranks have written them elsewhere.
        """
        files = {f"{_PARTS}/{part.name}": {"bytes": part.size, "crc32": part.crc32} for part in parts}
        for name, expected in files.items():
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != expected["bytes"]:
                raise CheckpointError(f"{name}, which a rank wrote, is not visible in {self.directory}", remedy=_SHARED)
        for name in (_STATE, _META) if parts else (_WEIGHTS, _STATE, _META):
            path = self.directory / name
            files[name] = {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
        manifest = {"save": self.number, "aliases": dict(aliases or {}), "files": files}
        (self.directory / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


class CheckpointManager:
    """Manager of the resumable checkpoints under one directory. One process writes at a time.

    Args:
        directory: holds the ``step_N`` directories; made at the first save.
        keep_last: number of latest saves to keep, at least 1.
    """

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self.directory = Path(directory)
        self.keep_last = keep_last

    def save(
        self, step: int, *, tensors: Mapping[str, Tensor], state: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint of ``step``, then delete those beyond ``keep_last``.

        Args:
            tensors: weights on any device; tied ones are written once.
            state: nested dicts, lists, tuples, numbers, strings and tensors.
            meta: JSON-serializable.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: the disk is full or cannot be written, or the state holds objects that could not be read
                back. Earlier checkpoints are untouched.
        """
        unique, aliases = _untied(tensors)
        needed = sum(t.nbytes for t in unique.values()) + _state_bytes(state)
        with self.saving(step, needed=needed) as draft:
            save_file({name: _own_storage(t) for name, t in unique.items()}, draft.directory / _WEIGHTS)
            draft.write(state=state, meta=meta)
            draft.describe(aliases=aliases)
        return self._path(step)

    @contextmanager
    def saving(self, step: int, *, needed: int) -> Iterator[Draft]:
        """Yield a draft that becomes the checkpoint of ``step`` if the block ends without an error.

        Args:
            needed: bytes that will be written.
        """
        target = self._path(step)
        with _disk_errors(target, needed=needed):
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in clean_leftovers(self.directory):
                logger.warning("removed %s, which an interrupted save left behind", leftover)
            _require_space(target, needed=needed)
            numbers = [_number_of_save(path) for path in self._paths()]
            number = 1 + int(max((n for n in numbers if n < math.inf), default=0))
            with atomic_directory(target) as temporary:
                yield Draft(temporary, number)
            self._prune()

    def latest(self) -> int | None:
        """Return the step of the most recent complete save, or None; damaged ones are logged and skipped."""
        restore_replaced(self.directory)
        # By time of saving, not by step: a run that went back to an earlier step saves lower ones anew.
        for path in sorted(self._paths(), key=_number_of_save, reverse=True):
            damage = _damage(path)
            if damage is None:
                return _step_of(path)
            logger.warning("ignoring the damaged checkpoint %s: %s", path, damage)
        return None

    def newest(self) -> int | None:
        """Return :meth:`latest`, or None only if there is no save at all.

        Raises:
            CheckpointError: all of them are damaged.
        """
        step = self.latest()
        damaged = [] if step is not None else sorted(self._paths(), key=_number_of_save, reverse=True)
        if damaged:
            reasons = "; ".join(f"{path.name}: {_damage(path)}" for path in damaged)
            raise CheckpointError(
                f"every checkpoint in {self.directory} is damaged ({reasons})",
                remedy="restore one from a copy, or start over with --overwrite",
            )
        return step

    def load(self, step: int | None = None, *, parts: bool = False) -> Checkpoint:
        """Read the checkpoint of ``step``, or the latest complete one.

        Args:
            parts: do not read tensors that were saved in parts, because each rank reads its own part.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        found = self.latest() if step is None else step
        if found is None:
            raise CheckpointError(
                f"there is no complete checkpoint in {self.directory}",
                remedy="start without resuming, or choose another run",
            )
        path = self._path(found)
        damage = None if step is None else _damage(path)
        if damage is not None:
            there = ", ".join(str(_step_of(p)) for p in self._paths()) or "none"
            raise CheckpointError(
                f"the checkpoint {path} cannot be used: {damage}",
                remedy=f"choose another step (available: {there})",
            )
        return _read(path, parts=parts)

    def _prune(self) -> None:
        def worth(path: Path) -> tuple[bool, float]:
            return _damage(path, read_content=False) is None, _number_of_save(path)

        for path in sorted(self._paths(), key=worth, reverse=True)[self.keep_last :]:
            shutil.rmtree(path)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step_*") if path.name[5:].isdigit())

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"


class Savable(Protocol):
    """Model or tokenizer of transformers or peft, which can save itself."""

    def save_pretrained(self, save_directory: str, **options: Any) -> Any: ...


def save_model(
    model: Savable,
    tokenizer: Savable | None,
    directory: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    write: Callable[[Path], None] | None = None,
    companions: Sequence[Path] = (),
) -> None:
    """Save a model as transformers loads it, or an adapter as peft does, with the tokenizer.

    A ``PeftModel`` saves its adapter, any other model its whole weights. The directory appears as a whole or not at
    all, after its tensors were read back and compared; an earlier model in its place is replaced.

    Args:
        weights: whole tensors by the model's names, if its own parameters are sharded.
        write: writes the whole content of the directory instead of the model's and the tokenizer's own methods.
        companions: files that are copied beside a whole model.

    Raises:
        CheckpointError: the disk is full or cannot be written, the directory holds something else, or a tensor in the
            files differs from the model's.
    """
    directory = Path(directory)
    holds_model = any((directory / name).exists() for name in ("config.json", "adapter_config.json"))
    if directory.exists() and any(directory.iterdir()) and not holds_model:
        raise CheckpointError(
            f"{directory} is not empty and holds no model", remedy="choose another directory or empty it"
        )
    with _disk_errors(directory, needed=None):
        clean_leftovers(directory.parent)
        with atomic_directory(directory) as temporary:
            for path in companions:
                shutil.copyfile(path, temporary / path.name)
            if write is not None:
                write(temporary)
                return
            model.save_pretrained(str(temporary), **({} if weights is None else {"state_dict": dict(weights)}))
            if (expected := contents_to_save(model, weights)) is not None:
                check_saved(temporary, expected)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(temporary))


def capture_rng() -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy and torch (CPU, and CUDA if in use).

    It can be part of a checkpoint's ``state``: plain numbers and tensors only.
    """
    version, internal, gauss = random.getstate()
    legacy = np.random.get_state(legacy=True)
    assert isinstance(legacy, tuple), "numpy's global generator is an MT19937"
    name, keys, position, has_gauss, cached = legacy
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore what :func:`capture_rng` returned.

    Log a different number of CUDA devices than at the capture.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if state["cuda"] else 0
    if devices != len(state["cuda"]):
        logger.warning(
            "random states of %d CUDA devices were saved, but there are %d: the run continues, but not bitwise equal",
            len(state["cuda"]),
            devices,
        )
    for index, saved in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(saved, index)


def _read(path: Path, *, parts: bool) -> Checkpoint:
    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    in_parts = f"{_PARTS}/{INDEX}" in manifest["files"]
    try:
        tensors = {} if in_parts else load_file(path / _WEIGHTS, device="cpu")
        state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read: {first_line(error)}",
            remedy="install the versions of torch and of the optimizer's package that it was saved with",
        ) from error
    if in_parts:
        tensors = saved_tensors(path / _PARTS) if parts else read_whole(path / _PARTS)
        if not parts:
            state = tree_map_only(str, lambda text: tensors.get(text, text), state)
        tensors = {name.removeprefix(WEIGHTS): t for name, t in tensors.items() if name.startswith(WEIGHTS)}
    tensors |= {alias: tensors[name] for alias, name in manifest["aliases"].items()}
    own = path / _PARTS if in_parts and parts else None
    return Checkpoint(step=_step_of(path), tensors=tensors, state=state, meta=meta, parts=own)


def _damage(path: Path, *, read_content: bool = True) -> str | None:
    """Describe the damage of a checkpoint, or return None if every file has its recorded size and content."""
    try:
        files = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
        with ThreadPoolExecutor(_READERS) as pool:
            sums = pool.map(crc32_of, [path / name for name in files] if read_content else [])
            for name, found in zip(files, sums, strict=False):
                if found != files[name]["crc32"]:
                    return f"the content of {name} has changed since it was saved"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} cannot be read ({first_line(error)})"
    return None


def _number_of_save(path: Path) -> float:
    """Return the number of a save within its run.

    Infinite if it cannot be read, so that ``latest`` inspects the checkpoint and reports it.
    """
    try:
        return int(json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["save"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors without those that share memory with an earlier one, and the names of the latter."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            unique[name] = tensor.detach()
    return unique, aliases


def _own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and alone in its storage, because safetensors refuses overlapping views."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _state_bytes(state: Any) -> int:
    """Return the bytes that torch.save writes for a nested state: whole storages, each once."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    storages: dict[int, int] = {}
    while tensors:
        tensor = tensors.pop()
        if is_traceable_wrapper_subclass(tensor):  # a quantized state: made of plain tensors
            tensors += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _require_space(target: Path, *, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed + _SLACK_BYTES:
        raise _disk_full(target, needed=needed, free=free)


@contextmanager
def _disk_errors(target: Path, *, needed: int | None) -> Iterator[None]:
    """Turn the libraries' different errors for a failed write into a CheckpointError."""
    try:
        yield
    except LachesisError:
        raise
    except Exception as error:
        if os.strerror(errno.ENOSPC) in _whole_chain(error):
            existing = next(parent for parent in target.absolute().parents if parent.exists())
            free = shutil.disk_usage(existing).free
            raise _disk_full(target, needed=needed, free=free) from error
        raise CheckpointError(
            f"{target} cannot be written: {first_line(error)}",
            remedy="check the directory and its permissions",
        ) from error


def _disk_full(target: Path, *, needed: int | None, free: int) -> CheckpointError:
    need = "" if needed is None else f"{needed:,} bytes are needed and "
    return CheckpointError(
        f"no space left for {target}: {need}{free:,} bytes are free",
        remedy="free space on that disk, lower checkpoint.keep_last, or move run.dir to a larger disk; "
        "earlier checkpoints are untouched",
    )


def _whole_chain(error: BaseException) -> str:
    texts = []
    link: BaseException | None = error
    while link is not None:
        texts.append(str(link))
        link = link.__cause__ or link.__context__
    return "\n".join(texts)
