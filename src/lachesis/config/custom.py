"""The kinds of custom parts that users can supply, and the configuration keys that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.common.contracts import entry_point_group
from lachesis.common.json_values import is_array
from lachesis.config.schema import LachesisConfig, MixedSourceConfig


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of custom part.

    Args:
        name: its name in messages.
        key: dotted path of the key that names one part or a list of them.
        short: the argument of ``lachesis.train`` that takes the part as an object. If a section has the same name, a
            function given in place of that section is the part.
        needs: further keys to set in the section if the part is given as an object.
        several: True if the key takes a list.
    """

    name: str
    key: str
    short: str
    needs: tuple[tuple[str, str], ...] = ()
    several: bool = False

    @property
    def group(self) -> str:
        """Return the name of the entry-point group for this kind."""
        return entry_point_group(self.name)


KINDS: tuple[Kind, ...] = (
    Kind("reward", "rewards.functions", "rewards", several=True),
    Kind("rollout function", "source.rollout_func", "rollout_func"),
    Kind("advantage", "algorithm.advantage", "advantage"),
    Kind("loss", "algorithm.loss", "loss"),
    Kind("optimizer", "optimizer.function", "optimizer"),
    Kind("sink", "logging.sinks", "sinks", several=True),
    Kind("health rule", "logging.health_rules", "health_rules", several=True),
    Kind("engine", "engine.function", "engine", (("kind", "custom"),)),
)
BY_SHORT: Mapping[str, Kind] = {kind.short: kind for kind in KINDS if kind.name != "reward"}


def custom_parts(config: LachesisConfig) -> Iterator[tuple[Kind, str, Any]]:
    """Yield each part that a configuration names: its kind, its key with its index in a list, and the key's value."""
    yield from _named(config, KINDS)
    for index, source in enumerate(config.sources):
        kinds = [kind for kind in KINDS if kind.key.startswith(("rewards.", "source.")) or kind.name == "advantage"]
        for kind, key, value in _named(source, kinds):
            yield kind, f"sources[{index}].{key}", value


def _named(config: LachesisConfig | MixedSourceConfig, kinds: Sequence[Kind]) -> Iterator[tuple[Kind, str, Any]]:
    for kind in kinds:
        section, _, name = kind.key.partition(".")
        value = getattr(getattr(config, section), name, None)
        if is_array(value):
            yield from ((kind, f"{kind.key}[{index}]", one) for index, one in enumerate(value))
        elif value is not None:
            yield kind, kind.key, value
    for name in ("source", "engine"):
        if builds := getattr(getattr(config, name, None), "builds", None):
            yield Kind(name, f"{name}.kind", name), f"{name}.kind", builds
