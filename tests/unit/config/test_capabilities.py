from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.capabilities import BRIDGES, bridge_capabilities
from lachesis.config.keys import find_section


def test_every_bridge_of_the_schema_declares_itself():
    section = find_section("bridge")
    assert section is not None
    assert set(section.kinds) == set(BRIDGES)


def test_in_process():
    capabilities = bridge_capabilities("in_process")
    assert capabilities.shares_storage
    assert capabilities.same_device
    assert not capabilities.adapter_only
    assert not capabilities.owns_engine


def test_an_unknown_bridge():
    with pytest.raises(ConfigError, match=r"no bridge 'pigeon' -> use one of broadcast, in_process"):
        bridge_capabilities("pigeon")
