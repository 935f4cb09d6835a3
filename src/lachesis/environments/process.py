"""``lachesis env NAME process``: rollouts to a JSONL file and a page to read them, without API and trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

from lachesis.common.errors import DataError
from lachesis.environments.base import Environment
from lachesis.environments.counters import Counters
from lachesis.environments.outputs import JsonLines
from lachesis.environments.page import write_page
from lachesis.environments.records import ScoredGroup
from lachesis.environments.workers import WorkerPool

_AT_ONCE = 16


class Processed(NamedTuple):
    """The JSONL file with the groups, the page beside it, and what was counted."""

    rollouts: Path
    page: Path
    counters: Counters


async def process(environment: Environment[Any, Any], *, groups: int, path: Path) -> Processed:
    """Make ``groups`` groups, and write them and a page to read them.

    Args:
        environment: what makes them; its messages should be included, for the page shows them.
        groups: how many; fewer where problems run out.
        path: the JSONL file; where it is there already, a free name like it is taken.

    Raises:
        DataError: no group could be made.
        ConfigError, EngineError, DeadlineExceeded: it cannot go on.
    """
    counters = Counters()
    file = JsonLines(free_name(path), option="--env.data_path_to_save_groups")

    def write(group: ScoredGroup) -> None:
        if counters.groups < groups:
            file.write(group.document())
            counters.count_sent(group)

    await environment.setup()
    await environment.client.wait_until_ready()
    workers = WorkerPool(
        environment, limit_s=environment.config.worker_timeout, deliver=write, counters=lambda: counters
    )
    at_once = environment.config.max_num_workers if environment.config.max_num_workers > 0 else _AT_ONCE
    try:
        while counters.groups < groups:
            await workers.fill(min(at_once, groups - counters.groups))
            if not workers.tasks:
                break
            await asyncio.wait(workers.tasks, return_when=asyncio.FIRST_COMPLETED)
            workers.reap()
    finally:
        await workers.stop()
        file.close()
    if not counters.groups:
        raise DataError(f"the environment {environment.name} made no group", remedy="give it problems")
    page = write_page(file.path, tokenizer=environment.tokenizer, title=environment.name)
    return Processed(file.path, page, counters)


def free_name(path: Path) -> Path:
    """``path``, or the first of ``path_1``, ``path_2``, ... that is not there."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}_{number}")
    return candidate
