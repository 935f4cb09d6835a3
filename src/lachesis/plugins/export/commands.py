"""Commands ``export`` and ``push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lachesis.cli.base import app, console, shown
from lachesis.common.chatter import hide_progress_bars
from lachesis.common.errors import ConfigError

ModelFormat = Literal["safetensors", "gguf"]


@app.command("export")
def export_command(
    checkpoint: Annotated[
        Path, typer.Argument(help="RUN, RUN/final or RUN/checkpoints/step_N; with --unwrap a model.")
    ],
    out: Annotated[
        Path | None, typer.Argument(help="Target directory; RUN/models/step_N, or MODEL-renamed here, if unset.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add an adapter to its base model's weights.")] = False,
    to: Annotated[ModelFormat, typer.Option(help="gguf: also write a file for llama.cpp and Ollama.")] = "safetensors",
    unwrap: Annotated[bool, typer.Option("--unwrap", help="Copy a model without wrappers' words in names.")] = False,
) -> None:
    """Write a run's model or a checkpoint for transformers, peft or llama.cpp."""
    hide_progress_bars()
    if unwrap:
        from lachesis.plugins.export.unwrap import unwrap as copied

        if merge or to != "safetensors":
            raise ConfigError(
                "--unwrap only renames the tensors of a model, but --merge or --to was given, too",
                remedy="leave them out here, and export the copy afterwards",
            )
        copy = copied(str(checkpoint), out or Path(f"{checkpoint.resolve().name}-renamed"))
        console.print(f"wrote {shown(copy)}")
        return
    from lachesis.plugins.export.export import export

    console.print(f"wrote {shown(export(checkpoint, out, merge=merge, to=to))}")


@app.command("push")
def push_command(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    repo: Annotated[str, typer.Option(help="Repository of the Hugging Face hub, OWNER/NAME; created if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, created if missing; the main one if unset.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the model card, but upload nothing.")] = False,
) -> None:
    """Upload a run's final model to the Hugging Face hub, with a card that says how it was trained."""
    from lachesis.plugins.export.push import push, write_card

    hide_progress_bars()
    if dry_run:
        console.print(
            f"wrote {shown(write_card(run_dir, repo=repo))}; without --dry-run, {repo} gets it with the model"
        )
    else:
        console.print(f"pushed: {push(run_dir, repo=repo, private=private, revision=revision)}")
