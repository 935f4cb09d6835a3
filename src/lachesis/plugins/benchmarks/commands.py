"""Command ``eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import app, console, shown
from lachesis.common.chatter import hide_progress_bars


@app.command("eval")
def eval_command(
    model: Annotated[str, typer.Argument(help="A model's directory or hub id, a run, or a directory of results.")],
    benchmarks: Annotated[
        str, typer.Option(help="Names, separated by commas; NAME=FILE takes the problems from a file or dataset.")
    ] = "gsm8k,math500",
    against: Annotated[
        str | None, typer.Option(help="Another MODEL, to test if the difference is more than chance.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each problem, for mean@k and pass@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy. [default: 0, or 0.6 with several samples]")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a completion.")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N problems of each.")] = None,
    engine: Annotated[str, typer.Option(help="embedded, vllm, or the address of a server of the model.")] = "embedded",
    out: Annotated[
        Path | None, typer.Option(help="Results go here. [default: RUN/evaluations/benchmarks/final, or evals/MODEL]")
    ] = None,
) -> None:
    """Evaluate a model on benchmarks, with intervals, and compare it with another."""
    from lachesis.plugins.benchmarks.evaluate import Asked, evaluate, require_apart
    from lachesis.plugins.benchmarks.results import comparisons

    hide_progress_bars()
    if temperature is None:
        temperature = 0.0 if samples == 1 else 0.6
    asked = Asked(benchmarks.split(","), samples, temperature, max_tokens, limit, engine)
    if against is not None:
        require_apart(model, against, out=out)
    found, directory = evaluate(model, asked, out=out)
    for name, score in found.items():
        console.print(f"{name}: {score.sentence()}")
    console.print(f"results: {shown(directory)}")
    if against is not None:
        other, directory = evaluate(against, asked, out=None)
        console.print(f"against {shown(directory)}:")
        for name, comparison in comparisons(found, other).items():
            console.print(f"{name}: {comparison.sentence()}")
