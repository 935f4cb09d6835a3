"""Configurations of other trainers: recognized by their keys, translated onto the canonical tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import flat, is_object
from lachesis.common.types import Finding
from lachesis.config.document import Document
from lachesis.config.overrides import apply_overrides
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.dialects import axolotl, trl
from lachesis.plugins.dialects.atropos import SERVER, TRAINER
from lachesis.plugins.dialects.axolotl import AXOLOTL
from lachesis.plugins.dialects.defaults import default_findings
from lachesis.plugins.dialects.distributed import ACCELERATE
from lachesis.plugins.dialects.environment import ENVIRONMENT
from lachesis.plugins.dialects.openrlhf import OPENRLHF
from lachesis.plugins.dialects.other_systems import OTHER_SYSTEMS, System, SystemName, other_system
from lachesis.plugins.dialects.scripts import check_expanded, verl_document
from lachesis.plugins.dialects.table import Dialect, Translation
from lachesis.plugins.dialects.trl import TRL
from lachesis.plugins.dialects.verl import VERL

DialectName = Literal["canonical", "axolotl", "trl"] | SystemName

DIALECTS: tuple[Dialect, ...] = (AXOLOTL, TRL, VERL, OPENRLHF, TRAINER, SERVER, ACCELERATE, ENVIRONMENT)


def recognize(data: Mapping[str, Any]) -> DialectName:
    """Return the dialect of a document: the first of those that know most of its top-level keys.

    A canonical section holds keys, so ``optimizer: adamw`` is not a canonical section.

    Raises:
        ConfigError: it is a file for accelerate or of an environment, which describes no training.
    """
    if (system := other_system(dict(flat(data)))) is not None:
        return system
    if {"env", "openai"} <= data.keys():
        raise ConfigError(
            "this is a file of an Atropos environment, which serves prompts but does not train",
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
            "this is a configuration of accelerate, which describes processes, not training",
            remedy="give the training's own configuration; for several processes, start it with torchrun",
        )
    return max(known, key=lambda name: known[name])


def translate(document: Document, *, dialect: DialectName, processes: int | None = 1) -> Translation:
    """Translate another trainer's document to a canonical one.

    Args:
        document: their YAML, or the arguments of a script.
        dialect: of the document.
        processes: trainer processes, by which batch sizes of Axolotl and TRL are multiplied; None if the launcher
            started only one: then the file's own number counts.
    """
    if dialect in OTHER_SYSTEMS:
        return _of_other_system(document, OTHER_SYSTEMS[dialect])
    translator = axolotl.translate if dialect == "axolotl" else trl.translate
    translation = translator(document, processes=processes)
    data = translation.document.data.setdefault("data", {})
    if is_object(data):  # that trainer continues plain texts, whatever chat template the tokenizer has
        data.setdefault("conversations", False)
    return translation


def _of_other_system(document: Document, system: System) -> Translation:
    if system.keys is VERL:
        document = verl_document(document)
    known = len(document.problems)
    check_expanded(document, system.keys)
    unread = len(document.problems) > known
    translation = system.translate(document)
    translation.document.unread = unread
    run = translation.document.data.setdefault("run", {})
    if "steps" in run:
        run.pop("epochs", None)
    return translation


def findings_of(translation: Translation, *, dialect: DialectName) -> list[Finding]:
    """Return the findings of a translation, including those on different defaults and on rewards of another form."""
    if dialect not in OTHER_SYSTEMS:
        return [*translation.findings, *default_findings(translation)]
    rewards = translation.document.data.get("rewards")
    text = f"{dialect}'s rewards have another signature: write rewards.functions"
    said = [] if rewards else [Finding(level="note", rule="dialect", message=text)]
    return [*translation.findings, *said]


def apply_ours(translation: Translation, overrides: Sequence[str], *, keys: Mapping[str, Any]) -> None:
    """Write each ``a.b=c`` of our keys into a translated document; add a problem for one that is set by both names.

    A length in steps replaces their default of epochs.

    Args:
        keys: our sections that the document already has.
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
    """Return the table of another trainer's keys."""
    if dialect in OTHER_SYSTEMS:
        return OTHER_SYSTEMS[dialect].keys
    return AXOLOTL if dialect == "axolotl" else TRL


def _known(data: Mapping[str, Any], dialect: Dialect) -> int:
    """Count the top-level keys that a dialect knows; a section must be a section there too."""
    return sum(
        key in dialect.top_level and isinstance(value, dict) <= (dialect.is_section(key) or key in dialect.entries)
        for key, value in data.items()
    )
