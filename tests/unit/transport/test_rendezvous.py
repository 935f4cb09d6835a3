"""Where trainer and engines meet."""

from __future__ import annotations

import re
import socket

import pytest

from lachesis.common.errors import EngineError
from lachesis.transport.rendezvous import address_towards, listen, parse_init_method

# Of a net for documentation: nobody is there, and nothing is sent to it.
ELSEWHERE = "http://192.0.2.7:9001"


@pytest.fixture
def own_address() -> str:
    """By which this machine would talk to another one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
            unsent.connect(("192.0.2.7", 9001))
            return unsent.getsockname()[0]
    except OSError:
        pytest.skip("this machine has no way to any other")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9001", "http://localhost:9001", "https://127.0.0.1"])
def test_servers_of_this_machine_are_met_at_its_local_address(url: str):
    assert address_towards([url, "http://127.0.0.1:9002"]) == "127.0.0.1"


def test_servers_elsewhere_are_met_at_an_address_that_they_can_reach(own_address: str):
    assert own_address != "127.0.0.1"
    assert address_towards([ELSEWHERE]) == own_address
    assert address_towards(["http://127.0.0.1:9001", ELSEWHERE]) == own_address, "one is here, one is not"


def test_addresses_that_no_one_of_this_machines_serves_want_a_setting(monkeypatch: pytest.MonkeyPatch):
    addresses = iter(["10.0.0.1", "10.1.0.1"])
    monkeypatch.setattr("lachesis.transport.rendezvous._own_address", lambda url: next(addresses))
    with pytest.raises(EngineError, match=re.escape("different addresses (10.0.0.1, 10.1.0.1)")) as caught:
        address_towards(["http://a:1", "http://b:1"])
    assert "bridge.init_method" in caught.value.remedy


def test_a_server_whose_name_is_unknown_is_named():
    with pytest.raises(EngineError, match=r"cannot reach the inference server at nowhere\.invalid:1"):
        address_towards(["http://nowhere.invalid:1"])


def test_a_free_port_is_told_with_its_address():
    rendezvous = listen("tcp://127.0.0.1:0")
    with rendezvous.listener:
        host, port = parse_init_method(rendezvous.init_method)
        assert (host, port) == ("127.0.0.1", rendezvous.listener.getsockname()[1])
