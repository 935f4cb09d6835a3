"""``lachesis env NAME process``: rollouts to a JSONL file and a page to read them, without API and trainer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    pass


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
        groups: number of groups; fewer if problems run out.
        path: the JSONL file; if it exists already, a similar free name is taken.

    Raises:
        DataError: no group could be made.
        ConfigError, EngineError, DeadlineExceeded: it cannot continue.
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
    # A lone surrogate in a text has no place in UTF-8.
    write_atomic(page, html.encode("utf-8", "replace"))
    return Processed(file.path, page, counters)


def free_name(path: Path) -> Path:
    """``path``, or the first of ``path_1``, ``path_2``, ... that is not there."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}_{number}")
    return candidate


@dataclass(frozen=True, slots=True)
class Piece:
    """A token for display: ``kind`` is a CSS class, ``hint`` its tooltip."""

    text: str
    kind: str
    hint: str


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence for display."""

    score: float
    trained: int
    finish: str
    versions: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """A group for display: the common beginning of all its sequences, and each of them from there."""

    number: int
    prompt: str
    mean: float
    rows: tuple[Row, ...]


def render(groups: Sequence[UsableGroup], *, pieces: Callable[[Sequence[int]], Sequence[str]], title: str) -> str:
    """Render the page of some groups. All texts of models are escaped."""
    cards = [_card(number, group, pieces) for number, group in enumerate(groups, start=1)]
    scores = [score for group in groups for score in group.scores]
    return render_page(TEMPLATE, title=title, cards=cards, sequences=len(scores), mean=fmean(scores))


def _card(number: int, group: UsableGroup, pieces: Callable[[Sequence[int]], Sequence[str]]) -> Card:
    first = min(_first_trained(mask) for mask in group.masks)
    prompt = "".join(pieces(group.tokens[0][:first]))
    rows = tuple(_row(group, index, first, pieces) for index in range(group.size))
    return Card(number=number, prompt=prompt, mean=fmean(group.scores), rows=rows)


def _row(group: UsableGroup, index: int, first: int, pieces: Callable[[Sequence[int]], Sequence[str]]) -> Row:
    tokens, masks, logprobs = group.tokens[index], group.masks[index], (group.inference_logprobs or [])[index]
    shown = zip(pieces(tokens)[first:], tokens[first:], masks[first:], logprobs[first:], strict=True)
    known = group.overrides[index] if group.overrides else {}
    versions = known.get("weight_version") or {}
    return Row(
        score=group.scores[index],
        trained=sum(mask != UNTRAINED for mask in masks),
        finish=str(known.get("finish_reason", "")),
        versions="–".join(str(v) for v in dict.fromkeys(versions.values())),
        pieces=tuple(_piece(*token) for token in shown),
    )


def _piece(text: str, token: int, mask: int, logprob: float) -> Piece:
    if mask == UNTRAINED:
        return Piece(text, "given", f"{token}: given, not trained")
    shade = colour(logprob)
    hint = f"{token}: p = {math.exp(min(0.0, logprob)):.3g}, logprob {logprob:.3f}"
    return Piece(text, shade if shade != "p0" else "", hint)


def _first_trained(mask: Sequence[int]) -> int:
    return next((at for at, value in enumerate(mask) if value != UNTRAINED), len(mask))
