"""Defaults that differ: keys whose absence from a file for Axolotl or TRL has another meaning here.

A test compares all defaults of the pinned classes with those of a translated file without the key; these are the
exceptions. A file that leaves such keys out gets one note about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lachesis.common.types import Finding
from lachesis.plugins.dialects.table import Translation
from lachesis.plugins.dialects.trl import TRL
from lachesis.plugins.dialects.words import Words


class Difference(BaseModel):
    """A default that is not taken over.

    Attributes:
        written: value that gives their behaviour.
        there: words for it if the value says too little.
        or_by: other keys with the same effect. applies: the runs for which it matters, if not for all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    written: str
    there: str = ""
    or_by: tuple[str, ...] = ()
    applies: Literal["always", "has_own_server", "saves", "never"] = "always"

    def matters(self, data: Mapping[str, Any]) -> bool:
        """Return True if it matters for a run with these of our keys."""
        if self.applies == "has_own_server":
            return data.get("engine", {}).get("kind") == "vllm"
        saves = data.get("checkpoint", {}).keys() & {"every_steps", "every_epochs"}
        return self.applies == "always" or (self.applies == "saves" and bool(saves))


class _Words(Words):
    classes: dict[str, dict[str, Difference]]
    code: dict[str, dict[str, Difference]]
    up_to_017: dict[str, str]
    loss_up_to_017: str
    keys_up_to_027: list[str]
    since_018: list[tuple[str, str, str, bool]]


_WORDS = _Words.read("defaults")
DIFFERENT, IN_CODE = _WORDS.classes, _WORDS.code
"""Defaults of their classes, and those of their code."""


def _old_version(translation: Translation) -> list[Finding]:
    """Return a warning if the file was written for TRL up to 0.17 and relies on defaults that have changed since."""
    before = "trl." if translation.dialect.name == "Axolotl" else ""
    if not translation.has(f"{before}vllm_device"):
        return _version_from_018(translation)
    keys = [
        translation.document.setting(before + key, there)
        for key, there in _WORDS.up_to_017.items()
        if not translation.has(before + key)
    ]
    loss = "" if translation.has(f"{before}loss_type") else f"; its loss was {_WORDS.loss_up_to_017}"
    if not keys and not loss:
        return []
    text = f"{before}vllm_device is a key of TRL up to 0.17; missing keys have the defaults of 1.16 here"
    if keys:
        text += f". For that version's add {' '.join(keys)}"
    text += loss
    return [Finding(level="warning", rule="dialect", message=text)]


def _version_from_018(translation: Translation) -> list[Finding]:
    """Return one warning if the file was written for TRL 0.18 to 0.27 and leaves out what changed since."""
    mark = next(filter(translation.has, _WORDS.keys_up_to_027), None)
    changed = [
        f"{translation.document.setting(key, there)} up to {version}"
        for key, there, version, served in _WORDS.since_018
        if not translation.has(key) and (translation.value("use_vllm") or not served)
    ]
    if mark is None or not changed or translation.dialect is not TRL:
        return []
    text = f"{mark} is a key of TRL up to 0.27; what the file leaves out has the defaults of 1.16 here. Those were"
    return [Finding(level="warning", rule="dialect", message=f"{text} {', '.join(changed)}")]


def default_findings(translation: Translation) -> list[Finding]:
    """Return a note on the defaults that differ from the other trainer's, and how to set those; empty if none differs.

    A file of an old version of TRL gets a warning with that version's defaults before it.
    """
    old = _old_version(translation)
    name = translation.dialect.name
    keys = [
        translation.document.setting(key, difference.written)
        for table in (DIFFERENT, IN_CODE)
        for key, difference in table.get(name, {}).items()
        if difference.matters(translation.document.data)
        and not any(translation.has(written) for written in (key, *difference.or_by))
    ]
    if not keys:
        return old
    text = (
        f"left out of the file, with another default here (docs/migration.md, Defaults that differ): {name}'s are "
        f"{' '.join(keys)}"
    )
    return [*old, Finding(level="note", rule="dialect", message=text)]
