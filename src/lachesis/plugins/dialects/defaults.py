"""Defaults that differ: keys whose absence from a file for Axolotl or TRL has another meaning here.

A test compares all defaults of the pinned classes with those of a translated file without the key; these are the
exceptions. A file that leaves such keys out gets one note about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lachesis.common.types import Finding
from lachesis.plugins.dialects.axolotl import AXOLOTL
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
    versions: dict[str, dict[str, Any]]


_WORDS = _Words.read("defaults")
DIFFERENT, IN_CODE = _WORDS.classes, _WORDS.code
"""Defaults of their classes, and those of their code."""


def _old_version(translation: Translation) -> list[Finding]:
    """Return one warning if the file was written for an earlier version and leaves out what changed since."""
    if translation.dialect not in (TRL, AXOLOTL):
        return []
    name = translation.dialect.name
    versions = _WORDS.versions[name]
    mark = next(filter(translation.has, versions["last"]), None)
    served = any(map(translation.value, ("use_vllm", "trl.use_vllm")))
    changed = [
        f"{translation.document.setting(key, there)} up to {version}"
        for key, there, version, with_vllm in versions["changed"]
        if not translation.has(key)
        and (served or not with_vllm)
        and (key, mark) != ("vllm_mode", "vllm_device")  # these versions had no mode
    ]
    if mark is None or not changed:
        return []
    text = (
        f"{mark} is a key of {name} up to {versions['last'][mark]}; what the file leaves out has the defaults of "
        f"{versions['now']} here. Those were {', '.join(changed)}"
    )
    return [Finding(level="warning", rule="dialect", message=text)]


def default_findings(translation: Translation) -> list[Finding]:
    """Return a note on the defaults that differ from the other trainer's, and how to set those; empty if none differs.

    A file of an earlier version gets a warning with that version's defaults before it.
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
