"""Rollouts and held-out completions of a report, reduced to the size of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from lachesis.common.types import UNKNOWN_VERSIONS
from lachesis.metrics.names import format_number
from lachesis.metrics.sinks.tape import read_lines, tape_files
from lachesis.web.tokens import best_and_worst, token_spans

MAX_STEPS = 60
MAX_SAMPLES = 8
MAX_TOKENS = 240_000
MIN_TOKENS_A_SAMPLE = 160
MAX_PROMPT_CHARACTERS = 2000
MAX_PIECE_CHARACTERS = 60
USUAL_PIECE_CHARACTERS = 6
MAX_HELD_OUT = 20
MAX_HELD_OUT_CHARACTERS = 400


def rollouts(directory: Path, *, groups: int) -> list[dict[str, Any]]:
    """Return evenly spread steps of the tape, including the first and the last, with ``groups`` groups each.

    The number of completions and, if need be, their length are cut so that all steps together stay below
    :data:`MAX_TOKENS` tokens. Within a group the best completions come first.

    Raises:
        DataError: a file of the tape is malformed.
    """
    files = tape_files(directory)
    steps = _spread(list(files), limit=MAX_STEPS)
    if not steps or groups < 1:
        return []
    tokens_a_group = MAX_TOKENS // (len(steps) * groups)
    return [
        {
            "step": step,
            "groups": [_group(line, budget=tokens_a_group) for line in read_lines(files[step], limit=groups)],
        }
        for step in steps
    ]


def held_out(directory: Path) -> dict[str, Any] | None:
    """Return completions of the last stored evaluation, the worst first; None if there is none.

    Raises:
        DataError: a file is malformed.
    """
    files = tape_files(directory)
    if not files:
        return None
    step = max(files)
    rows = [
        {
            "prompt": _cut(line["prompt"]["text"], MAX_HELD_OUT_CHARACTERS),
            "completion": _cut(sample["text"], MAX_HELD_OUT_CHARACTERS),
            "reward": math.nan if sample["reward"] is None else sample["reward"],
        }
        for line in read_lines(files[step])
        for sample in line["samples"]
    ]
    rows.sort(key=lambda row: (not math.isnan(row["reward"]), row["reward"]))
    shared = _shared_beginning([row["prompt"] for row in rows])
    shown = [
        row | {"prompt": row["prompt"][len(shared) :], "reward": format_number(row["reward"])}
        for row in rows[:MAX_HELD_OUT]
    ]
    return {"step": step, "count": len(rows), "rows": shown, "shared": shared}


def _shared_beginning(prompts: Sequence[str]) -> str:
    """Return the whole lines that all prompts begin with, such as a system prompt; empty for one prompt."""
    if len(set(prompts)) < 2:
        return ""
    columns = zip(*(prompt.splitlines(keepends=True)[:-1] for prompt in prompts), strict=False)
    return "".join(lines[0] for lines in takewhile(lambda lines: len(set(lines)) == 1, columns))


def _spread(steps: list[int], *, limit: int) -> list[int]:
    if len(steps) <= limit:
        return steps
    return [steps[round(index * (len(steps) - 1) / (limit - 1))] for index in range(limit)]


def _group(line: Mapping[str, Any], *, budget: int) -> dict[str, Any]:
    samples = line["samples"]
    longest = max((len(sample["completion_ids"]) for sample in samples), default=0)
    kept = max(2, min(MAX_SAMPLES, budget // max(1, min(longest, MIN_TOKENS_A_SAMPLE))))
    logged = line.get("logged", {})
    samples = [
        {**sample, "logged": {name: values[index] for name, values in logged.items() if index < len(values)}}
        for index, sample in enumerate(samples)
    ]
    chosen = best_and_worst(samples, score=lambda sample: sample["reward"], limit=kept)
    prompt = line["prompt"]
    return {
        "id": prompt["id"],
        "prompt": _cut(prompt["text"], MAX_PROMPT_CHARACTERS),
        "images": prompt.get("thumbnails", []),
        "size": len(samples),
        "samples": [_sample(sample, limit=max(16, budget // len(chosen))) for sample in chosen],
    }


def _sample(sample: Mapping[str, Any], *, limit: int) -> dict[str, Any]:
    count = len(sample["completion_ids"])
    shown: dict[str, Any] = {
        "reward": sample["reward"],
        "advantage": sample["advantage"],
        "finish": sample["finish_reason"],
        "tokens": count,
        "images": sample.get("thumbnails", []),
        "logged": [f"{name} {_cut(str(value), MAX_PIECE_CHARACTERS)}" for name, value in sample["logged"].items()],
        "version": "unknown" if sample["versions"][0] == UNKNOWN_VERSIONS.first else sample["versions"][0],
    }
    pieces = sample.get("pieces")
    if pieces is None:
        return shown | {"text": _cut(sample["text"], 4 * limit)}
    kept = _within(pieces, limit=limit)
    given = [not sampled for sampled in (sample["mask"] or ())[: len(kept)]]
    return shown | token_spans(kept, sample["logprobs"], given=given, after=count - len(kept))


def _within(pieces: Sequence[str], *, limit: int) -> list[str]:
    """Return the first ``limit`` pieces, or fewer if they are unusually long."""
    kept: list[str] = []
    characters = 0
    for piece in pieces[:limit]:
        kept.append(_cut(piece, MAX_PIECE_CHARACTERS))
        characters += len(kept[-1])
        if characters > USUAL_PIECE_CHARACTERS * limit:
            break
    return kept


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
