"""The command ``lachesis rollouts``: the rollouts of a run in a terminal."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lachesis.cli.base import app, console
from lachesis.plugins.report.rollout_search import (
    Hit,
    Query,
    SearchedTurn,
    failures,
    read_sample,
    read_samples,
    read_steps,
    search,
    trace_of,
)


@app.command()
def rollouts(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    place: Annotated[str | None, typer.Argument(help="STEP:GROUP:NUMBER of a rollout to read turn by turn.")] = None,
    find: Annotated[str, typer.Option(help="Text in prompt or completion.")] = "",
    steps: Annotated[str | None, typer.Option(help="Step, or range FIRST-LAST.")] = None,
    least: Annotated[float | None, typer.Option(help="Lowest reward.")] = None,
    most: Annotated[float | None, typer.Option(help="Highest reward.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Id of a prompt.")] = None,
    environment: Annotated[str | None, typer.Option(help="Its environment, by name or number, or source.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Rollouts without a reward, by cause.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most lines to print.")] = 20,
    traces: Annotated[
        Path | None, typer.Option(help="File for all rollouts of --steps, as OpenEnv's TrainingTraces.")
    ] = None,
) -> None:
    """Search a run's rollouts, or read one turn by turn."""
    if traces is not None:
        console.print(f"{_write_traces(run_dir, traces, steps=steps)} rollouts written to {traces}")
    elif place is not None:
        hit, turns = read_sample(run_dir, place)
        _show(hit, turns)
    elif failed:
        _show_failures(run_dir, limit=limit)
    else:
        first, last = read_steps(steps)
        query = Query(find, first, last, least, most, prompt, environment)
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
    if hits:
        console.print(f"{'place':<12} {'reward':>8}  {'prompt id':<12} completion", style="dim")
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
        console.print(f"\n[{turn.role}]", style="bold cyan" if turn.sampled else "bold")
        console.print(Text(turn.text, style="" if turn.sampled else "dim"))


def _show_failures(run_dir: Path, *, limit: int) -> None:
    found = failures(run_dir)
    counts = Counter(one.cause for one in found)
    words = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    console.print(f"{len(found)} failed rollouts{': ' + words if words else ''}", style="bold")
    for one in found[:limit]:
        step = "not yet in a step" if one.step is None else f"step {one.step}"
        console.print(f"{step:<10} {one.cause:<10} {one.prompt_id:<12} {one.message}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
