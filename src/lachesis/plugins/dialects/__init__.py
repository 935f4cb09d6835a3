"""Configurations of other trainers: recognized by their keys, translated onto the canonical tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_object
from lachesis.config.document import Document, apply_overrides
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.dialects import axolotl, trl
from lachesis.plugins.dialects.atropos import SERVER, TRAINER
from lachesis.plugins.dialects.axolotl import AXOLOTL
from lachesis.plugins.dialects.distributed import ACCELERATE
from lachesis.plugins.dialects.environment import ENVIRONMENT
from lachesis.plugins.dialects.openrlhf import OPENRLHF
from lachesis.plugins.dialects.other_systems import other_system
from lachesis.plugins.dialects.table import Dialect, Translation
from lachesis.plugins.dialects.trl import TRL
from lachesis.plugins.dialects.verl import VERL

DialectName = Literal["canonical", "axolotl", "trl"]

DIALECTS: tuple[Dialect, ...] = (AXOLOTL, TRL, VERL, OPENRLHF, TRAINER, SERVER, ACCELERATE, ENVIRONMENT)


def recognize(data: Mapping[str, Any]) -> DialectName:
    """Return the dialect of a document: the first of those that know most of its top-level keys.

    A canonical section holds keys, so ``optimizer: adamw`` is not a canonical section.

    Raises:
        ConfigError: it is a file for accelerate, which describes processes and no training, or verl's or OpenRLHF's.
    """
    if (system := other_system(data)) is not None:
        raise ConfigError(
            f"this is a configuration of {system}, whose rewards have another signature",
            remedy="`lachesis translate FILE` writes what is common in our keys",
        )
    if {"env", "openai"} <= data.keys():
        raise ConfigError(
            "this is a file of an Atropos environment, which serves prompts and trains nothing",
            remedy="start the environment with `lachesis env NAME serve --config FILE`",
        )
    sections = LachesisConfig.model_fields
    known: dict[DialectName, int] = {
        "canonical": sum(key in sections and not isinstance(value, str | bool | list) for key, value in data.items()),
        "axolotl": _known(data, AXOLOTL),
        "trl": _known(data, TRL),
    }
    if _known(data, ACCELERATE) > max(known.values()):
        raise ConfigError(
            "this is a configuration of accelerate, which describes processes and not training",
            remedy="give the training's own configuration; for several processes start it with torchrun",
        )
    return max(known, key=lambda name: known[name])


def translate(document: Document, *, dialect: DialectName, processes: int | None = 1) -> Translation:
    """Translate a document of Axolotl's or TRL's to a canonical one.

    Args:
        document: their YAML.
        dialect: of the document.
        processes: trainer processes, by which batch sizes there are multiplied; None if the launcher started only
            one: the number that the file is for counts then.
    """
    translator = axolotl.translate if dialect == "axolotl" else trl.translate
    translation = translator(document, processes=processes)
    data = translation.document.data.setdefault("data", {})
    if is_object(data):  # texts are continued there, whatever chat template the tokenizer has
        data.setdefault("conversations", False)
    return translation


def apply_ours(translation: Translation, overrides: Sequence[str], *, keys: Mapping[str, Any]) -> None:
    """Write each ``a.b=c`` of our keys into a translated document; add a problem for one that is set by both names.

    A length in steps stands in place of their default of epochs.

    Args:
        keys: sections of ours that are in the document already.
    """
    document = translation.document
    paths = [override.partition("=")[0].strip() for override in overrides]
    for path in paths:
        origin = document.origins.get(tuple(path.split(".")), "")
        if origin.startswith("--set "):
            document.problems.append(f"--set {path}: {origin} sets it too; give one of them")
    steps = "run.steps" in paths or "steps" in keys.get("run", {})
    if steps and document.origins.get(("run", "epochs"), "").startswith(f"{translation.dialect.name}'s "):
        del document.data["run"]["epochs"]
    apply_overrides(document, overrides)


def keys_of(dialect: DialectName) -> Dialect:
    """Return the table of the keys of Axolotl's files, or of TRL's."""
    return AXOLOTL if dialect == "axolotl" else TRL


def _known(data: Mapping[str, Any], dialect: Dialect) -> int:
    """Count the top-level keys that a dialect knows; a section must be a section there too."""
    return sum(
        key in dialect.top_level and isinstance(value, dict) <= (dialect.is_section(key) or key in dialect.entries)
        for key, value in data.items()
    )
