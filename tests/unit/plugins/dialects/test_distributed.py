"""FSDP's and DeepSpeed's options in files of Axolotl and of TRL."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lachesis.config.document import Document
from lachesis.plugins.dialects import translate
from lachesis.plugins.dialects.table import Translation

AXOLOTL, TRL = "axolotl", "trl"
BASE: dict[str, dict[str, Any]] = {
    AXOLOTL: {
        "base_model": "m",
        "rl": "grpo",
        "max_steps": 1,
        "trl": {"num_generations": 4, "max_completion_length": 512},
    },
    TRL: {"model_name_or_path": "m", "max_steps": 1, "num_generations": 4},
}


def translated(dialect: str, processes: int = 2, **keys: Any) -> Translation:
    return translate(Document(name="c.yaml", data=BASE[dialect] | keys), dialect=dialect, processes=processes)


def distributed(dialect: str, **keys: Any) -> dict[str, Any]:
    found = translated(dialect, **keys)
    assert not [problem for problem in found.document.problems if "fsdp" in problem or "deepspeed" in problem]
    return found.document.data.get("distributed", {})


@pytest.mark.parametrize("dialect", [AXOLOTL, TRL])
@pytest.mark.parametrize(
    ("fsdp", "expected"),
    [
        ("full_shard auto_wrap", {"strategy": "shard", "reshard_after_forward": True}),
        (["shard_grad_op", "auto_wrap"], {"strategy": "shard", "reshard_after_forward": False}),
        ("full_shard offload", {"cpu_offload": True, "strategy": "shard", "reshard_after_forward": True}),
        (["no_shard"], {"strategy": "replicate"}),
        (True, {"strategy": "shard", "reshard_after_forward": True}),
        (False, {}),
    ],
)
def test_fsdp_says_how_to_shard(dialect: str, fsdp: Any, expected: dict[str, Any]):
    assert distributed(dialect, fsdp=fsdp) == expected


@pytest.mark.parametrize("dialect", [AXOLOTL, TRL])
@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_its_options_have_the_last_word(dialect: str, prefix: str):
    options = {
        f"{prefix}reshard_after_forward": False,
        f"{prefix}offload_params": True,
        f"{prefix}transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
        f"{prefix}activation_checkpointing": True,
    }
    found = translated(dialect, fsdp=["full_shard"], fsdp_config=options)
    assert found.document.data["distributed"] == {
        "strategy": "shard",
        "reshard_after_forward": False,
        "cpu_offload": True,
    }
    assert found.document.data["model"]["gradient_checkpointing"] is True


@pytest.mark.parametrize("word", ["SHARD_GRAD_OP", 2, "2"])
def test_a_strategy_may_be_an_option_too(word: Any):
    found = distributed(AXOLOTL, fsdp=["auto_wrap"], fsdp_config={"fsdp_sharding_strategy": word})
    assert found == {"strategy": "shard", "reshard_after_forward": False}


@pytest.mark.parametrize("name", ["context_parallel_size", "sequence_parallel_degree"])
def test_processes_that_share_a_sequence_count_as_one(name: str):
    rows = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
    found = translated(AXOLOTL, 4, **rows, **{name: 2})
    assert found.document.data["distributed"] == {"context_parallel_size": 2}
    assert found.document.data["batch"]["prompts_per_step"] == 4 * 2 * (4 // 2) // 4
    assert translated(AXOLOTL, 4, **rows).document.data["batch"]["prompts_per_step"] == 4 * 2 * 4 // 4
    assert not found.document.problems
    assert not distributed(AXOLOTL, **{name: None})


def test_the_size_of_a_group():
    assert distributed(AXOLOTL, dp_shard_size=4, fsdp=["hybrid_shard"])["shard_size"] == 4
    assert distributed(AXOLOTL, dp_replicate_size=2, dp_shard_size=4) == {"replicate_size": 2, "shard_size": 4}
    assert not [
        f for f in translated(AXOLOTL, dp_replicate_size=2, fsdp=["hybrid_shard"]).findings if f.level != "note"
    ]
    findings = translated(AXOLOTL, fsdp=["hybrid_shard"]).findings
    assert any(f.level == "warning" and "distributed.shard_size" in f.message for f in findings)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 3}, {"strategy": "shard", "reshard_after_forward": True}),
        ({"stage": 2}, {"strategy": "shard", "reshard_after_forward": False}),
        ({"stage": 1}, {"strategy": "shard", "reshard_after_forward": False}),
        ({"stage": 0}, {"strategy": "replicate"}),
        ({}, {"strategy": "replicate"}),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            {"strategy": "shard", "reshard_after_forward": True, "cpu_offload": True},
        ),
        (
            {"stage": 3, "offload_param": {"device": "none"}},
            {"strategy": "shard", "reshard_after_forward": True},
        ),
    ],
)
@pytest.mark.parametrize("dialect", [AXOLOTL, TRL])
def test_a_zero_stage_is_a_way_of_sharding(dialect: str, tmp_path, zero: dict[str, Any], expected: dict[str, Any]):
    content = {"zero_optimization": zero, "train_batch_size": "auto", "optimizer": {"type": "Lamb"}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    for value in (content, str(tmp_path / "ds.json")):
        found = translated(dialect, deepspeed=value)
        assert found.document.data["distributed"] == expected
        (note,) = [f.message for f in found.findings if f.message.startswith("deepspeed")]
        assert "DeepSpeed is not used" in note
        assert "optimizer of its file have no effect" in note
        assert "train_batch_size" not in note


def test_axolotls_own_files_go_by_their_names():
    found = distributed(AXOLOTL, deepspeed="deepspeed_configs/zero3_bf16_cpuoffload_all.json")
    assert found == {"strategy": "shard", "reshard_after_forward": True, "cpu_offload": True}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"deepspeed": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "expected 0 to 3"),
        ({"deepspeed": "zero2.json", "fsdp": ["full_shard"]}, "keep one of them"),
        ({"fsdp": ["tensor_parallel"]}, "has no counterpart; Lachesis has full_shard"),
        ({"fsdp": {"a": 1}}, "expected words such as full_shard"),
        ({"fsdp": ["full_shard"], "fsdp_config": {"offload_params": "yes"}}, "expected true or false"),
    ],
)
@pytest.mark.parametrize("dialect", [AXOLOTL, TRL])
def test_what_cannot_be_understood_is_an_error(dialect: str, keys: dict[str, Any], expected: str):
    assert any(expected in problem for problem in translated(dialect, **keys).document.problems)


def test_two_names_of_one_size_have_to_agree():
    def problems(degree: int) -> list[str]:
        sizes = {"context_parallel_size": 2, "sequence_parallel_degree": degree}
        return translated(AXOLOTL, micro_batch_size=4, **sizes).document.problems

    assert any("differs from context_parallel_size" in problem for problem in problems(4))
    assert not problems(2)


def test_processes_that_share_sequences_have_one_batch():
    keys = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "context_parallel_size": 2}
    found = translated(AXOLOTL, 4, **keys).document.data
    assert found["distributed"]["context_parallel_size"] == 2
    assert found["batch"]["prompts_per_step"] == 4 * 2 * 2 // 4


def test_matrices_split_over_devices_are_refused_with_what_to_use_instead():
    (problem,) = translated(AXOLOTL, 4, micro_batch_size=4, tensor_parallel_size=2).document.problems
    assert "tensor_parallel_size" in problem and "dp_shard_size" in problem
    assert not translated(AXOLOTL, 4, micro_batch_size=4, tensor_parallel_size=1).document.problems


def test_no_file_and_a_broken_one(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("{")
    for name, expected in (("list.json", "not an object"), ("text.json", "is not JSON")):
        problems = translated(TRL, deepspeed=str(tmp_path / name)).document.problems
        assert any(expected in problem for problem in problems)


@pytest.mark.parametrize(
    "keys",
    [
        {"fsdp": ["full_shard"]},
        {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}},
        {"deepspeed": "zero2.json"},
        {"dp_shard_size": 2},
        {"dp_replicate_size": 2},
    ],
)
def test_one_process_is_told_how_to_start_several_where_it_is_seen(keys: dict[str, Any]):
    for processes in (1, 2):
        findings = translated(AXOLOTL, processes, **keys).findings
        levels = [one.level for one in findings if "torchrun --nproc-per-node" in one.message]
        assert levels == (["warning"] if processes == 1 else [])
