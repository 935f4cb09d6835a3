"""Changes to a configuration that make trainer and engine fit on one card, the cheapest first."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lachesis.common.errors import ConfigError
from lachesis.config.rules import check
from lachesis.config.rules.distributed import require_distributable
from lachesis.config.rules.table import holds, names_of
from lachesis.config.schema import OWN_GPU_UTILIZATION, LachesisConfig
from lachesis.plan.cards import GB, PLAN_ERROR, CardUse, card_use
from lachesis.plan.gpu_share import beside_trainer, servers_on_card, share_left
from lachesis.plan.memory import must_keep_aside
from lachesis.plan.plan import plan
from lachesis.plan.shapes import FoundShape, find_shape, require_shape

# Tokens of a small micro-batch.
_SMALL_PASS = 2048
_TABLE = tomllib.loads(Path(__file__).with_name("fit.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Change:
    """Step that saves memory.

    ``sections`` are its changes; one with ``kind`` replaces the former section.
    """

    sections: Mapping[str, Mapping[str, Any]]
    costs: str

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Return the sections and keys that the step sets."""
        return {(section, key) for section, values in self.sections.items() for key in values}

    def words(self) -> list[str]:
        """Return the step as values of ``--set``."""
        return [
            f"{section}={{{', '.join(f'{key}: {_yaml(value)}' for key, value in keys.items())}}}"
            if "kind" in keys and section != "optimizer"
            else f"{section}.{key}={_yaml(value)}"
            for section, keys in self.sections.items()
            for key, value in (list(keys.items())[:1] if "kind" in keys else keys.items())
        ]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitting configuration, its use of the card, and the changes with the bytes that each saves."""

    config: LachesisConfig
    use: CardUse
    changes: Sequence[tuple[Change, int]]

    def in_words(self) -> list[tuple[Change, int, list[str]]]:
        """Return each change with its savings and description, without overridden ones."""
        last = {word.partition("=")[0]: word for change, _ in self.changes for word in change.words()}
        return [
            (change, saved, [word for word in change.words() if last[word.partition("=")[0]] == word])
            for change, saved in self.changes
        ]


def fit(config: LachesisConfig, *, card_gb: float, devices: int = 1, found: FoundShape | None = None) -> Fit | None:
    """Return the fewest of :func:`_steps`, in their order, that make it fit; None if all together do not.

    What fits unchanged stays; changes also leave room for a plan's error if they can.

    Args:
        card_gb: memory of a card, in units of 10^9 bytes.
        devices: number that train together, each with its part of trainer and engine.
        found: the model's shape; found by itself if unset.

    Raises:
        ConfigError: the model's shape is not known.
    """
    found = require_shape(config, found or find_shape(config.model.path, revision=config.model.revision))
    use = _Uses(card_gb, devices, found)
    found_roomy = _fit(config, replace(use, roomy=True)) if use.settled(config) is None else None
    return found_roomy or _fit(config, use)


def _fit(config: LachesisConfig, use: _Uses) -> Fit | None:
    taken: list[Change] = []
    current = config
    for step in [None, *_steps(config)]:
        if step is not None:
            changed = apply_change(current, step, devices=use.devices)
            if changed is None or use.least(changed) >= use.least(current):
                continue
            taken, current = [*(one for one in taken if not one.keys <= step.keys), step], changed
        if use.settled(current) is not None:
            return _described(config, _mildest(config, _needed_only(config, taken, use), use), use)
    return None


@dataclass(frozen=True, slots=True)
class _Uses:
    """Use of the card by configurations, which settle only with room for a plan's error if ``roomy``."""

    card_gb: float
    devices: int
    found: FoundShape
    roomy: bool = False

    def of(self, config: LachesisConfig) -> CardUse:
        planned = plan(config, device="cuda", devices=self.devices, found=self.found)
        return card_use(config, planned, card_gb=self.card_gb)

    def least(self, config: LachesisConfig) -> int:
        """Return the use by the trainer and the smallest sufficient engine."""
        use = self.of(config)
        aside = use.aside if must_keep_aside(config) else 0
        return use.trainer + (use.engine_least + aside if beside_trainer(config) else 0)

    def settled(self, config: LachesisConfig) -> tuple[LachesisConfig, Change | None] | None:
        """Return a fitting configuration: unchanged, or with another share for the engine beside the trainer."""
        use = self.of(config)
        if self._fits(use):
            return config, None
        if config.engine.kind != "vllm" or config.engine.gpu_memory_utilization is None or not beside_trainer(config):
            return None
        left = use.card - round((1 + PLAN_ERROR * self.roomy) * use.trainer)
        share = share_left(left, card=use.card, servers=servers_on_card(config, devices=self.devices))
        change = Change(
            {"engine": {"gpu_memory_utilization": min(share, OWN_GPU_UTILIZATION)}},
            "the engine gets the memory that the trainer leaves; its cache shrinks or grows",
        )
        changed = apply_change(config, change, devices=self.devices) if share > 0 else None
        return (changed, change) if changed is not None and self._fits(self.of(changed)) else None

    def _fits(self, use: CardUse) -> bool:
        return use.fits and (use.roomy or not self.roomy)


