"""Commands that inspect runs, data and rewards without changing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lachesis.cli.base import Overrides, app, console, hide_progress_bars, print_findings, shown
from lachesis.common.errors import DataError
from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.common.version import __version__
from lachesis.config.load import load_config

data_app = typer.Typer(help="Datasets.", no_args_is_help=True)
rewards_app = typer.Typer(help="Reward functions.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(rewards_app, name="rewards")


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Rewrite report.html of a run."""
    from lachesis.metrics.report.page import write_report

    console.print(f"report: {shown(write_report(run_dir))}")


@app.command()
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
) -> None:
    """Write a page that compares runs side by side: curves, configurations, the same prompts."""
    from lachesis.metrics.report.compare import write_compare

    console.print(f"comparison: {shown(write_compare(run_dirs, out))}")


@app.command()
def watch(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 8010,
) -> None:
    """Show runs in the browser while they train. On another machine: ssh -L 8010:127.0.0.1:8010 HOST."""
    from lachesis.run.live_page import listen, serve

    for path in run_dirs:
        if not run_paths(path)["state"].exists() and not run_paths(path)["metrics"].exists():
            raise DataError(f"{path} holds no run", remedy="give the directories of runs, such as runs/NAME")
    place = listen(port)
    console.print(place.words)
    serve(run_dirs, place.listener, place.token)


@app.command()
def trace(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[Path | None, typer.Argument(help="Where to; RUN/trace.json if unset.")] = None,
) -> None:
    """Write the steps of a run as a timeline that ui.perfetto.dev opens."""
    from lachesis.metrics.sinks.jsonl import read_metrics
    from lachesis.metrics.timeline import timeline

    log = read_metrics(run_paths(run_dir)["metrics"])
    out = out or run_dir / "trace.json"
    write_atomic(out, json.dumps(timeline(log, name=run_dir.resolve().name)))
    console.print(f"timeline of {len(log.steps)} steps: {shown(out)}; open it at https://ui.perfetto.dev")


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")] = False,
) -> None:
    """Print a run's state and what it waits for. Exit code 1 if it ended unfinished or was suspended."""
    from lachesis.run.status import read_status, status_json, status_lines

    found = read_status(run_dir)
    if as_json:
        console.print(status_json(found))
    else:
        for title, text in status_lines(found):
            console.print(Text.assemble((f"{title:<11}", "bold"), text))
    if not found.goes_on and found.state != "finished":
        raise typer.Exit(1)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A configuration to check as well.")] = None,
    trials: Annotated[
        bool,
        typer.Option("--trials/--no-trials", help="Try what CONFIG needs: servers, ports, disk, ranks, a transfer."),
    ] = True,
    proof: Annotated[bool, typer.Option("--proof/--no-proof", help="Train a small model for about a minute.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON, for a report of a fault.")] = False,
) -> None:
    """Check the installation, the devices and the sandbox, and prove in about a minute that training learns.

    With CONFIG it also tries what a run needs: servers that answer, synchronized clocks, free ports, the disk, two
    ranks, and a transfer of a tiny model's weights over its bridge.
    """
    from lachesis.cli import doctor as checks

    hide_progress_bars()
    findings: list[checks.Check] = []
    for finding in checks.examine(config, tried=trials, proof=proof):
        findings.append(finding)
        if not as_json:
            mark = ("fail", "red") if finding.failed else ("ok  ", "green") if finding.applies else ("n/a ", "dim")
            console.print(Text.assemble(mark, f"  {finding.subject:<14}  {finding.message}"))
    if as_json:
        console.print(checks.as_json(findings))
    if any(finding.failed for finding in findings):
        raise typer.Exit(1)


@data_app.command("check")
def data_check(
    file: Annotated[str, typer.Argument(help="A file, a directory, or a dataset of the hub.")],
    tokenizer: Annotated[str | None, typer.Option(help="Measure lengths with it: a directory or a hub id.")] = None,
    max_prompt_length: Annotated[int | None, typer.Option(help="Longest prompt, in tokens.")] = None,
    transform: Annotated[str | None, typer.Option(help="Apply `module.function` or `FILE.py:FUNCTION` first.")] = None,
    data_format: Annotated[str, typer.Option("--format", help="What the columns are; auto looks at them.")] = "auto",
    prompt_column: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    name: Annotated[str | None, typer.Option(help="Configuration of a dataset of the hub.")] = None,
    split: Annotated[str, typer.Option(help="Split, or a part of one.")] = "train",
) -> None:
    """Check a dataset and report every problem found."""
    from lachesis.config.schema import ModelConfig
    from lachesis.rollouts.datasets import Dataset
    from lachesis.rollouts.datasets.check import check_data

    loaded = None
    if tokenizer is not None:
        from lachesis.train.model.loading import load_tokenizer

        loaded = load_tokenizer(ModelConfig(path=tokenizer))
    dataset = Dataset(file, name, split, data_format, transform, prompt_column)  # type: ignore[arg-type]
    print_findings(check_data(dataset, tokenizer=loaded, max_prompt_length=max_prompt_length))


@rewards_app.command("check")
def rewards_check(
    config: Annotated[Path, typer.Argument(help="YAML file with the configuration.")],
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(help="Problems to look at.")] = 16,
    gold: Annotated[str | None, typer.Option(help="Column with the right answers.")] = None,
    gold_format: Annotated[str, typer.Option(help="What an answer looks like.")] = "{gold}",
) -> None:
    """Run the reward functions on right, empty, truncated, swapped and repeated answers."""
    loaded = load_config(config, overrides=overrides or []).config
    from lachesis.rollouts.rewards.check import VARIANTS, check_rewards
    from lachesis.run.launch import set_up
    from lachesis.run.sources import build_reward_functions, load_data, reward_workers
    from lachesis.train.model.loading import load_tokenizer

    set_up(loaded)  # which may make the model, and with it the tokenizer
    checked = check_rewards(
        build_reward_functions(loaded),
        load_data(loaded)[0],
        weights=loaded.rewards.weights,
        rows=rows,
        gold_column=gold,
        gold_format=gold_format,
        tokenizer=load_tokenizer(loaded.model),
        timeout_s=loaded.rewards.timeout_s,
        num_workers=reward_workers(loaded),
        text_completions=loaded.rewards.text_completions,
    )
    console.print(f"{'':<24}" + "".join(f"{variant:>11}" for variant in VARIANTS))
    for name, scores in checked.scores.items():
        values = ["-" if scores[variant] is None else f"{scores[variant]:.3g}" for variant in VARIANTS]
        console.print(f"{name:<24}" + "".join(f"{value:>11}" for value in values))
    print_findings(checked.findings)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__)
