"""Page of the server: its clients' work, and the state of its engines. It shows no key and no whole id."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response

from lachesis.plugins.tinker.engines import Server
from lachesis.plugins.tinker.service import Run, Service
from lachesis.web.pages import render_page

TEMPLATE = Path(__file__).parent / "templates" / "tinker.html.j2"


def page(service: Service) -> Response:
    """Return the page with the server's current state; it reloads itself every five seconds."""
    html = render_page(
        TEMPLATE,
        model=service.name,
        max_context=service.max_context,
        runs=[_run(service, run_id, run) for run_id, run in [*service.runs.items()]],
        engines=[_engine(server) for server in service.engines.servers] if service.engines else [],
    )
    return HTMLResponse(html, headers={"Cache-Control": "no-store"})


def _run(service: Service, run_id: str, run: Run) -> dict[str, Any]:
    session, _, number = run_id.partition(":")
    return {
        "client": service.client_of(run.session_id).name,
        "name": f"{session[:6]}…:{number}",
        "rank": run.training.shape.rank if run.training else "failed" if run.failed else "waiting",
        "steps": run.steps,
        "tokens": run.trained_tokens,
        "used_s": service.used_s(run.session_id),
        "waiting": service.waiting(run.session_id),
        "ago_s": round(time.time() - run.last_request),
    }


def _engine(server: Server) -> dict[str, Any]:
    return {
        "url": server.url,
        "state": f"down: {server.down_reason}" if server.is_down(time.monotonic()) else "serving",
        "requests": server.in_flight,
        "adapters": len(server.loaded),
        "proofs": server.proofs,
        "worst": server.worst,
        "tokens": server.sampled_tokens,
    }
