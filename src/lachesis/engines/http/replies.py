"""What an inference server answered: a JSON object, or the error that it stands for. No torch."""

from __future__ import annotations

import json
from typing import Any

import httpx

from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError, ModelError, StaleWeights
from lachesis.engines.serving.served import Refused

# Errors of a server that callers tell apart; the others are EngineErrors here.
_SERVER_ERRORS: dict[str, type[LachesisError]] = {
    kind.__name__: kind for kind in (DeadlineExceeded, ModelError, StaleWeights)
}
# How servers say that they do not know a path, or not with this method.
_NO_ROUTE = (404, 405, 501)


def read_reply(response: httpx.Response, *, url: str, route: str) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        Refused: the server calls the request the caller's fault (4xx).
        EngineError: the server failed (5xx), or answered what no server of ours answers.
        DeadlineExceeded, ModelError, StaleWeights: the server failed with these.
    """
    try:
        reply = json.loads(response.content) if response.content else {}
    except ValueError:
        reply = None
    if response.is_success:
        if not isinstance(reply, dict):
            raise malformed(url, route, ValueError(f"not a JSON object: {response.text[:80]!r}"))
        return reply
    error = reply.get("error") if isinstance(reply, dict) else None
    if not isinstance(error, dict):
        error = {}
    if response.status_code in _NO_ROUTE and not error.get("type"):
        raise Refused(
            f"the server at {url} has no route {route}: it is no inference server of this package",
            status=response.status_code,
            remedy="start it with `lachesis serve` or `lachesis vllm-serve`, not with plain `vllm serve`",
        )
    reason = error.get("message") or _reason(reply) or _first_line(response) or response.reason_phrase
    remedy = str(error.get("remedy") or "")
    message = f"{url}{route} answered {response.status_code}: {reason}"
    if 400 <= response.status_code < 500:
        raise Refused(message, status=response.status_code, remedy=remedy)
    raise _SERVER_ERRORS.get(str(error.get("type")), EngineError)(message, remedy=remedy)


def malformed(url: str, route: str, error: Exception | str) -> EngineError:
    """The error for an answer that is not what the contract says."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return EngineError(
        f"{url}{route} answered something else than expected: {reason}",
        remedy="run the same version of lachesis on both sides",
    )


def _reason(reply: Any) -> str:
    """What servers other than ours write."""
    return str(reply.get("detail") or reply.get("message") or "") if isinstance(reply, dict) else ""


def _first_line(response: httpx.Response) -> str:
    """Of plain text; a page for browsers says nothing in its first line."""
    html = "html" in response.headers.get("content-type", "")
    return "" if html else response.text.strip().partition("\n")[0][:200]
