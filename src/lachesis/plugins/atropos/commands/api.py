"""The command ``run-api``: the rollout API, until a signal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import app, console


@app.command("run-api")
def run_api(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8002,
    state_dir: Annotated[Path | None, typer.Option(help="Keep what is queued here, across restarts.")] = None,
    max_queued_tokens: Annotated[int | None, typer.Option(help="Answer 429 instead of queueing more tokens.")] = None,
    max_body_mb: Annotated[float, typer.Option(help="Refuse larger bodies, in MiB, before or after inflating.")] = 64.0,
    strict: Annotated[bool, typer.Option("--strict", help="Set aside groups that no trainer could use.")] = False,
    ack_timeout: Annotated[
        float, typer.Option(help="Seconds until an unacknowledged batch is handed out again.")
    ] = 600,
    env_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which an environment counts no more.")
    ] = 300,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Host name that requests may use; may be repeated.")
    ] = None,
) -> None:
    """Serve the rollout API that Atropos environments push to and trainers pull from."""
    from lachesis.plugins.atropos.api.server import ServerOptions, serve

    options = ServerOptions(
        host=host,
        port=port,
        state_dir=state_dir,
        max_queued_tokens=max_queued_tokens,
        max_body_mb=max_body_mb,
        strict=strict,
        ack_timeout_s=ack_timeout,
        env_timeout_s=env_timeout,
        allowed_hosts=tuple(allowed_host or ()),
    )
    serve(options, on_ready=lambda url: console.print(f"rollout API at {url}"))
