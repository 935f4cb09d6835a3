"""What several devices cannot train."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.rules.distributed import require_colocatable, require_distributable, shared_card

LORA = {"kind": "lora"}
VLLM = {"kind": "vllm"}
HTTP = {"engine": {"kind": "http"}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"adapter": LORA},
        {"checkpoint": {"asynchronous": True}},
        {"distributed": {"shard_size": 2}},
        {"distributed": {"replicate_size": 2}},
        {"distributed": {"context_parallel_size": 2, "shard_size": 2}},
        {"distributed": {"context_parallel_size": 2}, "adapter": LORA},
        {"distributed": {"expert_parallel_size": 4}, "algorithm": {"router_replay": True}},
        {"distributed": {"strategy": "replicate"}, "adapter": LORA, "model": {"path": "m", "quantization": "nf4"}},
        {"distributed": {"strategy": "replicate"}, "optimizer": {"kind": "adamw_8bit"}},
        {"optimizer": {"kind": "adamw_cpu"}},
        {**HTTP, "bridge": {"kind": "broadcast"}},
        {**HTTP, "adapter": LORA, "bridge": {"kind": "lora_only"}},
    ],
)
def test_what_several_devices_can_do(build, sections: dict[str, Any]):
    require_distributable(build(**sections), ranks=4)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({**HTTP, "bridge": {"kind": "shared_vllm"}}, r"shared_vllm has one copy of the weights.*4 devices train"),
        (
            {**HTTP, "adapter": LORA, "bridge": {"kind": "lora_only", "share_base": True}},
            r"bridge.share_base builds the model on one engine's memory",
        ),
        ({"distributed": {"shard_size": 3}}, r"shard_size is 3, but there are 4 devices"),
        (
            {"distributed": {"context_parallel_size": 2}, "model": {"path": "m", "packing": "padded"}},
            r"packing is padded, but 2 devices can share only the tokens of packed",
        ),
        (
            {"distributed": {"context_parallel_size": 2}, "algorithm": {"router_replay": True}},
            r"router_replay does not work with context parallelism, and 2 devices share",
        ),
        ({"adapter": LORA, "model": {"path": "m", "quantization": "nf4"}}, r"weights in nf4 cannot be sharded"),
        (
            {"checkpoint": {"asynchronous": True, "format": "whole"}},
            r"asynchronous with checkpoint.format: whole would make rank 0 hold the state of all 4 devices twice",
        ),
        ({"optimizer": {"kind": "adamw_8bit"}}, r"adamw_8bit works on whole tensors"),
        ({"optimizer": {"kind": "adafactor"}}, r"adafactor works on whole tensors"),
    ],
)
def test_what_they_cannot_is_refused_with_a_way_out(build, sections: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        require_distributable(build(**sections), ranks=4)
    assert caught.value.remedy


BESIDE = {"bridge": {"kind": "broadcast"}}


@pytest.mark.parametrize(
    "keys",
    [
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        {},
        {"tensor_parallel_size": 2, "devices": "4,5"},
    ],
    ids=["one engine", "two", "shares rank 0's GPU", "elsewhere"],
)
def test_an_engine_that_fits_the_ranks(build, keys: dict[str, Any]):
    require_colocatable(build(engine=VLLM | keys, **BESIDE), ranks=4, here=4)


@pytest.mark.parametrize(
    ("keys", "bridge", "here", "expected", "remedy"),
    [
        (
            {"tensor_parallel_size": 2},
            {},
            4,
            r"1 x tensor_parallel_size 2 takes 2 GPUs, but 4 ranks train: without engine.devices .* one worker beside",
            "set engine.data_parallel_size: 2, or",
        ),
        ({"tensor_parallel_size": 3}, {}, 4, r"tensor_parallel_size 3 takes 3 GPUs, but 4 ranks", "start 3 ranks, or"),
        ({"data_parallel_size": 8}, {}, 4, r"size 8 x tensor_parallel_size 1 takes 8 GPUs, but 4 ranks", "size: 4, or"),
        (
            {"data_parallel_size": 4},
            {"transport": "nccl"},
            4,
            r"transport is nccl, which needs separate GPUs for each side, but .* takes 4 GPUs, shared by 4 ranks",
            "leave bridge.transport out",
        ),
        (
            {"tensor_parallel_size": 4},
            {},
            2,
            r"GPUs of the 4 ranks, but only 2 of them are on the machine",
            "one machine",
        ),
    ],
)
def test_one_that_does_not_is_refused_with_a_way_out(
    build, keys: dict[str, Any], bridge: dict[str, Any], here: int, expected: str, remedy: str
):
    config = build(engine=VLLM | keys, bridge={"kind": "broadcast"} | bridge)
    with pytest.raises(ConfigError, match=expected) as caught:
        require_colocatable(config, ranks=4, here=here)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("devices", "bridge", "visible", "said"),
    [
        (
            "1",
            "broadcast",
            None,
            "engine.devices 1 puts the engine on the GPU of rank 1 (GPU 1), and neither leaves memory",
        ),
        ("3, 5", "broadcast", "4,5,6", "engine.devices 3, 5 puts the engine on the GPU of rank 1 (GPU 5), and"),
        ("2", "broadcast", None, None),
        ("1", "broadcast", "2,3", None),
        ("0", "shared_vllm", None, None),
        (None, "broadcast", None, None),
    ],
)
def test_an_engine_on_the_card_of_a_rank_is_noticed(
    build, devices: str | None, bridge: str, visible: str | None, said: str | None
):
    config = build(engine={"kind": "vllm", "devices": devices}, bridge={"kind": bridge})
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = shared_card(config, ranks=2, environment=environment)
    assert (found is None) if said is None else (found is not None and found.startswith(said))
