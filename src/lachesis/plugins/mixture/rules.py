"""Rules about combinations that several sources in one run forbid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from lachesis.common.types import Finding
from lachesis.config.rules.base import Rule, Said, found_by, note, problem
from lachesis.config.rules.table import rows, rule
from lachesis.config.schema import DataConfig, LachesisConfig, LocalSourceConfig, MixedSourceConfig, RewardsConfig
from lachesis.config.single_sources import checked_configs
from lachesis.config.steps import prompts_per_generation

Find = Callable[[LachesisConfig], Iterator[Finding]]
"""Function that checks the configuration of a run of one source."""


def _sections(config: LachesisConfig) -> Iterator[Said]:
    """Refuse sections of one source next to a list of several."""
    unset = {"source": LocalSourceConfig(), "data": DataConfig(), "rewards": RewardsConfig()}
    if config.sources and (written := [name for name, empty in unset.items() if getattr(config, name) != empty]):
        yield problem(
            f"{' and '.join(written)} and sources both define the source of groups; move {' and '.join(written)} into "
            f"an entry of sources, or remove sources"
        )


def _names(config: LachesisConfig) -> Iterator[Said]:
    first: dict[str, str] = {}
    for place, one in _places(config):
        if first.setdefault(one.name, place) != place:
            yield problem(f"{first[one.name]} and {place} have the same name, {one.name}; rename one of them")


def _whole_batches(config: LachesisConfig) -> Iterator[Said]:
    """Refuse a source that needs the whole batch, or the whole process, next to another one."""
    places = list(_places(config))
    for place, one in places:
        if one.source.kind == "atropos":
            others = [f"{other} ({this.name})" for other, this in places if other != place]
            beside = f"so {' and '.join(others)} would have no share of them" if others else "as a run of one source"
            yield problem(
                f"{place} ({one.name}) has source.kind atropos, whose rollout API makes whole batches, {beside}; set "
                "source.kind: atropos in place of sources, or use its environments as source.kind steps or verifiers"
            )
    walls = {one.rewards.sandbox: f"{place} ({one.name})" for place, one in places if one.rewards.sandbox != "auto"}
    if len(walls) > 1:
        said = " and ".join(f"{place} has rewards.sandbox {wall}" for wall, place in walls.items())
        yield problem(f"{said}, but a run has one sandbox for all rewards; give all sources the same")


def _limits(config: LachesisConfig) -> Iterator[Said]:
    longest, prompts = config.sampling.max_completion_length, prompts_per_generation(config)
    total = sum(one.weight for one in config.sources)
    for place, one in _places(config):
        if one.max_completion_length is not None and one.max_completion_length > longest:
            yield problem(
                f"{place}.max_completion_length {one.max_completion_length} is more than "
                f"sampling.max_completion_length {longest}, the limit for all; raise that one"
            )
        if one.max_unfinished is not None and not config.pipeline.async_prefetch:
            yield problem(
                f"{place}.max_unfinished lets others take a slow source's turns, but without pipeline.async_prefetch "
                "each batch is generated as a whole; set that, or remove it"
            )
        if (mine := prompts * one.weight / total) < 1:
            yield note(
                f"{place} ({one.name}) has {mine:.2g} of the {prompts} prompts that are generated at once: a group in "
                f"one of {1 / mine:.3g} batches"
            )


def _places(config: LachesisConfig) -> Iterator[tuple[str, MixedSourceConfig]]:
    for index, one in enumerate(config.sources):
        yield f"sources[{index}]", one


def _teachers(config: LachesisConfig) -> Iterator[Said]:
    names = [one.name for one in config.sources]
    for name in config.algorithm.teachers:
        if name not in names:
            yield problem(f"algorithm.teachers.{name}: no source has that name; use one of {', '.join(names)}")


_TABLE = Path(__file__).with_name("rules.toml")
_STATED = [rule(name, _TABLE) for name in rows(_TABLE)]
SOURCES_RULES: tuple[Rule, ...] = (_sections, _names, _whole_batches, _limits, _teachers, *_STATED)


def findings(config: LachesisConfig, find: Find) -> Iterator[Finding]:
    """Yield the findings about the list, and about each source as if it were the only one.

    A finding about all sources is given once; other messages begin with the place of the source.

    Args:
        config: with ``sources``.
        find: the rules of a run of one source.
    """
    yield from found_by(SOURCES_RULES, config)
    said = [
        (place, [_named(finding, one.name if config.algorithm.teachers else "") for finding in find(single)])
        for (place, single), one in zip(checked_configs(config), config.sources, strict=True)
    ]
    everywhere = [one for one in said[0][1] if all(one in found for _, found in said)]
    yield from everywhere
    for place, found in said:
        for one in found:
            if one not in everywhere:
                yield replace(one, message=f"{place}: {one.message}")


def _named(finding: Finding, name: str) -> Finding:
    """Return a finding with the name of a source's own teacher, which has no name in the source's configuration."""
    if not name:
        return finding
    return replace(finding, message=finding.message.replace("algorithm.teacher.", f"algorithm.teachers.{name}."))
