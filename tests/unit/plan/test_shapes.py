"""Where a model's shape is found, and the table of known models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForImageTextToText

from lachesis.plan.shapes import find_shape, known_architecture
from lachesis.train.distributed.strategy import text_part


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


# Elements of the published safetensors, as the hub counts them.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "NousResearch/Hermes-3-Llama-3.1-8B": 8_030_261_248,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_known_models_have_the_parameters_that_were_published(name: str, parameters: int):
    found = find_shape(name)
    assert found is not None and found.source == "table"
    assert found.shape.parameters == parameters


_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_LLAMA = {"model_type": "llama", "hidden_size": 960, "pad_token_id": 0}
# Configurations with towers, and how many patches become one token.
TOWERS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2_vl": ({"text_config": _MROPE}, 4),
    "qwen2_5_vl": ({"text_config": _MROPE}, 4),
    "qwen3_vl": ({"text_config": _MROPE}, 4),
    "qwen3_5": ({}, 4),
    "gemma3": ({"vision_config": _SIGLIP | {"image_size": 896, "patch_size": 14, "vision_use_head": False}}, 16),
    "smolvlm": ({"text_config": _LLAMA, "pad_token_id": 0}, 4),
    "llava": ({}, 1),
    "internvl": ({}, 1),
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_has_about_the_parameters_of_transformers_model(name: str, tmp_path: Path):
    fields, merged = TOWERS[name]
    config = AutoConfig.for_model(name, **fields)
    config.get_text_config().num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    text, head = text_part(model), model.get_output_embeddings()
    of_text = {id(parameter) for module in (text, head) for parameter in module.parameters()}
    real = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in of_text)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = find_shape(str(tmp_path))
    assert found is not None and found.shape.tower is not None
    assert found.shape.tower.parameters == pytest.approx(real, rel=0.05)
    assert found.shape.tower.merged == merged


def test_only_exact_names_are_known():
    assert known_architecture("qwen/qwen2.5-1.5b") is None and known_architecture("someone/Qwen2.5-1.5B") is None
    assert find_shape("someone/Qwen2.5-1.5B") is None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that knows org/model, and the addresses that it was asked for."""
    asked: list[str] = []

    def get(url: str, **_: object) -> httpx.Response:
        asked.append(url)
        request = httpx.Request("GET", url)
        if "org/model" not in url:
            return httpx.Response(404, request=request)
        return httpx.Response(200, request=request, text=json.dumps(known_architecture("Qwen/Qwen3-8B")))

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return asked


def test_the_hub_is_asked_for_its_config_alone(hub: list[str]):
    found = find_shape("org/model", revision="v1", ask_hub=True)
    assert found is not None and found.source == "hub" and found.shape.layers == 36
    assert hub == ["https://huggingface.co/org/model/resolve/v1/config.json"]
    assert find_shape("org/model") is None and len(hub) == 1, "nobody is asked unless it is said"


def test_a_model_that_the_hub_does_not_give_is_looked_for_in_the_table(hub: list[str]):
    found = find_shape("Qwen/Qwen3-8B", ask_hub=True)
    assert found is not None and found.source == "table" and len(hub) == 1
    assert find_shape("org/other", ask_hub=True) is None


def test_a_hub_that_does_not_answer_is_no_error(hub: list[str], monkeypatch: pytest.MonkeyPatch):
    def unreachable(url: str, **_: object) -> httpx.Response:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr(httpx, "get", unreachable)
    assert find_shape("org/model", ask_hub=True) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(httpx, "get", lambda *_, **__: pytest.fail("offline means offline"))
    assert find_shape("org/model", ask_hub=True) is None
