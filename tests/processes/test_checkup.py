"""Trials with a server: weights that travel to it, or do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lachesis.common.errors import DependencyError, StaleWeights
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.checks import transfer
from lachesis.plugins.checks.transfer import engine_for_trial, try_transfer

SERVED = {"engine": {"kind": "embedded_server"}}
# Says that it has sent, and sends nothing.
LOST = """
from lachesis.bridges.external import ExternalBridge
from lachesis.config.schema.engines import BridgeCapabilities

class LostBridge(ExternalBridge):
    def __init__(self, servers):
        super().__init__(servers, capabilities=BridgeCapabilities())

    def _transfer(self, version, *, deadline):
        for server in self.engine.controls:
            server.set_version(version, deadline=deadline)
"""


def config(**sections: Any) -> LachesisConfig:
    return LachesisConfig.model_validate({"run": {"steps": 1}, "model": {"path": "none", "device": "cpu"}, **sections})


class TestTransfer:
    @pytest.mark.parametrize(("bridge", "adapter"), [("broadcast", "none"), ("lora_only", "lora")])
    def test_weights_travel_to_a_server_and_are_proved(self, bridge: str, adapter: str):
        check = try_transfer(config(engine={"kind": "http"}, bridge={"kind": bridge}, adapter={"kind": adapter}))
        assert f"{bridge} to an embedded server in the place of engine.urls: weights of a step arrived" in check.message

    def test_weights_that_do_not_arrive_are_a_failure(self, tmp_path: Path):
        (tmp_path / "lost.py").write_text(LOST)
        bridge = {"kind": "custom", "function": f"{tmp_path / 'lost.py'}:LostBridge"}
        with pytest.raises(StaleWeights):
            try_transfer(config(bridge=bridge, **SERVED))

    def test_vllm_is_not_replaced_where_it_is_missing(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(transfer.util, "find_spec", lambda name: None)
        with pytest.raises(DependencyError, match="vLLM is not installed here"):
            engine_for_trial(config(engine={"kind": "vllm"}, bridge={"kind": "broadcast"}))
        monkeypatch.setattr(transfer.util, "find_spec", lambda name: name)
        section, _ = engine_for_trial(config(engine={"kind": "vllm", "devices": "3,4"}, bridge={"kind": "broadcast"}))
        assert (section["kind"], section["devices"]) == ("vllm", "3")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_an_engine_in_the_trainers_process_is_tried_too(self):
        assert try_transfer(config()).message.startswith("in_process to the embedded engine: ")
