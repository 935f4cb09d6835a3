"""Rewards in TRL's flat files: open-r1's names with their arguments, and its default.

TRL's own script takes rewards by module; open-r1's, whose files have TRL's keys, has a registry and a default.
"""

from __future__ import annotations

from typing import Any

from lachesis.common.json_values import is_list
from lachesis.plugins.dialects.table import Translation, read_names
from lachesis.plugins.dialects.words import read_table

_NAME = "reward_funcs"
# Keys of open-r1's script that TRL's lacks: a file with one of them is for that script.
SCRIPT_NAMES = ("dataset_configs", *(entry.name for entry in read_names("trl", "open_r1")))
_DEFAULTS = ("accuracy", "format", "tag_count")

# Arguments of open-r1's rewards here, with their names and defaults there.
_ARGUMENTS = read_table("open_r1")["arguments"]
# Rewards of open-r1 that use judges of competitive programming on other machines.
_JUDGED_ELSEWHERE = ("ioi_code", "cf_code")


def put_open_r1_rewards(translation: Translation) -> None:
    """Set ``rewards.functions`` from the names in a file, or from its script's default if it has none."""
    rewards = translation.document.data["rewards"]
    named = rewards.get("functions")
    if named is None and any(translation.has(name) for name in ("dataset_name", "dataset_mixture")):
        named = _defaults(translation)
    if is_list(named):
        functions = [_with_arguments(translation, name) for name in named]
        if translation.has(_NAME):
            rewards["functions"] = functions
        else:
            translation.put("rewards.functions", functions, _NAME)


def _defaults(translation: Translation) -> list[Any] | None:
    """Return open-r1's default if the file has keys of its script; None otherwise."""
    if not any(translation.has(name) for name in SCRIPT_NAMES):
        return None
    names = ", ".join(_DEFAULTS)
    translation.warning(_NAME, f"missing in this file, which has keys of open-r1's script: its default {names} is used")
    return list(_DEFAULTS)


def _with_arguments(translation: Translation, name: Any) -> Any:
    """Return a reward of open-r1's registry with the arguments at the top of its recipe, and its defaults."""
    if name in _JUDGED_ELSEWHERE:
        translation.problem(_NAME, f"{name} needs Piston servers, which Lachesis lacks; name a function that has them")
    if not isinstance(name, str) or name not in _ARGUMENTS:
        return name
    given = {key: translation.value(theirs["name"], theirs["default"]) for key, theirs in _ARGUMENTS[name].items()}
    characters = {"in_tokens": False} if name in ("cosine", "repetition_penalty") else {}
    return {"function": name, "kwargs": {**given, **characters}}
