"""``lachesis env NAME process``: rollouts to a JSONL file and a page to read them, without API and trainer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lachesis.api.scored_group import UNTRAINED
from lachesis.common.errors import DataError
from lachesis.common.files import write_atomic
from lachesis.environments.base import Environment
from lachesis.environments.outputs import Counters, JsonLines
from lachesis.environments.records import ScoredGroup
from lachesis.environments.tokenizer import pieces_of
from lachesis.environments.workers import WorkerPool
from lachesis.web.pages import render_page
from lachesis.web.tokens import colour

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    workers = WorkerPool(environment=environment, deliver=write, counters=lambda: counters)
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


TEMPLATE = Path(__file__).parent / "templates" / "rollouts.html.j2"


@dataclass(frozen=True, slots=True)
class Piece:
    """A token as it is shown: ``kind`` is a CSS class, ``hint`` what the pointer shows."""

    text: str
    kind: str
    hint: str


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence as it is shown."""

    score: float
    trained: int
    finish: str
    versions: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """A group as it is shown: what all its sequences begin with, and each of them from there."""

    number: int
    prompt: str
    mean: float
    rows: tuple[Row, ...]


def write_page(groups: Path, *, tokenizer: PreTrainedTokenizerBase, title: str) -> Path:
    """Write the page of a JSONL file of groups beside it; returns its path.

    Raises:
        DataError: the file cannot be read, or a line in it is no group.
    """
    path = groups.with_suffix(".html")
    html = render(read_groups(groups), pieces=lambda ids: pieces_of(tokenizer, ids), title=title)
    # A lone surrogate in a text has no place in UTF-8.
    write_atomic(path, html.encode("utf-8", "replace"))
    return path


def read_groups(path: Path) -> list[dict[str, Any]]:
    """The groups in a JSONL file.

    Raises:
        DataError: it cannot be read; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy="check the path") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            group = json.loads(line)
            if not len(group["tokens"]) == len(group["masks"]) == len(group["scores"]):
                raise ValueError("lists of different lengths")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: no scored group: {error}", remedy="remove the line") from error
        found.append(group)
    return found


def render(groups: Sequence[Mapping[str, Any]], *, pieces: Callable[[Sequence[int]], Sequence[str]], title: str) -> str:
    """The page of some groups. Texts of models are escaped, whatever they hold."""
    cards = [_card(number, group, pieces) for number, group in enumerate(groups, start=1)]
    scores = [row.score for card in cards for row in card.rows]
    mean = sum(scores) / len(scores) if scores else math.nan
    return render_page(TEMPLATE, title=title, cards=cards, sequences=len(scores), mean=mean)


def _card(number: int, group: Mapping[str, Any], pieces: Callable[[Sequence[int]], Sequence[str]]) -> Card:
    starts = [_first_trained(mask) for mask in group["masks"]]
    first = min(starts, default=0)
    prompt = "".join(pieces(group["tokens"][0][:first])) if starts else ""
    rows = tuple(_row(group, index, first, pieces) for index in range(len(group["tokens"])))
    mean = sum(row.score for row in rows) / len(rows) if rows else math.nan
    return Card(number=number, prompt=prompt, mean=mean, rows=rows)


def _row(group: Mapping[str, Any], index: int, first: int, pieces: Callable[[Sequence[int]], Sequence[str]]) -> Row:
    tokens, masks = group["tokens"][index], group["masks"][index]
    logprobs = (group.get("inference_logprobs") or [[]] * len(group["tokens"]))[index] or [None] * len(tokens)
    texts = pieces(tokens)
    shown = [
        _piece(text, token, mask, logprob)
        for text, token, mask, logprob in zip(
            texts[first:], tokens[first:], masks[first:], logprobs[first:], strict=True
        )
    ]
    known = (group.get("overrides") or [{}] * len(group["tokens"]))[index] or {}
    versions = known.get("weight_version") or {}
    return Row(
        score=group["scores"][index],
        trained=sum(mask != UNTRAINED for mask in masks),
        finish=str(known.get("finish_reason", "")),
        versions="–".join(str(v) for v in dict.fromkeys(versions.values())),
        pieces=tuple(shown),
    )


def _piece(text: str, token: int, mask: int, logprob: float | None) -> Piece:
    if mask == UNTRAINED:
        return Piece(text, "given", f"{token}: given, not trained")
    if logprob is None:
        return Piece(text, "", str(token))
    shade = colour(logprob)
    hint = f"{token}: p = {math.exp(min(0.0, logprob)):.3g}, logprob {logprob:.3f}"
    return Piece(text, shade if shade != "p0" else "", hint)


def _first_trained(mask: Sequence[int]) -> int:
    return next((at for at, value in enumerate(mask) if value != UNTRAINED), len(mask))
