"""The live page in a process of its own, beside whoever trains."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from lachesis.plugins.report import watch_server
from lachesis.run.requests import is_asked
from tests.e2e.runs import environment
from tests.unit.plugins.report.test_watch import write_run
from tests.waiting import LONG_S


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
        monkeypatch.setattr(watch_server, "DEFAULT_PORT", other.getsockname()[1])
        with watch_server.beside(run_dir) as words:
            found = re.match(r"(http://127\.0\.0\.1:(\d+)/)#token=(\S+) ", words)
            assert found and int(found[2]) != watch_server.DEFAULT_PORT
            assert "loading: the run has no directory yet" in ask(found[1], "data")
            write_run(run_dir)
            assert "running, step 2" in ask(found[1], "data")
            assert "after this step" in ask(found[1], "pause", token=found[3]) and is_asked(run_dir, "pause")
            with pytest.raises(HTTPError, match="403"):
                ask(found[1], "pause", token="another")
        with pytest.raises(URLError, match="refused"):
            ask(found[1], "data")


@contextmanager
def watched(*run_dirs: Path) -> Iterator[tuple[str, str]]:
    """Address and token of the page that `lachesis watch` says it serves at a free port; ended as by Ctrl-C."""
    command = [sys.executable, "-m", "lachesis", "watch", *map(str, run_dirs), "--port", "0"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            words = server.stdout.readline()
            found = re.match(r"(http://127\.0\.0\.1:\d+/)#token=(\S+) ", words)
            assert found, words
            yield found[1], found[2]
            server.send_signal(signal.SIGINT)
            server.wait(LONG_S)
        finally:
            server.kill()


def test_the_command_serves_the_page_of_runs_and_lets_the_token_stop_one(tmp_path: Path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=1, status="finished")
    with watched(first, second) as (address, token):
        page = ask(address, "")
        assert page.startswith("<!doctype html>") and '["first","second"]' in page
        told = [json.loads(ask(address, f"data?run={number}")) for number in range(2)]
        assert [dict(one["status"])["state"].split(",")[0] for one in told] == ["running", "finished"]
        assert [one["data"]["charts"][0]["series"][0]["y"] for one in told] == [[0.25, 0.5], [0.25]]
        with pytest.raises(HTTPError, match="403"):
            ask(address, "stop?run=0", token="another")
        assert not is_asked(first, "stop")
        ask(address, "stop?run=0", token=token)
        assert is_asked(first, "stop") and not is_asked(second, "stop")
    with pytest.raises(URLError, match="refused"):
        ask(address, "data")
