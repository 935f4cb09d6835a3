"""Live page of one or several runs: the report while a run continues, and its state."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lachesis.common.errors import DataError, LachesisError
from lachesis.common.hosts import OwnHostOnly
from lachesis.common.run_files import run_paths
from lachesis.metrics.names import format_number, format_seconds
from lachesis.plugins.report import compare, page
from lachesis.plugins.report.rollout_search import Hit, Query, failures, read_sample, read_steps, search
from lachesis.run.requests import Request as RunRequest
from lachesis.run.requests import ask, is_asked, take
from lachesis.run.status import NamedWait, RunStatus, fact_lines, log_lines, read_status, wait_lines
from lachesis.web.pages import render_page

TEMPLATE = page.TEMPLATE.with_name("watch.html.j2")
# Part of a run's page that has nothing to show yet.
_NOTHING_YET = '<p class="quiet">No step is done yet.</p>'
_MOST_HITS = 50
# State of a run that has nothing to show.
_NOTHING: Mapping[str, Any] = {"status": [], "lead": [], "waits": [], "engines": [], "paused": False, "goes_on": False}
# Requests that the buttons send; "resume" withdraws the pause.
_ASKED: Mapping[str, RunRequest] = {"stop": "stop", "checkpoint": "checkpoint", "pause": "pause"}
_BUTTONS = (*_ASKED, "resume")


class Watch:
    """Routes over some run directories. Requests to a run need the token; all others only read."""

    def __init__(self, run_dirs: Sequence[Path], *, token: str) -> None:
        self._dirs = [Path(path) for path in run_dirs]
        self._token = token

    def app(self) -> Starlette:
        """Return the application. It answers only to names of this machine, such as through an SSH tunnel."""
        reading = {
            "/": self.page,
            "/data": self.data,
            "/compare": self.compare,
            "/rollouts": self.rollouts,
            "/rollout": self.rollout,
        }
        routes = [Route(path, endpoint) for path, endpoint in reading.items()]
        routes += [Route(f"/{what}", self.ask, methods=["POST"]) for what in _BUTTONS]
        return Starlette(
            routes=routes, middleware=[Middleware(OwnHostOnly)], exception_handlers={LachesisError: _refused}
        )

    async def page(self, _: Request) -> Response:
        """Return the page, which requests everything else."""
        html = render_page(TEMPLATE, names=compare.run_names(self._dirs))
        return HTMLResponse(html, headers={"Cache-Control": "no-store"})

    async def data(self, request: Request) -> Response:
        """Return the state of a run, and its report if that has changed since the tag that the page knows."""
        return JSONResponse(await anyio.to_thread.run_sync(self._data, self._dir(request), _known(request)))

    def _data(self, run_dir: Path, known: str) -> dict[str, Any]:
        tag = _tag([run_dir])
        answer: dict[str, Any] = {**_now(run_dir), "tag": tag, "html": None, "data": None}
        if tag == known:
            return answer
        if not run_paths(run_dir)["metrics"].exists():
            return answer | {"html": _NOTHING_YET}
        html, data = page.render_body(run_dir)
        return answer | {"html": html, "data": data}

    async def compare(self, request: Request) -> Response:
        """Return all runs side by side."""
        return JSONResponse(await anyio.to_thread.run_sync(self._compare, _known(request)))

    def _compare(self, known: str) -> dict[str, Any]:
        tag = _tag(self._dirs)
        names = compare.run_names(self._dirs)
        states = [(name, _now(path)["lead"][0][1]) for name, path in zip(names, self._dirs, strict=True)]
        answer: dict[str, Any] = {**_NOTHING, "lead": states, "tag": tag, "html": None, "data": None}
        if tag == known:
            return answer
        if not all(run_paths(path)["metrics"].exists() for path in self._dirs):
            return answer | {"html": _NOTHING_YET}
        html, data = compare.render_body(self._dirs)
        return answer | {"html": html, "data": data}

    async def rollouts(self, request: Request) -> Response:
        """Return the matching rollouts, or the failed ones."""
        return JSONResponse(await anyio.to_thread.run_sync(_found, self._dir(request), dict(request.query_params)))

    async def rollout(self, request: Request) -> Response:
        """Return one rollout, turn by turn."""
        place = request.query_params.get("place", "")
        hit, turns = await anyio.to_thread.run_sync(read_sample, self._dir(request), place)
        return JSONResponse({"hit": _row(hit), "turns": [asdict(turn) for turn in turns]})

    async def ask(self, request: Request) -> Response:
        """Ask the run to stop, save a checkpoint, pause or resume, on behalf of a user with the token."""
        if not hmac.compare_digest(request.headers.get("x-lachesis-token", "").encode(), self._token.encode()):
            return PlainTextResponse("the token is not the one in this page's address", status_code=403)
        run_dir, what = self._dir(request), request.url.path.strip("/")
        status = read_status(run_dir)
        if not status.goes_on:
            return PlainTextResponse(f"the run is not running: it is {status.state}", status_code=409)
        if what == "resume":
            take(run_dir, "pause")
            return PlainTextResponse("requested; it resumes")
        ask(run_dir, _ASKED[what])
        return PlainTextResponse("requested; it happens after this step")

    def _dir(self, request: Request) -> Path:
        number = request.query_params.get("run", "0")
        numbered = {str(place): run_dir for place, run_dir in enumerate(self._dirs)}
        if number not in numbered:
            raise DataError(f"there is no run {number[:40]!r} on this page")
        return numbered[number]


def _found(run_dir: Path, asked: Mapping[str, str]) -> dict[str, Any]:
    if "failed" in asked:
        return {"failures": [asdict(one) for one in failures(run_dir)[:_MOST_HITS]]}
    first, last = read_steps(asked.get("steps"))
    query = Query(
        text=asked.get("find", ""),
        first_step=first,
        last_step=last,
        least=_decimal(asked.get("least")),
        most=_decimal(asked.get("most")),
        prompt_id=asked.get("prompt"),
        environment=asked.get("environment"),
    )
    hits = [*islice(search(run_dir, query), _MOST_HITS + 1)]
    return {"hits": [_row(hit) for hit in hits[:_MOST_HITS]], "more": len(hits) > _MOST_HITS, "failures": None}


def _row(hit: Hit) -> dict[str, Any]:
    return asdict(hit) | {"place": hit.place}


def _decimal(words: str | None) -> float | None:
    try:
        return None if words is None else float(words)
    except ValueError as error:
        raise DataError(f"{words!r} is not a number", remedy="write a reward such as 0.5") from error


async def _refused(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=404)


def _known(request: Request) -> str:
    return request.query_params.get("known", "")


def _tag(run_dirs: Sequence[Path]) -> str:
    """Return a tag that changes with a new line of metrics, or another configuration."""
    files = [run_paths(path)[name] for path in run_dirs for name in ("metrics", "config")]
    return "-".join(f"{file.stat().st_mtime_ns:x}.{file.stat().st_size:x}" if file.exists() else "0" for file in files)


def _now(run_dir: Path) -> dict[str, Any]:
    """Return the state of a run: lines, its current wait, its engines, and whether a pause was requested."""
    if not run_dir.exists():
        return {**_NOTHING, "lead": [("state", "loading: the run has no directory yet")]}
    try:
        status = read_status(run_dir)
    except LachesisError as error:
        return {**_NOTHING, "lead": [("state", error.message)]}
    return {
        "lead": _lead(status),
        # The report below shows the findings of health rules.
        "status": [*fact_lines(replace(status, findings=())), *log_lines(status)],
        "waits": _waits(status),
        "engines": [asdict(engine) for engine in status.engines],
        "paused": is_asked(run_dir, "pause"),
        "goes_on": status.goes_on,
    }


def _lead(status: RunStatus) -> list[tuple[str, str]]:
    """Return the headline: the state, the step, the reward and the remaining time."""
    of = "" if status.steps is None else f" of {status.steps}"
    lead = [("state", status.state), ("step", f"{status.step}{of}")]
    if (reward := status.values.get("reward")) is not None:
        lead.append(("reward", format_number(reward)))
    if status.remaining_s is not None:
        lead.append(("left", format_seconds(status.remaining_s)))
    elif status.elapsed_s is not None:
        lead.append(("took", format_seconds(status.elapsed_s)))
    return lead


def _waits(status: RunStatus) -> list[dict[str, Any]]:
    """Return each wait in words, with the elapsed share of its limit; a paused run's time does not count."""
    now = time.time()
    title, texts = wait_lines(status, now=now)
    shares = [_share(wait, now=now) if status.state in ("loading", "running") else None for wait in status.waits or ()]
    return [{"title": title, "text": text, "share": share} for text, share in zip_longest(texts, shares[: len(texts)])]


def _share(wait: NamedWait, *, now: float) -> float | None:
    return min(1.0, max(0.0, now - wait.since) / wait.limit_s) if wait.limit_s else None
