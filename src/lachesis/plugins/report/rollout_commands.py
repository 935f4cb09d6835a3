"""The command ``lachesis rollouts``: the rollouts of a run in a terminal."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lachesis.cli.base import app, console
from lachesis.common.errors import ConfigError
from lachesis.plugins.report.openenv_traces import trace_of
from lachesis.plugins.report.rollout_search import (
    Hit,
    Query,
    SearchedTurn,
    failures,
    read_sample,
    read_samples,
    read_steps,
    search,
)
from lachesis.web.tokens import colour

# The colours of tokens on the pages, from likely to unlikely, as terminals have them.
_COLOURS = ("", "green", "cyan", "blue", "yellow", "magenta", "red", "bold red")


@app.command()
def rollouts(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    place: Annotated[str | None, typer.Argument(help="STEP:GROUP:NUMBER of one to read turn by turn.")] = None,
    find: Annotated[str | None, typer.Option(help="Regular expression in prompt or completion.")] = None,
    steps: Annotated[str | None, typer.Option(help="A step, or FIRST-LAST.")] = None,
    least: Annotated[float | None, typer.Option(help="Least reward.")] = None,
    most: Annotated[float | None, typer.Option(help="Largest reward.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Id of a prompt.")] = None,
    finish: Annotated[str | None, typer.Option(help="How it ended: stop, length or abort.")] = None,
    environment: Annotated[str | None, typer.Option(help="Its environment, by name or number, or source.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Rollouts without a reward, by cause.")] = False,
    cause: Annotated[str | None, typer.Option(help="With --failed: of this cause only.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most lines.")] = 20,
    traces: Annotated[
        Path | None, typer.Option(help="Write all of --steps there, as OpenEnv's TrainingTraces.")
    ] = None,
) -> None:
    """Search a run's rollouts, or read one turn by turn."""
    if cause is not None and not failed:
        raise ConfigError("--cause is of failed rollouts", remedy="add --failed")
    if traces is not None:
        console.print(f"{_write_traces(run_dir, traces, steps=steps)} rollouts written to {traces}")
    elif place is not None:
        hit, turns = read_sample(run_dir, place)
        _show(hit, turns)
    elif failed:
        _show_failures(run_dir, cause=cause, limit=limit)
    else:
        first, last = read_steps(steps)
        query = Query(_pattern(find), first, last, least, most, prompt, finish, environment)
        _list(run_dir, query, limit=limit)


def _write_traces(run_dir: Path, path: Path, *, steps: str | None) -> int:
    """Write a line of JSON for each rollout, with its step, prompt, reward and trace; return their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for step, group, number, sample in read_samples(run_dir, steps):
            trace = trace_of(sample, name=f"{step}:{group}:{number}")
            line = {"step": step, "group": group, "reward": sample.reward, "training_trace": trace}
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


def _list(run_dir: Path, query: Query, *, limit: int) -> None:
    found = search(run_dir, query)
    hits = [*islice(found, limit)]
    for hit in hits:
        console.print(f"{hit.place:<12} {_number(hit.reward):>8}  {hit.prompt_id:<12} {hit.excerpt}")
    more = next(found, None) is not None
    console.print(f"{len(hits)} rollouts{', and more (--limit)' if more else ''}", style="dim")


def _show(hit: Hit, turns: list[SearchedTurn]) -> None:
    versions = "-".join(str(version) for version in dict.fromkeys(hit.versions))
    console.print(
        f"{hit.place}  prompt {hit.prompt_id}  reward {_number(hit.reward)}  advantage {_number(hit.advantage)}  "
        f"{hit.tokens} tokens  ended by {hit.finish}  weights {versions}",
        style="bold",
    )
    for turn in turns:
        note = "" if turn.sequence is None or not turn.sampled else _probability(turn)
        console.print(f"\n[{turn.role}{note}]", style="bold cyan" if turn.sampled else "bold")
        console.print(_coloured(turn))


def _coloured(turn: SearchedTurn) -> Text:
    if turn.sequence is None or not turn.sampled:
        return Text(turn.text, style="" if turn.sampled else "dim")
    pairs = zip(turn.sequence["pieces"], turn.sequence["logprobs"], strict=True)
    return Text.assemble(*((text, "" if p is None else _COLOURS[int(colour(p)[1:])]) for text, p in pairs))


def _probability(turn: SearchedTurn) -> str:
    known = [value for value in (turn.sequence or {})["logprobs"] if value is not None]
    if not known:
        return ""
    return f", {len(known)} tokens, mean probability {math.exp(sum(known) / len(known)):.2f}, least likely " + (
        f"{math.exp(min(known)):.2g}"
    )


def _show_failures(run_dir: Path, *, cause: str | None, limit: int) -> None:
    found = failures(run_dir, cause=cause)
    counts = Counter(one.cause for one in found)
    words = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    console.print(f"{len(found)} failed rollouts{': ' + words if words else ''}", style="bold")
    for one in found[:limit]:
        step = "not yet in a step" if one.step is None else f"step {one.step}"
        console.print(f"{step:<10} {one.cause:<10} {one.prompt_id:<12} {one.message}")


def _pattern(words: str | None) -> re.Pattern[str] | None:
    try:
        return None if words is None else re.compile(words, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"--find {words} is not a regular expression: {error}", remedy="escape its signs by \\"
        ) from error


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
