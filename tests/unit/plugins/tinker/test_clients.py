"""Clients of the Tinker server, from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.tinker.clients import Client, Clients

TWO = '[alice]\nkey_variable = "ALICE"\n[bob]\nkey_variable = "BOB"\nmax_runs = 2\nmax_lora_rank = 16\n'


def read(tmp_path: Path, text: str) -> Clients:
    file = tmp_path / "clients.toml"
    file.write_text(text)
    return Clients.read(file)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALICE", "tml-a")
    monkeypatch.setenv("BOB", "tml-b")


def test_a_client_is_known_by_its_key(tmp_path: Path):
    clients = read(tmp_path, TWO)
    assert clients.of("tml-a") == Client(name="alice")
    assert clients.of("tml-b") == Client(name="bob", max_runs=2, max_lora_rank=16)


@pytest.mark.parametrize("key", ["", "tml", "tml-c", "tml-a ", "tml-ä"])
def test_another_key_is_nobodys(tmp_path: Path, key: str):
    assert read(tmp_path, TWO).of(key) is None


def test_without_a_file_one_key_or_none_is_asked_for():
    assert Clients.single("k").of("k") == Client()
    assert Clients.single("k").of("other") is None
    assert Clients.single(None).of("anything") == Client()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no clients"),
        ("[a\n", "cannot be read"),
        ('[a]\nkey = "x"\n', "key_variable"),
        ('[a]\nkey_variable = "ALICE"\nmax_runs = 0\n', "max_runs"),
        ('[a]\nkey_variable = "NOT_SET"\n', "NOT_SET for the key of a is not set"),
        ('[a]\nkey_variable = "ALICE"\n[b]\nkey_variable = "ALICE"\n', "a and b have the same key"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Clients.read(tmp_path / "none.toml")
