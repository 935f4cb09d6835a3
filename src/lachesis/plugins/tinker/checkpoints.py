"""Checkpoints of runs: directories that peft loads adapters from, named by ``tinker://RUN/KIND/NAME``."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from lachesis.common.errors import CheckpointError, DataError
from lachesis.common.files import atomic_directory, clean_leftovers
from lachesis.plugins.tinker.records import LoraShape

Kind = Literal["weights", "sampler_weights"]
"""Kind of a checkpoint: with the optimizer's state, to continue training, or without, to sample."""

_ADAPTER, _OPTIMIZER, _ABOUT = "adapter_model.safetensors", "optimizer.safetensors", "tinker.json"
# File systems take no longer names.
_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]{0,199}", flags=re.ASCII)
_PATH = re.compile(r"tinker://([\w:-]{1,200})/(weights|sampler_weights)/([^/]+)", flags=re.ASCII)
_LONGEST_TTL_S = 100 * 365 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Description of a checkpoint. ``time`` and ``expires_at`` are seconds since the epoch."""

    path: str
    base_model: str
    shape: LoraShape
    time: float
    size_bytes: int
    expires_at: float | None = None
    user_metadata: Mapping[str, str] | None = None
    has_optimizer: bool = False
    owner: str = ""

    @property
    def run_id(self) -> str:
        return _parts(self.path)[0]

    @property
    def checkpoint_id(self) -> str:
        return "/".join(_parts(self.path)[1:])


class CheckpointStore:
    """Checkpoints of all runs below one directory. An expired one counts as missing, and is deleted when found."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(
        self,
        run_id: str,
        kind: Kind,
        name: str,
        *,
        base_model: str,
        shape: LoraShape,
        config: LoraConfig,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | None = None,
        ttl_s: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
        owner: str = "",
    ) -> Saved:
        """Write a checkpoint, whole or not at all.

        Raises:
            CheckpointError: the name is invalid or taken, the lifetime is too long, or the disk is full.
        """
        if not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{name[:250]!r} is not a valid name for a checkpoint",
                remedy="use at most 200 letters, digits and _ . + = -, no slash",
            )
        if ttl_s is not None and not 0 <= ttl_s <= _LONGEST_TTL_S:
            raise CheckpointError(
                f"ttl_seconds is not between 0 and {_LONGEST_TTL_S}", remedy="leave it out to keep the checkpoint"
            )
        target = self._root / run_id / kind / name
        if not overwrite and target.exists() and self._about(target) is not None:
            raise CheckpointError(f"{target.name!r} exists already", remedy="choose another name, or overwrite it")
        now = time.time()
        try:
            with atomic_directory(target) as directory:
                save_file(dict(weights), directory / _ADAPTER)
                config.save_pretrained(str(directory))
                if optimizer is not None:
                    save_file(dict(optimizer), directory / _OPTIMIZER)
                saved = Saved(
                    path=f"tinker://{run_id}/{kind}/{name}",
                    base_model=base_model,
                    shape=shape,
                    time=now,
                    size_bytes=sum(file.stat().st_size for file in directory.iterdir()),
                    expires_at=None if ttl_s is None else now + ttl_s,
                    user_metadata=user_metadata,
                    has_optimizer=optimizer is not None,
                    owner=owner,
                )
                (directory / _ABOUT).write_text(json.dumps(asdict(saved)))
        except OSError as error:
            raise CheckpointError(
                f"{target} cannot be written: {error}", remedy="free some disk space, or choose another --dir"
            ) from error
        clean_leftovers(target.parent)
        return saved

    def find(self, path: str) -> Saved:
        """Find a checkpoint. Raises DataError if it does not exist."""
        saved = self._about(self._directory(path))
        if saved is None:
            raise DataError(f"there is no checkpoint {path}", remedy="look it up in the run's list of checkpoints")
        return saved

    def weights(self, path: str) -> dict[str, Tensor]:
        """Load the adapter's tensors. Raises as :meth:`find`."""
        self.find(path)
        return load_file(self._directory(path) / _ADAPTER)

    def optimizer(self, path: str) -> dict[str, Tensor]:
        """Load the optimizer's state. Raises DataError if the checkpoint has none."""
        if not self.find(path).has_optimizer:
            raise DataError(f"{path} has no optimizer state", remedy="load its weights alone, or one of save_state")
        return load_file(self._directory(path) / _OPTIMIZER)

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises as :meth:`find`."""
        self.find(path)
        shutil.rmtree(self._directory(path))

    def of_run(self, run_id: str) -> list[Saved]:
        """Return a run's checkpoints, oldest first."""
        return sorted((saved for saved in self.all() if saved.run_id == run_id), key=lambda saved: saved.time)

    def all(self) -> Iterator[Saved]:
        """Return every checkpoint below the directory."""
        for about in sorted(self._root.glob(f"*/*/*/{_ABOUT}")):
            if (saved := self._about(about.parent)) is not None:
                yield saved

    def _directory(self, path: str) -> Path:
        return self._root.joinpath(*_parts(path))

    def _about(self, directory: Path) -> Saved | None:
        try:
            fields: dict[str, Any] = json.loads((directory / _ABOUT).read_text())
        except FileNotFoundError:
            return None
        saved = Saved(**{**fields, "shape": LoraShape(**fields["shape"])})
        if saved.expires_at is not None and saved.expires_at <= time.time():
            shutil.rmtree(directory, ignore_errors=True)
            return None
        return saved


def _parts(path: str) -> tuple[str, str, str]:
    """Return the run, kind and name of a path."""
    found = _PATH.fullmatch(path)
    if found is None or not _NAME.fullmatch(found[3]):
        raise DataError(
            f"{path[:500]!r} is not the path of a checkpoint", remedy="write it as tinker://RUN/weights/NAME"
        )
    return found[1], found[2], found[3]
