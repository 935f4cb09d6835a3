"""Algorithm presets: the keys that each ``algorithm.preset`` sets, with the paper or code it is from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from lachesis.common.json_values import is_list, is_object
from lachesis.config.schema import LachesisConfig, SamplingConfig
from lachesis.config.schema.training import PresetName

_OVERLONG = "soft_overlong_punishment"


def _read() -> dict[str, dict[str, Any]]:
    """Return the presets of ``presets.toml``: for each, values by the dotted path of their keys."""
    document = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
    return {
        name: {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
        for name, sections in document.items()
    }


PRESETS: Mapping[str, Mapping[str, Any]] = _read()
assert set(PRESETS) == set(get_args(PresetName))


def apply_preset(data: dict[str, Any]) -> None:
    """Write the keys of ``algorithm.preset`` into a configuration, except those it sets itself."""
    algorithm = data.get("algorithm")
    name = algorithm.get("preset") if is_object(algorithm) else None
    if not isinstance(name, str) or name not in PRESETS:
        return  # the schema check reports an unknown name
    for path, value in PRESETS[name].items():
        section, _, key = path.partition(".")
        keys = data.setdefault(section, {})
        if is_object(keys):
            keys.setdefault(key, value)
    if name == "dapo":
        _punish_overlong(data)


def _punish_overlong(data: Mapping[str, Any]) -> None:
    """Append DAPO's overlong penalty, over the last fifth of the length limit, to the rewards unless present."""
    rewards, sampling = data.get("rewards"), data.get("sampling")
    functions = rewards.get("functions") if is_object(rewards) else None
    if not is_object(rewards) or not is_list(functions) or _OVERLONG in str(functions):
        return
    default = SamplingConfig.model_fields["max_completion_length"].default
    longest = sampling.get("max_completion_length", default) if is_object(sampling) else default
    if not isinstance(longest, int):
        return
    kwargs = {"max_completion_len": longest, "soft_punish_cache": max(1, longest // 5)}
    functions.append({"function": _OVERLONG, "kwargs": kwargs})
    if is_list(weights := rewards.get("weights")):
        weights.append(1.0)


def preset_in_words(config: LachesisConfig) -> str:
    """Describe the keys that a configuration's preset sets, and those that the configuration overrides."""
    name = config.algorithm.preset
    assert name is not None
    taken, other = list[str](), list[str]()
    for path, value in PRESETS[name].items():
        section, _, key = path.partition(".")
        found = getattr(getattr(config, section), key)
        (taken if found == value else other).append(f"{path}: {found}")
    taken += [f"rewards.functions: {_OVERLONG}"] if _OVERLONG in str(config.rewards.functions) else []
    stands = f"algorithm.preset {name} stands for {', '.join(taken) or 'nothing that is not overridden'}"
    return stands + (f"; overridden by the configuration: {', '.join(other)}" if other else "")
