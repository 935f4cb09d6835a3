"""``lachesis env NAME process``: rollouts to a JSONL file and a page to read them, without API and trainer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lachesis.common.errors import DataError
from lachesis.common.files import write_atomic
from lachesis.plugins.atropos.api.scored_group import UNTRAINED
from lachesis.plugins.atropos.environments.base import Environment
from lachesis.plugins.atropos.environments.outputs import Counters, JsonLines
from lachesis.plugins.atropos.environments.records import UsableGroup
from lachesis.plugins.atropos.environments.tokenizer import pieces_of
from lachesis.plugins.atropos.environments.workers import GroupWorkers
from lachesis.web.pages import render_page
from lachesis.web.tokens import colour

_AT_ONCE = 16
TEMPLATE = Path(__file__).parent / "templates" / "rollouts.html.j2"


class Processed(NamedTuple):
    """The JSONL file with the groups, the page beside it, and the counters."""

    rollouts: Path
    page: Path
    counters: Counters


async def process(environment: Environment[Any, Any], *, groups: int, path: Path) -> Processed:
    """Make ``groups`` groups, and write them and a page to read them.

    Args:
        environment: maker of the groups; its messages should be included, for the page shows them.
        groups: number of groups; fewer if the problems run out.
        path: the JSONL file; if it exists already, a similar free name is taken.

    Raises:
        DataError: no group could be made.
        ConfigError, EngineError, DeadlineExceeded: the environment cannot continue.
    """
    counters = Counters()
    file = JsonLines(free_name(path), option="--env.data_path_to_save_groups")
    made: list[UsableGroup] = []

    def write(group: UsableGroup) -> None:
        if len(made) < groups:
            file.write(group.document())
            made.append(group)
            counters.count_sent(group)

    await environment.setup()
    await environment.client.wait_until_ready()
    workers = GroupWorkers(environment=environment, deliver=write, counters=lambda: counters)
    at_once = environment.config.max_num_workers if environment.config.max_num_workers > 0 else _AT_ONCE
    try:
        while len(made) < groups:
            await workers.fill(min(at_once, groups - len(made)))
            if not workers.tasks:
                break
            await asyncio.wait(workers.tasks, return_when=asyncio.FIRST_COMPLETED)
            workers.reap()
    finally:
        await workers.stop()
        file.close()
    if not made:
        raise DataError(f"the environment {environment.name} made no group", remedy="give it problems")
    page = file.path.with_suffix(".html")
    html = render(made, pieces=lambda ids: pieces_of(environment.tokenizer, ids), title=environment.name)
    # UTF-8 cannot encode a lone surrogate.
    write_atomic(page, html.encode("utf-8", "replace"))
    return Processed(file.path, page, counters)


def free_name(path: Path) -> Path:
    """Return ``path``, or the first of ``path_1``, ``path_2``, ... that does not exist."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}_{number}")
    return candidate


def render(groups: Sequence[UsableGroup], *, pieces: Callable[[Sequence[int]], Sequence[str]], title: str) -> str:
    """Render the page of some groups. All texts of models are escaped."""
    scores = [score for group in groups for score in group.scores]
    return render_page(
        TEMPLATE,
        title=title,
        groups=[_shown(group, pieces) for group in groups],
        sequences=len(scores),
        mean=fmean(scores),
        untrained=UNTRAINED,
        colour=colour,
        exp=math.exp,
    )


def _shown(group: UsableGroup, pieces: Callable[[Sequence[int]], Sequence[str]]) -> dict[str, Any]:
    """Return a group for display: the common beginning of all its sequences, and each of them from there."""
    first = min(next((at for at, value in enumerate(mask) if value != UNTRAINED), len(mask)) for mask in group.masks)
    columns = zip(group.tokens, group.masks, group.inference_logprobs or (), strict=True)
    return {
        "prompt": "".join(pieces(group.tokens[0][:first])),
        "mean": fmean(group.scores),
        "rows": [
            {
                "score": group.scores[index],
                "trained": sum(mask != UNTRAINED for mask in masks),
                "known": group.overrides[index] if group.overrides else {},
                "tokens": list(zip(pieces(tokens), tokens, masks, logprobs, strict=True))[first:],
            }
            for index, (tokens, masks, logprobs) in enumerate(columns)
        ],
    }
