"""Checkpoint around a language model, whose towers for images and sound are not trained but kept when saving.

transformers loads the text part of many checkpoints alone, under other names (``model.layers.0`` for
``model.language_model.layers.0``). Saved models have the checkpoint's names, architecture and remaining tensors, so
that they load wherever the original did.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from lachesis.common.errors import ModelError

logger = logging.getLogger(__name__)

# Words that a checkpoint adds before or inside the names of its language model.
_INNER = ("language_model.", "text_model.")
_PROCESSORS = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
)


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """Location of a language model's tensors in the checkpoint that contains it.

    Attributes:
        files: the file of each tensor of the checkpoint.
        names: the checkpoint's name of each tensor of the language model, by the name under which that saves it.
        config: the content of the checkpoint's config.json.
        companions: files of its processors.
    """

    files: Mapping[str, Path]
    names: Mapping[str, str]
    config: Mapping[str, object]
    companions: tuple[Path, ...]

    @property
    def kept(self) -> list[str]:
        """Return the checkpoint's tensors that are not part of the language model."""
        own = {*self.names.values()}
        return sorted(name for name in self.files if name not in own)

    def tensors(self, trained: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors: the trained ones under its names, then the others as they were."""
        for name, tensor in trained:
            yield self.names[name], tensor
        for name in self.kept:
            with safe_open(self.files[name], framework="pt") as file:
                yield name, file.get_tensor(name)

    def write_companions(self, directory: Path) -> None:
        """Write the configuration of the whole model, and its processors' files."""
        (directory / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        for path in self.companions:
            shutil.copyfile(path, directory / path.name)


def find_whole(
    own: Iterable[str], *, path: str, files: Mapping[str, Path] | None, revision: Mapping[str, str]
) -> WholeCheckpoint:
    """Find the checkpoint around a language model.

    Args:
        own: names of the tensors that the language model saves.
        files: the file of each tensor of the checkpoint; None without safetensors files.

    Raises:
        ModelError: the checkpoint has no safetensors files, or lacks a tensor of the language model.
    """
    if files is None:
        raise ModelError(
            f"{path!r} is more than a language model and has no safetensors files, so its other parts could not be "
            "saved with the trained ones",
            remedy="save it as safetensors, or set model.path to a checkpoint of only the language model",
        )
    inner = {_own_name(name): name for name in files}
    wanted = [*own]
    names = {name: inner.get(name) or inner.get(_own_name(name), "") for name in wanted}
    missing = sorted(name for name in wanted if not names[name])
    if missing:
        raise ModelError(
            f"{len(missing)} tensors of the language model in {path!r} have no counterpart in its files, such as "
            f"{missing[0]!r}, so its other parts could not be saved with the trained ones",
            remedy="set model.path to a checkpoint of only the language model",
        )
    config = cached_file(path, "config.json", **revision)
    assert config is not None, "it has been read"
    content = json.loads(Path(config).read_text(encoding="utf-8"))
    found = WholeCheckpoint(files, names, content, processor_files(Path(config).parent))
    logger.warning(
        "%s is more than a language model (%s): %d of its %d tensors, such as %s, are not trained and are saved "
        "unchanged",
        path,
        ", ".join(content.get("architectures") or ["?"]),
        len(found.kept),
        len(files),
        found.kept[0] if found.kept else "none",
    )
    return found


def processor_files(directory: Path) -> tuple[Path, ...]:
    """Return the files of a checkpoint's processors."""
    beside = [directory / name for name in _PROCESSORS]
    return tuple(file for file in beside if file.is_file())


def _own_name(name: str) -> str:
    """Return the language model's name of a tensor of the checkpoint around it."""
    for inner in _INNER:
        name = name.removeprefix(inner).replace(f".{inner}", ".", 1)
    return name
