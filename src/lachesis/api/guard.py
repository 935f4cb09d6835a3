"""Keeps other web pages out: a page that a user happens to have open must not reset or feed a training run."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class SameSiteOnly:
    """Refuses, with 403, requests that a browser marks as another site's. Programs send no such marks.

    Browsers set ``Sec-Fetch-Site`` and ``Origin``, and pages cannot forge them. Following a link to the dashboard
    is fine.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_foreign(Headers(scope=scope), scope["path"]):
            refusal = JSONResponse({"detail": "requests from other web sites are refused"}, status_code=403)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_foreign(headers: Headers, path: str) -> bool:
    site = headers.get("sec-fetch-site", "none")
    if path == "/dashboard" and headers.get("sec-fetch-mode") == "navigate":
        return False
    origin = headers.get("origin")
    same_origin = origin is None or urlsplit(origin).netloc == headers.get("host")
    return site in ("cross-site", "same-site") or not same_origin
