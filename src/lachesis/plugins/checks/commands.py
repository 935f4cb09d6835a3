"""Commands that check before a run: ``doctor``, ``data check`` and ``rewards check``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lachesis.cli.base import Overrides, app, console, print_findings
from lachesis.common.chatter import hide_progress_bars
from lachesis.common.types import Finding
from lachesis.config.load import load_config
from lachesis.config.single_sources import single_configs

data_app = typer.Typer(help="Datasets.", no_args_is_help=True)
rewards_app = typer.Typer(help="Reward functions.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(rewards_app, name="rewards")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A configuration to check as well.")] = None,
    proof: Annotated[bool, typer.Option("--proof/--no-proof", help="Train a small model for about a minute.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for a bug report.")] = False,
) -> None:
    """Check the installation, the devices and the sandbox, and prove in about a minute that training learns."""
    from lachesis.plugins.checks import doctor as checks

    hide_progress_bars()
    findings: list[checks.Check] = []
    for finding in checks.examine(config, proof=proof):
        findings.append(finding)
        if not as_json:
            mark = ("fail", "red") if finding.failed else ("ok  ", "green")
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
    data_format: Annotated[str, typer.Option("--format", help="Format of the columns; auto detects it.")] = "auto",
    prompt_column: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    name: Annotated[str | None, typer.Option(help="Configuration of a dataset of the hub.")] = None,
    split: Annotated[str, typer.Option(help="Split, or a part of one.")] = "train",
) -> None:
    """Check a dataset and report every problem found."""
    from lachesis.config.schema import ModelConfig
    from lachesis.plugins.checks.data import check_data
    from lachesis.rollouts.datasets import Dataset

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
    rows: Annotated[int, typer.Option(help="Number of problems to check.")] = 16,
    gold: Annotated[str | None, typer.Option(help="Column with the right answers.")] = None,
    gold_format: Annotated[str, typer.Option(help="Form of an answer.")] = "{gold}",
) -> None:
    """Run the reward functions on right, empty, truncated, swapped and repeated answers."""
    loaded = load_config(config, overrides=overrides or []).config
    from lachesis.plugins.checks.rewards import VARIANTS, check_rewards
    from lachesis.run.launch import set_up
    from lachesis.run.sources import build_reward_functions, load_data, reward_workers
    from lachesis.train.model.loading import load_tokenizer

    hide_progress_bars()
    set_up(loaded)  # run.setup may make the model, and with it the tokenizer
    findings: list[Finding] = []
    for source, single in single_configs(loaded).items():
        if source and not single.rewards.functions:
            console.print(f"source {source}: its environment gives the rewards")
            continue
        checked = check_rewards(
            build_reward_functions(single),
            load_data(single)[0],
            weights=single.rewards.weights,
            rows=rows,
            gold_column=gold,
            gold_format=gold_format,
            tokenizer=load_tokenizer(single.model),
            timeout_s=single.rewards.timeout_s,
            num_workers=reward_workers(single),
            text_completions=single.rewards.text_completions,
        )
        console.print(f"{f'source {source}' if source else '':<24}" + "".join(f"{name:>11}" for name in VARIANTS))
        for name, scores in checked.scores.items():
            values = ["-" if scores[variant] is None else f"{scores[variant]:.3g}" for variant in VARIANTS]
            console.print(f"{name:<24}" + "".join(f"{value:>11}" for value in values))
        words = f"source {source}: " if source else ""
        findings += [replace(finding, message=f"{words}{finding.message}") for finding in checked.findings]
    print_findings(findings)
