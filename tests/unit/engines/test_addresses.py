"""Which servers a run is to have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError, EngineUnreachable
from lachesis.engines.addresses import addresses, resolve_host


def names(name: str) -> Sequence[str]:
    return {"engines": ("10.0.0.1", "10.0.0.2", "fd00::1"), "nobody": ()}[name]


def test_addresses_are_as_servers_are_called(tmp_path: Path):
    assert addresses(["http://a:1/v1", "http://b:2/"]) == ["http://a:1", "http://b:2"]


def test_a_name_is_a_server_at_each_of_its_addresses():
    found = addresses(["dns+http://engines:9001", "http://10.0.0.2:9001"], resolve=names)
    assert found == ["http://10.0.0.1:9001", "http://10.0.0.2:9001", "http://[fd00::1]:9001"]
    assert addresses(["dns+https://nobody"], resolve=names) == []


def test_a_file_is_read_each_time(tmp_path: Path):
    file = tmp_path / "servers.txt"
    file.write_text("# ours\nhttp://a:1/v1\n\nhttp://b:2\n")
    assert addresses([f"file:{file}"]) == ["http://a:1", "http://b:2"]
    file.write_text("http://b:2\n")
    assert addresses([f"file:{file}"]) == ["http://b:2"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["http://a:1", "http://a:1"], "name each server once"),
        (["dns+ftp://a"], "'ftp://a' is not an address"),
        (["file:/nowhere/servers"], "/nowhere/servers in engine.urls cannot be read"),
    ],
)
def test_what_is_no_address_is_refused(entries: list[str], said: str):
    with pytest.raises(ConfigError) as raised:
        addresses(entries, resolve=names)
    assert said in str(raised.value)


def test_names_are_looked_up():
    assert "127.0.0.1" in resolve_host("localhost")
    with pytest.raises(EngineUnreachable, match=r"'no-such-name\.invalid' in engine\.urls has no address"):
        resolve_host("no-such-name.invalid")
