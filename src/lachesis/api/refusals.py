"""Answers to requests that are refused: raised where the fault is found, sent by the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.common.errors import DataError, LachesisError


class Refusal(DataError):
    """A request that is not served; the state is as it was before.

    Args:
        status: the HTTP status.
        detail: what goes under the key ``detail``, or plain text where ``plain`` is set.
        headers: further headers of the reply.
    """

    def __init__(
        self,
        status: int,
        detail: str | Sequence[Mapping[str, Any]],
        *,
        plain: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail if isinstance(detail, str) else str(detail[0].get("msg", "")))
        self.status = status
        self.detail = detail
        self.plain = plain
        self.headers = dict(headers or {})


class StoreFailed(LachesisError):
    """The state directory could not be written; nothing of the request was kept."""
