"""The rules in ``rules.toml``: conditions on the configuration, with a message if one holds."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any, get_args

from lachesis.common.errors import ConfigError
from lachesis.common.types import Level
from lachesis.config.rules.base import Rule, Said, changed
from lachesis.config.rules.training import learning_rate
from lachesis.config.schema import EpisodesSourceConfig, LachesisConfig
from lachesis.config.steps import prompts_per_generation, steps_per_batch

RULES = Path(__file__).with_name("rules.toml")
_LEVELS: tuple[Level, ...] = get_args(Level)
# Loss types with a ratio per token, or with none.
_TOKEN_RATIOS = ("gmpo", "reinforce", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
# Functions that conditions may call, and no others.
_FUNCTIONS = {
    "__builtins__": {"any": any, "len": len, "str": str, "type": type},
    "fullmatch": re.fullmatch,
    "is_file": os.path.isfile,
    **{function.__name__: function for function in (learning_rate, prompts_per_generation, steps_per_batch)},
}


@cache
def rows(table: Path = RULES) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return the rows of a table, by the name of their rule."""
    return tomllib.loads(table.read_text(encoding="utf-8"))


def rule(name: str, table: Path = RULES) -> Rule:
    """Return the rule that the rows of this name define."""
    stated = partial(_stated, rows(table)[name])
    stated.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]  # findings go by it
    return stated


def names_of(config: LachesisConfig) -> dict[str, Any]:
    """Return the names that conditions and messages may use: the sections, and ``config`` for what it computes."""
    sections = {name: getattr(config, name) for name in LachesisConfig.model_fields}
    episodes = isinstance(config.source, EpisodesSourceConfig)
    shared = "bridge.kind shared_vllm" if config.bridge.kind == "shared_vllm" else "bridge.share_base"
    rounded = "quantization" if getattr(config.engine, "quantization", "none") != "none" else "kv_cache_dtype"
    return sections | {
        "config": config,
        "teacher": config.algorithm.teacher,
        "token_ratios": _TOKEN_RATIOS,
        "plays_episodes": episodes,
        "brings_groups": not episodes and config.source.kind not in ("local", "agent"),
        "shared_key": shared if config.shares_weights else "",
        "rounded_key": f"engine.{rounded} fp8" if getattr(config.engine, "rounds", False) else "",
    }


def _stated(stated: Sequence[Mapping[str, Any]], config: LachesisConfig) -> Iterator[Said]:
    names = names_of(config)
    for row in stated:
        (level,) = set(_LEVELS).intersection(row)
        if not holds(row["when"], names):
            continue
        each = [key for path in row.get("each", ()) for key in changed(config, *path.split("."))]
        several = [key for path in row.get("changed", ()) for key in changed(config, *path.split("."))]
        if "each" in row:
            for key in each:
                yield level, row[level].format(key=key, **names)
        elif several or "changed" not in row:
            words = {"changed": " and ".join(several), "listed": ", ".join(several)}
            yield level, row[level].format(do="does" if len(several) == 1 else "do", **words, **names)


def refuse(table: Path, section: str, config: LachesisConfig, **more: object) -> None:
    """Raise the first refusal in a section of a TOML file whose condition holds; ``more`` are names beside those above.

    Raises:
        ConfigError: one holds.
    """
    names = names_of(config) | more
    for row in rows(table)[section]:
        if holds(row["when"], names):
            raise ConfigError(row["refused"].format(**names), remedy=row["remedy"].format(**names))


def holds(condition: str, names: dict[str, Any]) -> bool:
    """Return True if a condition of the table, which is text of ours and not of a user, holds for these names.

    A value that it names by ``:=`` is added to ``names``.
    """
    return bool(eval(_condition(condition), _FUNCTIONS, names))


@cache
def _condition(text: str) -> CodeType:
    return compile(f"({text})", "rules.toml: " + " ".join(text.split()), "eval")
