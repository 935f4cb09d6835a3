from __future__ import annotations

import pytest

from lachesis.config.schema import (
    BroadcastBridgeConfig,
    InProcessBridgeConfig,
    LachesisConfig,
    LoraBroadcastBridgeConfig,
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


@pytest.mark.parametrize(
    ("engine", "algorithm", "expected"),
    [
        ({"kind": "vllm"}, None, "none"),
        ({"kind": "vllm", "quantization": "none", "kv_cache_dtype": "auto"}, {}, "none"),
        ({"kind": "vllm", "quantization": "fp8"}, None, "token_truncate"),
        ({"kind": "vllm", "quantization": "fp8"}, {"beta": 0.1}, "token_truncate"),
        ({"kind": "vllm", "kv_cache_dtype": "fp8"}, {}, "token_truncate"),
        ({"kind": "vllm", "quantization": "fp8"}, {"sampler_correction": "none"}, "none"),
        ({"kind": "vllm", "quantization": "fp8"}, {"sampler_correction": "sequence_mask"}, "sequence_mask"),
    ],
)
def test_the_loss_is_corrected_for_an_engine_in_8_bits_unless_it_is_told_otherwise(engine, algorithm, expected: str):
    tree = {"run": {"steps": 1}, "model": {"path": "m"}, "engine": engine}
    tree |= {} if algorithm is None else {"algorithm": algorithm}
    config = LachesisConfig.model_validate(tree)
    assert config.algorithm.sampler_correction == expected
    assert LachesisConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"pipeline": {"async_prefetch": True}}, "token_truncate"),
        ({"pipeline": {"async_prefetch": True}, "algorithm": {"sampler_correction": "none"}}, "none"),
        ({"pipeline": {"async_prefetch": True}, "algorithm": {"loss_type": "dppo_tv"}}, "none"),
        ({"pipeline": {"async_prefetch": True}, "source": {"kind": "atropos", "batch_size": 8}}, "none"),
        ({}, "none"),
    ],
)
def test_the_loss_is_corrected_for_age_where_generation_runs_ahead(sections: dict, expected: str):
    config = LachesisConfig.model_validate({"run": {"steps": 1}, "model": {"path": "m"}, **sections})
    assert config.algorithm.sampler_correction == expected
