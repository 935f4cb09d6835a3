"""The live page in a process of its own, beside whoever trains."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from lachesis.run import live_page
from lachesis.run.requests import is_asked
from tests.unit.run.test_watch import write_run


def ask(address: str, path: str, *, token: str | None = None) -> str:
    headers = {} if token is None else {"X-Lachesis-Token": token}
    request = urllib.request.Request(address + path, headers=headers, method="GET" if token is None else "POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_it_serves_the_run_at_a_free_port_where_the_usual_one_is_taken_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(live_page, "DEFAULT_PORT", other.getsockname()[1])
        with live_page.beside(run_dir) as words:
            found = re.match(r"(http://127\.0\.0\.1:(\d+)/)#token=(\S+) ", words)
            assert found and int(found[2]) != live_page.DEFAULT_PORT
            assert "loading: the run has no directory yet" in ask(found[1], "data")
            write_run(run_dir)
            assert "running, step 2" in ask(found[1], "data")
            assert "after this step" in ask(found[1], "pause", token=found[3]) and is_asked(run_dir, "pause")
            with pytest.raises(HTTPError, match="403"):
                ask(found[1], "pause", token="another")
        with pytest.raises(URLError, match="refused"):
            ask(found[1], "data")
