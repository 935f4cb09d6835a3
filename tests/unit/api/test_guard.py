from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from lachesis.api.guard import _is_foreign


@pytest.mark.parametrize(
    ("headers", "path", "foreign"),
    [
        ({}, "/batch", False),
        ({"host": "a:1", "origin": "http://a:1", "sec-fetch-site": "same-origin"}, "/scored_data", False),
        ({"host": "a:1", "origin": "http://b"}, "/scored_data", True),
        ({"host": "a:1", "origin": "null"}, "/scored_data", True),
        ({"sec-fetch-site": "cross-site"}, "/reset_data", True),
        ({"sec-fetch-site": "same-site"}, "/batch", True),
        ({"sec-fetch-site": "none"}, "/status", False),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, "/dashboard", False),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, "/reset_data", True),
    ],
)
def test_foreign_pages(headers: dict[str, str], path: str, foreign: bool):
    assert _is_foreign(Headers(headers), path) is foreign
