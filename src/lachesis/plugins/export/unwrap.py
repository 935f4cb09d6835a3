"""Copies of checkpoints under the model's own names, where a wrapper of a training program changed those of tensors."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lachesis.bridges.model_files import write_checkpoint
from lachesis.common.errors import CheckpointError, ModelError
from lachesis.common.hub import can_see, config_here, load_errors
from lachesis.config.schema import ModelConfig
from lachesis.train.model.loaded_names import renaming
from lachesis.train.model.loading import read_config, read_model, require_whole
from lachesis.train.model.saved_rows import tensor_files

_WEIGHTS = (".safetensors", ".bin", ".index.json")


def unwrap(model: str, out: Path) -> Path:
    """Copy a model, a directory or a hub id, with the names that transformers and vLLM expect of its tensors.

    Tensors are copied one file at a time, unchanged. The other files stay as they are.

    Raises:
        ModelError: there is no such model, its names need no change, or its tensors would not be the model's.
        CheckpointError: ``out`` is not empty.
    """
    source, place = _as_saved(model), config_here(model)
    read, info = read_model(source, device_map="meta", dtype="auto")
    rename = renaming(info)
    if rename is None or place is None:
        require_whole(read, info, source)
        raise ModelError(f"the tensors of {model!r} have the model's names already", remedy=f"use {model} as it is")
    names = Counter(map(rename, (name for name, _ in _tensors(model, place.parent))))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ModelError(
            f"{len(twice)} tensors of {model!r} would get the name of another (first: {twice[0]})",
            remedy="remove those that are not the model's from its files",
        )
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty", remedy="name a new directory")
    out.mkdir(parents=True, exist_ok=True)
    try:
        for file in place.parent.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, out / file.name)
        write_checkpoint(out, ((rename(name), tensor) for name, tensor in _tensors(model, place.parent)))
        written = source.model_copy(update={"path": str(out)})
        require_whole(*read_model(written, device_map="meta", dtype="auto"), written)
    except BaseException:
        shutil.rmtree(out)
        raise
    return out


def _as_saved(model: str) -> ModelConfig:
    """Return the configuration that loads all of a checkpoint, with its tower for images if it has one."""
    config = ModelConfig(path=model)
    with load_errors(model):
        sees = can_see(read_config(config))
    return config.model_copy(update={"vision": "frozen"}) if sees else config


def _tensors(model: str, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint's safetensors files, or of those that torch saved."""
    files = tensor_files(model, {})
    for path in sorted({*(files or {}).values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is not a mapping
                yield name, file.get_tensor(name)
    for path in sorted(directory.glob("pytorch_model*.bin")) if files is None else ():
        for name, tensor in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
            yield name, tensor.clone()  # tied ones share their bytes, which safetensors refuses
