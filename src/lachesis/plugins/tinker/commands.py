"""The command ``tinker-server``: a model that clients of Tinker train, until a signal."""

from __future__ import annotations

from typing import Any

from lachesis.cli.base import app, console
from lachesis.cli.options import with_options
from lachesis.common.chatter import hide_progress_bars
from lachesis.plugins.tinker.options import TinkerOptions


@app.command("tinker-server")
@with_options(TinkerOptions)
def tinker_server(**values: Any) -> None:
    """Serve a model to the client `tinker`: LoRA runs of several programs at once, and sampling from what they learn.

    Clients find it by TINKER_BASE_URL. If TINKER_API_KEY is set, it accepts only requests with that key.
    """
    from lachesis.plugins.tinker import server as serving

    hide_progress_bars()

    options = TinkerOptions(**{name: value for name, value in values.items() if value is not None})
    serving.serve(
        options, on_ready=lambda url: console.print(f"serving {options.name or options.model} to tinker at {url}")
    )
