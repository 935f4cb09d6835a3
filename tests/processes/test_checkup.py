"""Trials with processes of their own: two ranks that meet, and weights that travel to a server, or do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lachesis.common.errors import DependencyError, StaleWeights, TrainingError
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.checks import ranks, transfer
from lachesis.plugins.checks.ranks import try_ranks
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


class TestRanks:
    def test_two_processes_meet_and_add_up(self):
        check = try_ranks(config())
        assert not check.failed
        assert "met over gloo, for there are 0 GPUs to train on; added up 17 MB at" in check.message

    def test_a_rank_that_ends_is_told_with_its_last_words(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(
            ranks, "_RANK", ("-c", "import os, sys; sys.exit('no peer' if os.environ['RANK'] == '1' else 0)")
        )
        with pytest.raises(TrainingError, match="ended with 0 and 1: no peer"):
            try_ranks(config())

    def test_ranks_that_hang_are_ended(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setattr(ranks, "LIMIT_S", 0.3)
        monkeypatch.setattr(ranks, "_RANK", ("-c", f"import time; time.sleep(600)  # {tmp_path}"))
        with pytest.raises(TrainingError, match="were not done after 0 s: they said nothing"):
            try_ranks(config())
        lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if str(tmp_path) in line]


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
