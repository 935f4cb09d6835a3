"""Commands that train, plan, export and publish runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from lachesis.cli.base import (
    PASS_ON,
    Overrides,
    Overwrite,
    Resume,
    Ui,
    app,
    conclude,
    console,
    hide_progress_bars,
    live_page,
    shown,
    stop_on_signals,
    world_of_leader,
)
from lachesis.common.errors import ConfigError
from lachesis.config.custom import custom_parts
from lachesis.config.init import init as write_first_run
from lachesis.config.load import LoadedConfig, load_argv, load_config
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.config.smoke import trial
from lachesis.plan.cards import card_lines
from lachesis.plan.cost import scale_lines
from lachesis.plan.fit import fit, fit_lines
from lachesis.plan.plan import plan, plan_lines
from lachesis.plan.shapes import find_shape

ModelFormat = Literal["safetensors", "gguf"]


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file with the configuration.")],
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try it for two steps, in NAME-smoke, which is replaced each time.")
    ] = False,
    ui: Ui = False,
) -> None:
    """Train a model as a configuration says."""
    world = world_of_leader()
    loaded = load_config(config, overrides=overrides or [])
    if smoke:
        loaded, overwrite = trial(loaded), True
    from lachesis.run.start import train as run_training

    with stop_on_signals() as stop, live_page(loaded, asked=ui):
        summary = run_training(
            loaded,
            resume=resume,
            overwrite=overwrite,
            console=console,
            stop_requested=lambda: bool(stop),
            world=world,
            imported=hide_progress_bars,
        )
    words = [*(f"--set={item}" for item in overrides or []), *(["--smoke"] if smoke else []), *(["--ui"] if ui else [])]
    conclude(summary, stop, ["lachesis", "train", str(config), *words])


def _gigabytes(text: str) -> float:
    """Return the size of a card in GB from text such as ``24`` or ``24GB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB?|GiB)?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) < 1:
        raise typer.BadParameter(f"{text!r} is no size of a card: give its gigabytes, as 24 or 24GB")
    return float(found[1])


@app.command("plan", context_settings=PASS_ON)
def plan_command(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG|FLAGS", help="YAML file, or flags as `grpo` takes them.")],
    overrides: Overrides = None,
    device: Annotated[Literal["cuda", "cpu"] | None, typer.Option(help="Plan for it; what is here, if unset.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many train, as torchrun starts them.")] = 1,
    fit_gb: Annotated[
        float | None,
        typer.Option("--fit", parser=_gigabytes, metavar="GB", help="Say what fits on a card of this size (24, 24GB)."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=2, help="Say what a rank of so many GPUs takes, and the transfer; calculated.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="With --gpus: over so many machines.")] = 1,
    card_gb: Annotated[float, typer.Option("--card", min=1, metavar="GB", help="With --gpus: size of a card.")] = 80,
) -> None:
    """Print what a run will do and the memory and disk it takes, without loading the model or data."""
    loaded = _loaded([config, *context.args], overrides=overrides or [], devices=devices)
    for finding in [*loaded.findings, *check(loaded.config, located=loaded.located, name=loaded.name)]:
        console.print(f"{finding.level}: {finding.message}", style="dim" if finding.level == "note" else "yellow")
    found = find_shape(loaded.config.model.path, revision=loaded.config.model.revision, ask_hub=True)
    for line in plan_lines(plan(loaded.config, device=device, devices=devices, found=found)):
        console.print(line)
    if found is not None and device != "cpu":
        on_gpu = plan(loaded.config, device="cuda", devices=devices, found=found)
        for line in card_lines(loaded.config, on_gpu):
            console.print(line)
    if gpus is not None:
        train = devices if devices > 1 else None
        for line in scale_lines(loaded.config, gpus=gpus, nodes=nodes, card_gb=card_gb, found=found, train=train):
            console.print(line)
    for line in _custom_lines(loaded.config):
        console.print(line)
    if fit_gb is not None:
        for line in fit_lines(fit(loaded.config, card_gb=fit_gb, devices=devices, found=found), card_gb=fit_gb):
            console.print(line)


def _loaded(words: list[str], *, overrides: list[str], devices: int) -> LoadedConfig:
    """Load a configuration from a file or from the Atropos trainer's flags."""
    if words[0].startswith("-"):
        return load_argv(words, overrides=overrides)
    if len(words) > 1:
        raise ConfigError(
            f"plan takes one file, and {words[1]!r} is more", remedy="see `lachesis plan --help` for its options"
        )
    return load_config(Path(words[0]), overrides=overrides, processes=devices if devices > 1 else None)


def _custom_lines(config: LachesisConfig) -> list[str]:
    """Return lines about custom parts, which are loaded, because only loading shows that they fit."""
    if not any(kind.name != "reward" for kind, _, _ in custom_parts(config)):
        return []
    from lachesis.run.custom import check_custom_parts  # imports torch, as most such files do

    found = check_custom_parts(config)
    return ["your own", *(f"  {part.kind:<18}{part.spec} ({part.key})" for part in found)]


@app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="RUN, RUN/final or RUN/checkpoints/step_N.")],
    out: Annotated[Path | None, typer.Argument(help="Where to; RUN/models/step_N if unset.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add an adapter to its base model's weights.")] = False,
    to: Annotated[ModelFormat, typer.Option(help="gguf: as llama.cpp and Ollama load it, too.")] = "safetensors",
) -> None:
    """Write a run's model or a checkpoint for transformers, peft or llama.cpp."""
    from lachesis.run.export import export

    hide_progress_bars()
    console.print(f"wrote {shown(export(checkpoint, out, merge=merge, to=to))}")


@app.command("push")
def push_command(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    repo: Annotated[str, typer.Option(help="Repository of the Hugging Face hub, OWNER/NAME; made if need be.")],
    private: Annotated[bool, typer.Option("--private", help="Make it one that only you see.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, made if need be; the main one if unset.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the model card, and upload nothing.")] = False,
) -> None:
    """Upload a run's final model to the Hugging Face hub, with a card that says how it was trained."""
    from lachesis.run.push import push, write_card

    hide_progress_bars()
    if dry_run:
        console.print(
            f"wrote {shown(write_card(run_dir, repo=repo))}; without --dry-run it goes to {repo} with the model"
        )
    else:
        console.print(f"pushed: {push(run_dir, repo=repo, private=private, revision=revision)}")


@app.command("init")
def init_command(
    directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path("."),
) -> None:
    """Write a first run that starts at once: configuration, reward, small model and problems."""
    files = write_first_run(directory)
    console.print(f"wrote {', '.join(shown(path) for path in files)}")
    console.print(f"start it with: lachesis train {shlex.quote(shown(files[0]))}")
