"""The contracts of all kinds of parts that may be the user's own, and the parts that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lachesis.bridges.build import BRIDGE
from lachesis.common.contracts import Contract, load_part, spec_of
from lachesis.config.custom import custom_parts
from lachesis.config.schema import LachesisConfig
from lachesis.engines.build import ENGINE
from lachesis.metrics.custom import HEALTH_RULE, SINK
from lachesis.rollouts.base import ROLLOUTS
from lachesis.train.losses.custom import LOSS
from lachesis.train.losses.custom_advantage import ADVANTAGE
from lachesis.train.optim.custom import OPTIMIZER, SCHEDULE

# Rewards have names of their own, arguments by column and processes to run in: lachesis.rollouts.rewards loads them.
CONTRACTS: Mapping[str, Contract] = {
    wanted.kind: wanted
    for wanted in (ROLLOUTS, ADVANTAGE, LOSS, OPTIMIZER, SCHEDULE, SINK, HEALTH_RULE, ENGINE, BRIDGE)
}


@dataclass(frozen=True, slots=True)
class Named:
    """A part under the key that names it. ``place`` is where it is written, empty where that is not known."""

    kind: str
    key: str
    spec: str


def check_custom_parts(config: LachesisConfig) -> tuple[Named, ...]:
    """Load each part that the configuration names, but rewards, and hold it against its contract.

    Raises:
        ConfigError: one cannot be found or imported, or has another signature.
    """
    return tuple(_checked(config))


def _checked(config: LachesisConfig) -> Iterator[Named]:
    for kind, key, given in custom_parts(config):
        if kind.name in CONTRACTS:
            load_part(given, CONTRACTS[kind.name])
            yield Named(kind.name, key, spec_of(given)[0])
