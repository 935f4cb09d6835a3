"""The two sides of a run over a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from lachesis.config.schema import LachesisConfig
from lachesis.run.context import EngineSide, RunPlace
from lachesis.run.parts import build_policy
from lachesis.run.servers import build_servers
from lachesis.train.policy import Policy


@contextmanager
def two_sides(config: LachesisConfig, directory: Path) -> Iterator[tuple[EngineSide, Policy]]:
    """The servers of a configuration and the policy that they serve, after the first sync."""
    place = RunPlace(directory=directory / "run", engine_log=directory / "engine.log", owner="a test")
    place.directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    side = build_servers(config, place=place)
    try:
        policy = side.bridge.prepare(partial(build_policy, config, weights=side.weights))
        side.bridge.sync(0)
        yield side, policy
    finally:
        side.close()
