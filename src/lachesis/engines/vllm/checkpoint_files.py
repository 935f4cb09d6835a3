"""Checkpoints that a vLLM worker loads, or started from: checks that they fit its model, and their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lachesis.engines.serving.backend import Refused

_INDEX = "model.safetensors.index.json"


def check_architecture(directory: Path, served: Sequence[str]) -> None:
    """Raise Refused unless the checkpoint's ``config.json`` names the ``served`` architectures.

    Status 400: it is missing or damaged; 422: it is of another model.
    """
    file = directory / "config.json"
    try:
        found = json.loads(file.read_bytes()).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(f"{file} cannot be read: {error}", remedy="name a checkpoint directory") from error
    if list(found) != list(served):
        raise Refused(
            f"the checkpoint in {directory} is of {', '.join(map(str, found)) or 'no architecture'}, but the server "
            f"runs {', '.join(served)}",
            status=422,
            remedy="use a checkpoint of the served model",
        )


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors of the safetensors files in a checkpoint directory.

    Raises:
        Refused: (400) there are none, or one is damaged or missing.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in _files(directory):
            with safe_open(file, framework="pt") as tensors:
                shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise Refused(
            f"the checkpoint in {directory} is damaged: {type(error).__name__}: {error}", remedy="save it again"
        ) from error
    if not shapes:
        raise Refused(f"{directory} has no safetensors files", remedy="name a checkpoint directory")
    return shapes


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor, on the CPU, of everything that :func:`read_shapes` found."""
    for file in _files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def served_shapes(model: str) -> dict[str, tuple[int, ...]] | None:
    """Read the shapes, as :func:`read_shapes`, of the checkpoint that the engine serves; ``None`` if not on disk.

    Args:
        model: a directory, or a name on the hub, whose files are looked up in the local cache.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            directory = Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            return None
    try:
        return read_shapes(directory)
    except Refused:
        return None  # weights in another format, or none at all ("dummy")


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(directory.glob("*.safetensors"))