def _described(config: LachesisConfig, changes: Sequence[Change], use: _Uses) -> Fit:
    current, described = config, list[tuple[Change, int]]()
    for change in changes:
        changed = apply_change(current, change, devices=use.devices)
        assert changed is not None, "it was possible a moment ago"
        described.append((change, use.least(current) - use.least(changed)))
        current = changed
    settled = use.settled(current)
    assert settled is not None, "it fitted a moment ago"
    current, share = settled
    return Fit(current, use.of(current), [*described, *([] if share is None else [(share, 0)])])


def _needed_only(config: LachesisConfig, changes: Sequence[Change], use: _Uses) -> list[Change]:
    """Return the changes without unneeded ones; expensive ones are dropped first."""
    kept = list(changes)
    for change in reversed(changes):
        fewer = [one for one in kept if one is not change]
        changed = _all_changed(config, fewer, devices=use.devices)
        if changed is not None and use.settled(changed) is not None:
            kept = fewer
    return kept


def _mildest(config: LachesisConfig, changes: Sequence[Change], use: _Uses) -> list[Change]:
    """Return the changes, each replaced by the first step that sets the same keys and also fits."""
    kept = list(changes)
    for place, change in enumerate(changes):
        for step in takewhile(lambda step, change=change: step != change, _steps(config)):
            milder = [*kept[:place], step, *kept[place + 1 :]]
            changed = _all_changed(config, milder, devices=use.devices) if step.keys == change.keys else None
            if changed is not None and use.settled(changed) is not None:
                kept = milder
                break
    return kept


def _steps(config: LachesisConfig) -> Iterator[Change]:
    """Yield the steps, from cheap ones that only cost seconds to ones that change the training."""
    longest = config.sampling.max_completion_length + (config.data.max_prompt_length or 0)
    smaller = max(_SMALL_PASS, longest)
    if smaller < config.batch.max_tokens_per_microbatch:
        yield Change({"batch": {"max_tokens_per_microbatch": smaller}}, "more passes, the same result")
    names = names_of(config) | {"updates_wait": must_keep_aside(config)}
    for row in _TABLE["steps"]:
        if holds(row["when"], names):
            yield Change(row["sets"], row["costs"])


def apply_change(config: LachesisConfig, change: Change, *, devices: int) -> LachesisConfig | None:
    """Return the changed configuration, or None if it conflicts with other keys, or with several devices."""
    data = config.model_dump(mode="json")
    for section, keys in change.sections.items():
        replaced = "kind" in keys and section != "optimizer"
        data[section] = dict(keys) if replaced else data[section] | dict(keys)
    try:
        changed = type(config).model_validate(data)
        check(changed)
        if devices > 1:
            require_distributable(changed, ranks=devices)
    except (ValidationError, ConfigError):
        return None
    return changed


def _all_changed(config: LachesisConfig, changes: Sequence[Change], *, devices: int) -> LachesisConfig | None:
    current: LachesisConfig | None = config
    for change in changes:
        current = None if current is None else apply_change(current, change, devices=devices)
    return current


def fit_lines(found: Fit | None, *, card_gb: float) -> list[str]:
    """Return the result as lines of text."""
    if found is None:
        return [f"no tried change fits on {card_gb:g} GB: shard over several cards (torchrun), or use a smaller model"]
    engine = found.use.engine + found.use.aside
    share = f", of which {engine / GB:.1f} GB are the engine's" if engine else ""
    share += f" (engine.gpu_memory_utilization {found.use.share:g})" if share and found.use.share else ""
    size = f"{found.use.total / GB:.1f} GB of {card_gb:g}{share}"
    if not found.changes:
        return [f"it fits unchanged: {size}", *_tight_lines(found, card_gb)]
    lines = [f"it fits with these: {size}", *_tight_lines(found, card_gb)]
    for change, saved, words in found.in_words():
        saves = f"saves {saved / GB:.1f} GB: " if saved > 0 else ""
        reasons = [f"    # {saves}{change.costs}", *[""] * (len(words) - 1)]
        lines += [f"  --set '{word}'{reason}" for word, reason in zip(words, reasons, strict=True)]
    return lines


def _tight_lines(found: Fit, card_gb: float) -> list[str]:
    if not found.use.tight:
        return []
    way = f"`--fit {math.floor(card_gb / (1 + PLAN_ERROR))}` says what leaves room for that"
    if found.use.share and found.use.engine > found.use.engine_least:
        way = "a lower engine.gpu_memory_utilization leaves room for that"
    return [f"  tight: plans have been up to {PLAN_ERROR:.1%} off; {way}"]


def _yaml(value: object) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
