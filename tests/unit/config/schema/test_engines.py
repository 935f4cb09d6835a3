from __future__ import annotations

import pytest

from lachesis.config.schema import (
    BroadcastBridgeConfig,
    InProcessBridgeConfig,
    LoraBroadcastBridgeConfig,
    LoraRestartBridgeConfig,
    LoraSwapBridgeConfig,
    ReloadBridgeConfig,
    RestartBridgeConfig,
    SharedBridgeConfig,
)


@pytest.mark.parametrize(
    ("section", "declared"),
    [
        (InProcessBridgeConfig, {"shares_storage"}),
        (SharedBridgeConfig, {"shares_storage"}),
        (LoraSwapBridgeConfig, {"adapter_only"}),
        (LoraRestartBridgeConfig, {"adapter_only", "owns_engine"}),
        (LoraBroadcastBridgeConfig, {"adapter_only"}),
        (BroadcastBridgeConfig, set()),
        (RestartBridgeConfig, {"owns_engine"}),
        (ReloadBridgeConfig, set()),
    ],
)
def test_what_a_bridge_declares(section, declared: set[str]):
    capabilities = section.capabilities
    names = ("adapter_only", "owns_engine", "shares_storage")
    assert {name for name in names if getattr(capabilities, name)} == declared
