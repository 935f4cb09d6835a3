"""Commands that serve until they get a signal."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from lachesis.cli.base import PASS_ON, Overrides, app, console, printed_log
from lachesis.cli.options import with_options
from lachesis.common.chatter import hide_progress_bars
from lachesis.common.errors import ConfigError
from lachesis.config.load import log_findings
from lachesis.engines.options import EngineName, ServeOptions


@app.command(context_settings=PASS_ON)
@with_options(ServeOptions)
def serve(context: typer.Context, **values: Any) -> None:
    """Serve a model for rollouts, with weights that trainers can change.

    Any further flag is passed on to `vllm serve`. Routes that change weights need the token of the session, which the
    same user's clients on this machine find by themselves.
    """
    from lachesis.plugins.serving import serve as serving

    given = {name: value for name, value in values.items() if value is not None}
    options = ServeOptions(**given, arguments=tuple(context.args))
    if options.engine == "embedded":  # vLLM's server decides itself how it imports transformers
        hide_progress_bars()
    with _exports_shown():
        serving.serve(options, on_ready=console.print)


@app.command("vllm-serve", context_settings=PASS_ON)
def vllm_serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of a run, in our keys, Axolotl's or TRL's; or give --model.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Directory or hub id, instead of a file; on port 8000.")] = None,
    engine: Annotated[EngineName | None, typer.Option(help="Engine, instead of the file's.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on, instead of the file's.")
    ] = None,
) -> None:
    """Serve a run's model by the sections model, engine and vllm of its configuration.

    Any further flag is passed on to `vllm serve`.
    """
    from lachesis.plugins.serving import serve as serving

    hide_progress_bars()

    if (config is None) == (model is None):
        raise ConfigError("vllm-serve takes either a configuration or --model", remedy="give one of the two")
    if config is None:
        place = {"port": 8000 if port is None else port, "engine": engine or "vllm"}
        options = ServeOptions(model=model or "", arguments=tuple(context.args), **place)  # type: ignore[arg-type]
    else:
        options, loaded = serving.config_options(
            config, overrides=overrides or [], served_by=engine, port=port, arguments=context.args
        )
        log_findings(loaded.findings)
    with _exports_shown():
        serving.serve(options, on_ready=console.print)


def _exports_shown() -> AbstractContextManager[None]:
    """Return a context that prints the "Exported ..." lines that the single-copy guide expects in a log."""
    return printed_log("lachesis", beginning=("Exported ",))
