"""The command ``run-api``: the rollout API, until a signal."""

from __future__ import annotations

from typing import Any

from lachesis.cli.base import app, console
from lachesis.cli.options import with_options
from lachesis.plugins.atropos.api.server import ServerOptions, serve


@app.command("run-api")
@with_options(ServerOptions)
def run_api(**values: Any) -> None:
    """Serve the rollout API that Atropos environments push to and trainers pull from."""
    options = ServerOptions(**{name: value for name, value in values.items() if value is not None})
    serve(options, on_ready=lambda url: console.print(f"rollout API at {url}"))
