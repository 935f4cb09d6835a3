"""Sessions: written for this user alone, found by address, gone when the server is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lachesis.common.errors import EngineError
from lachesis.engines.serving.session import (
    new_session,
    read_session,
    remove_session,
    session_path,
    session_token,
    write_session,
)

URL = "http://127.0.0.1:4321"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "sessions"))
    monkeypatch.delenv("LACHESIS_SESSION_TOKEN", raising=False)
    return tmp_path / "sessions"


def make(**options):
    return new_session(**({"host": "127.0.0.1", "port": 4321} | options))


def test_a_session_is_read_back_whole(tmp_path):
    session = make(adapter_roots=(tmp_path / "a" / ".." / "b",))
    path = write_session(session)
    assert path == session_path(4321) and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for url in (URL, "http://localhost:4321/v1", "http://0.0.0.0:4321"):
        assert read_session(url) == session
    assert session.adapter_roots == (tmp_path / "b",) and session.url == URL
    assert session_token(URL) == session.token and len(session.token) >= 32


def test_no_two_sessions_are_alike_and_no_token_is_shown():
    first, second = make(), make()
    assert first.session_id != second.session_id and first.token != second.token
    assert first.token not in repr(first)


def test_the_token_may_be_given_or_come_from_the_environment(monkeypatch):
    assert make(token="given").token == "given"
    monkeypatch.setenv("LACHESIS_SESSION_TOKEN", "from the environment")
    assert make().token == "from the environment" == session_token("http://elsewhere.example:1")


def test_a_session_is_removed_by_its_server_only():
    old, new = make(), make()
    write_session(new)
    remove_session(old)
    assert read_session(URL) == new
    remove_session(new)
    remove_session(new)
    assert read_session(URL) is None
    with pytest.raises(EngineError, match="no token is known") as caught:
        session_token(URL)
    assert "LACHESIS_SESSION_TOKEN" in caught.value.remedy


def test_the_session_of_a_dead_server_does_not_count():
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    path = write_session(make())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": int(ended.stdout)}))
    assert read_session(URL) is None


def test_a_session_that_others_can_read_is_refused():
    path = write_session(make())
    path.chmod(0o644)
    with pytest.raises(EngineError, match="belongs to another user, or others may access it"):
        read_session(URL)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"session_id": 1, "adapter_roots": []}'])
def test_a_damaged_session_is_an_error(text):
    path = write_session(make())
    path.write_text(text)
    with pytest.raises(EngineError, match="damaged") as caught:
        read_session(URL)
    assert caught.value.remedy


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "file" / "sessions"))
    with pytest.raises(EngineError, match="cannot be written"):
        write_session(make())


def test_sessions_are_of_this_machine():
    write_session(make())
    assert read_session("http://192.0.2.1:4321") is None


def test_the_place_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("LACHESIS_SESSION_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert session_path(7) == tmp_path / "lachesis" / "sessions" / "7.json"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert session_path(7) == tmp_path / "home" / ".cache" / "lachesis" / "sessions" / "7.json"
    assert os.getpid() == make().pid
