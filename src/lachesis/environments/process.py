"""Rollouts without an API and a trainer: to a JSONL file, and a page to read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError
from lachesis.environments.base import Environment
from lachesis.environments.counters import Tally
from lachesis.environments.outputs import JsonLines
from lachesis.environments.page import write_page
from lachesis.environments.records import ScoredGroup
from lachesis.environments.workers import Crew

_AT_ONCE = 16


async def process(
    environment: Environment[Any, Any], *, groups: int, path: Path, say: Callable[[str], None]
) -> tuple[Path, Path, Tally]:
    """Make ``groups`` groups; the JSONL file, the page beside it, and what was counted.

    Args:
        environment: what makes them; its messages should be included, for the page shows them.
        groups: how many; fewer where problems run out.
        path: the JSONL file; where it is there already, a free name like it is taken.
        say: told of each group that failed.

    Raises:
        DataError: no group could be made.
        ConfigError, EngineError, DeadlineExceeded: it cannot go on.
    """
    tally = Tally()
    file = JsonLines(free_name(path), option="--env.data_path_to_save_groups")

    def write(group: ScoredGroup) -> None:
        if tally.groups < groups:
            file.write(group.document())
            tally.count_sent(group)

    await environment.setup()
    await environment.client.wait_until_ready()
    crew = Crew(environment, limit_s=environment.config.worker_timeout, deliver=write, tally=lambda: tally, say=say)
    at_once = environment.config.max_num_workers if environment.config.max_num_workers > 0 else _AT_ONCE
    try:
        while tally.groups < groups:
            await crew.fill(min(at_once, groups - tally.groups))
            if not crew.tasks:
                break
            await asyncio.wait(crew.tasks, return_when=asyncio.FIRST_COMPLETED)
            crew.reap()
    finally:
        await crew.stop()
        file.close()
    if not tally.groups:
        raise DataError(f"the environment {environment.name} made no group", remedy="give it problems")
    page = write_page(file.path, tokenizer=environment.tokenizer, title=environment.name)
    return file.path, page, tally


def free_name(path: Path) -> Path:
    """``path``, or the first of ``path_1``, ``path_2``, ... that is not there."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}_{number}")
    return candidate
