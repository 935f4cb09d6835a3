"""How much of a card vLLM gets beside the trainer, if nobody says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lachesis.common.errors import ConfigError
from lachesis.config.schema import LachesisConfig
from lachesis.plan.cards import card_use
from lachesis.plan.plan import plan
from lachesis.run.colocated_engine import (
    require_room,
    share_beside_trainer,
    with_room_aside,
    with_share,
    with_staging,
)


def configured(path: str, *, model: dict[str, Any] | None = None, **sections: Any) -> LachesisConfig:
    data: dict[str, Any] = {
        "run": {"steps": 1}, "model": {"path": path, **(model or {})}, "data": {"path": "a.jsonl"},
        "rewards": {"functions": ["r.f"]}, "engine": {"kind": "vllm"}, "bridge": {"kind": "shared_vllm"},
    }  # fmt: skip
    return LachesisConfig.model_validate(data | sections)


def test_the_usual_share_where_both_fit(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="lachesis"):
        assert share_beside_trainer(configured("Qwen/Qwen2.5-1.5B"), card_bytes=150 * 10**9) == 0.45
        assert share_beside_trainer(configured("org/of-no-known-shape"), card_bytes=150 * 10**9) == 0.45
    assert not caplog.messages


def test_what_the_trainer_leaves_is_said(caplog: pytest.LogCaptureFixture):
    """14B under LoRA on the engine's own base: its weights alone are more than 0.45 of 48 GB."""
    lora = {"adapter": {"kind": "lora"}, "bridge": {"kind": "lora_only", "share_base": True}}
    config = configured("Qwen/Qwen3-14B", model={"gradient_checkpointing": True}, **lora)
    with caplog.at_level(logging.INFO, logger="lachesis"):
        share = share_beside_trainer(config, card_bytes=48 * 10**9)
    assert 29.5 / 48 < share < 0.9
    (said,) = caplog.messages
    assert f"vLLM gets {share:.2f} of the GPU (engine.gpu_memory_utilization)" in said


def test_what_plan_does_not_count_has_a_part_of_the_card_too():
    """8B under LoRA and an engine in 8 bits ended on 150 GB where the three of them were planned to take 149.8."""
    config = configured(
        "meta-llama/Llama-3.1-8B",
        adapter={"kind": "lora"},
        bridge={"kind": "broadcast"},
        engine={"kind": "vllm", "quantization": "fp8"},
        batch={"max_tokens_per_microbatch": 12672},
        sampling={"max_completion_length": 512},
    )
    planned = plan(config, device="cuda")
    use = card_use(config, planned, card_gb=150)
    assert use.share is not None and use.share < 0.45 and use.aside > 0, "the trainer decides, and an update has room"
    assert 0.96 * use.card < use.total <= 0.97 * use.card


def test_one_of_two_ranks_leaves_more():
    """7B, all weights: one process holds 129 GB and leaves a quarter of 190 GB, each of two holds 72 GB."""
    config = configured("Qwen/Qwen2.5-7B", model={"gradient_checkpointing": True}, bridge={"kind": "broadcast"})
    shares = [share_beside_trainer(config, card_bytes=190 * 10**9, devices=devices) for devices in (1, 2)]
    assert shares[0] < 0.3 and shares[1] == 0.45


def test_what_is_said_and_what_has_no_gpu_stays():
    """There is none here."""
    for engine in ({"kind": "vllm"}, {"kind": "vllm", "gpu_memory_utilization": 0.3}, {"kind": "vllm", "devices": "1"}):
        config = configured("Qwen/Qwen3-14B", model={"device": "cpu"}, engine=engine)
        assert with_share(config) is config and with_room_aside(config) is config


def test_an_update_without_room_beside_the_trainer_waits_in_the_hosts_memory(caplog: pytest.LogCaptureFixture):
    """7B with an adapter, merged: a trainer of 42 GB, half a card of 80 for the engine, and updates of 15.2 GB."""

    def placed(card_gb: int, **bridge: Any) -> str:
        config = configured(
            "Qwen/Qwen2.5-7B",
            adapter={"kind": "lora"},
            engine={"kind": "vllm", "gpu_memory_utilization": 0.4},
            bridge={"kind": "broadcast", **bridge},
        )
        found = with_staging(config, card_bytes=card_gb * 10**9)
        assert found.bridge.kind == "broadcast"
        assert found.bridge.staging == "host" or found is config
        return found.bridge.staging

    with caplog.at_level(logging.WARNING, logger="lachesis"):
        assert placed(141) == "auto" and placed(80, staging="device") == "device"
        assert not caplog.messages
        assert placed(80) == "host"
    (said,) = caplog.messages
    assert "host's memory" in said and "of the GPU's 80.0 GB the trainer needs" in said


def test_beside_a_gpu_both_are_decided_by_its_size(monkeypatch: pytest.MonkeyPatch):
    """7B with an adapter, merged, beside a GPU that is told of; an engine elsewhere is left as it is."""
    card = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: card)
    monkeypatch.setattr("lachesis.run.colocated_engine.resolve_device", lambda device: torch.device("cuda", 0))
    parts = {"adapter": {"kind": "lora"}, "bridge": {"kind": "broadcast"}}
    config = configured("Qwen/Qwen2.5-7B", **parts, engine={"kind": "vllm", "gpu_memory_utilization": 0.4})
    assert with_share(config) is config
    assert with_room_aside(config).bridge.model_dump() == config.bridge.model_dump() | {"staging": "host"}
    shared = with_share(configured("Qwen/Qwen2.5-7B", **parts)).engine
    assert shared.kind == "vllm" and shared.gpu_memory_utilization is not None
    elsewhere = configured("Qwen/Qwen2.5-7B", **parts, engine={"kind": "vllm", "devices": "1"})
    assert with_share(elsewhere) is elsewhere and with_room_aside(elsewhere) is elsewhere


def test_an_engine_on_the_ranks_gpus_has_room_there_or_has_to_sleep(caplog: pytest.LogCaptureFixture):
    """7B over two cards: with what it trains a rank holds 80 GB, at rest 56, and the engine needs 11 at least."""

    def of(card_gb: int, **engine: Any) -> None:
        config = configured(
            "Qwen/Qwen2.5-7B",
            model={"gradient_checkpointing": True},
            bridge={"kind": "broadcast"},
            engine={"kind": "vllm", "tensor_parallel_size": 2, **engine},
        )
        require_room(config, card_bytes=card_gb * 10**9, ranks=2)

    of(141)
    of(85, enable_sleep_mode=True)  # as many as an H100 has
    assert not caplog.messages
    with pytest.raises(ConfigError, match=r"each of 2 ranks takes 7\d.\d GB of its GPU while it trains") as caught:
        of(85)
    assert "enable_sleep_mode: true" in caught.value.remedy
    of(85, gpu_memory_utilization=0.3)
    of(60, enable_sleep_mode=True)
    assert len(caplog.messages) == 2
    assert all("distributed.cpu_offload: true, which keeps weights and optimizer" in said for said in caplog.messages)
