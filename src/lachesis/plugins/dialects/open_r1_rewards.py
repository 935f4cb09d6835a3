"""Rewards in TRL's flat files: open-r1's names with their arguments, those of a fork, and the defaults of both.

TRL's own script takes rewards by module; open-r1's, whose files have TRL's keys, has a registry and a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.json_values import is_list
from lachesis.config.schema.rollouts import NAMED_REWARDS
from lachesis.plugins.dialects.open_r1_scripts import Script, read_script
from lachesis.plugins.dialects.table import Translation, read_names

_NAME = "reward_funcs"
# Keys that open-r1's script has and TRL's has not: a file with one of them is for that script.
SCRIPT_NAMES = ("dataset_configs", *(entry.name for entry in read_names("trl", "open_r1")))
_DEFAULTS = ("accuracy", "format", "tag_count")

# Of open-r1's rewards: the arguments here, their names there, and their defaults there.
_ARGUMENTS: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "cosine": {
        "max_len": ("cosine_max_len", 1000),
        "min_value_wrong": ("cosine_min_value_wrong", 0.0),
        "max_value_wrong": ("cosine_max_value_wrong", -0.5),
        "min_value_correct": ("cosine_min_value_correct", 0.5),
        "max_value_correct": ("cosine_max_value_correct", 1.0),
    },
    "repetition_penalty": {
        "ngram_size": ("repetition_n_grams", 3),
        "max_penalty": ("repetition_max_penalty", -1.0),
    },
    "soft_overlong_punishment": {
        "max_completion_len": ("max_completion_len", 16384),
        "soft_punish_cache": ("soft_punish_cache", 4096),
    },
    "code_format": {"language": ("code_language", "python")},
}
# Rewards of open-r1 that ask judges of competitive programming on other machines.
_JUDGED_ELSEWHERE = ("ioi_code", "cf_code")


def put_open_r1_rewards(translation: Translation, recipe: str) -> None:
    """Set ``rewards.functions`` from the names in a file, or from its script's default if it has none.

    Args:
        translation: of the document.
        recipe: the path of the file, which leads to the script of a fork.
    """
    rewards = translation.document.data["rewards"]
    named = rewards.get("functions")
    if named is None and any(translation.has(name) for name in ("dataset_name", "dataset_mixture")):
        named = _defaults(translation, read_script(recipe))
    elif is_list(named) and any(_is_bare(name) and name not in NAMED_REWARDS for name in named):
        named = _of_registry(translation, named, read_script(recipe))
    if is_list(named):
        functions = [_with_arguments(translation, name) for name in named]
        if translation.has(_NAME):
            rewards["functions"] = functions
        else:
            translation.put("rewards.functions", functions, _NAME)


def _is_bare(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier()


def _defaults(translation: Translation, script: Script) -> list[Any] | None:
    """Return a fork's default, or open-r1's if the file has keys of its script; None if nobody has one."""
    # Recipes are for grpo.py, which has its arguments in configs.py; what stands beside it are other experiments.
    own = {file: names for file, names in script.defaults.items() if Path(file).name in ("grpo.py", "configs.py")}
    found = set((own or script.defaults).values())
    if len(found) == 1:
        named = _of_registry(translation, next(iter(found)), script)
        places = ", ".join(_shown(file) for file in own or script.defaults)
        translation.note(_NAME, f"not in this file; the default of {places} is {', '.join(next(iter(found)))}")
        return named
    if len(found) > 1:
        said = "; ".join(f"{_shown(file)} has {', '.join(names)}" for file, names in script.defaults.items())
        translation.problem(_NAME, f"not in this file, and its scripts have several defaults: {said}; write one")
        return None
    if not any(translation.has(name) for name in SCRIPT_NAMES):
        return None
    names = ", ".join(_DEFAULTS)
    translation.warning(_NAME, f"not in this file, which has keys of open-r1's script: its default is taken, {names}")
    return list(_DEFAULTS)


def _of_registry(translation: Translation, named: Sequence[Any], script: Script) -> list[Any]:
    """Names that Lachesis does not have as the functions that they are in a fork's registry."""
    functions: list[Any] = []
    for name in named:
        spec = script.rewards.get(name) if _is_bare(name) and name not in NAMED_REWARDS else None
        if spec is not None:
            file, _, function = spec.rpartition(":")
            translation.note(_NAME, f"{name} is {function} of {_shown(file)}")
        elif _is_bare(name) and name not in NAMED_REWARDS and name in script.rewards:
            text = f"{name} is made with arguments where it is registered; write FILE.py:FACTORY with its kwargs"
            translation.problem(_NAME, text)
        functions.append(spec or name)
    return functions


def _with_arguments(translation: Translation, name: Any) -> Any:
    """Return a reward of open-r1's registry with the arguments at the top of its recipe, and its defaults."""
    if name in _JUDGED_ELSEWHERE:
        translation.problem(_NAME, f"{name} asks Piston servers, which Lachesis does not; name a function that does")
    if not isinstance(name, str) or name not in _ARGUMENTS:
        return name
    given = {key: translation.value(theirs, default) for key, (theirs, default) in _ARGUMENTS[name].items()}
    characters = {"in_tokens": False} if name in ("cosine", "repetition_penalty") else {}
    return {"function": name, "kwargs": {**given, **characters}}


def _shown(file: str) -> str:
    return str(Path(*Path(file).parts[-3:]))
