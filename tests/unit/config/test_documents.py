"""Configurations as people have them: whole files, and fragments laid over one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis.common.errors import ConfigError
from lachesis.config.load import LoadedConfig, load_config
from lachesis.config.rules import check
from lachesis.plugins.dialects import recognize

DOCUMENTS = Path(__file__).with_name("documents")
FRAGMENTS = sorted(path.stem for path in (DOCUMENTS / "fragments").glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((DOCUMENTS / f"{name}.yaml").read_text())


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, sections key by key."""
    both = dict(base)
    for key, value in over.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


@pytest.fixture
def load(tmp_path):
    def load_data(*names: str, processes: int = 1, **more: Any) -> LoadedConfig:
        data: dict[str, Any] = {}
        for name in names:
            data = merged(data, read(name))
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(merged(data, more)))
        return load_config(path, processes=processes)

    return load_data


def test_the_quick_start(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load("quickstart")
    config = loaded.config
    assert loaded.dialect == "axolotl"
    assert (config.run.dir, config.run.name, config.run.steps) == (str(tmp_path), "grpo-output", 200)
    assert (config.model.path, config.model.dtype) == ("Qwen/Qwen2.5-1.5B-Instruct", "bfloat16")
    assert (config.model.pad_token, config.model.gradient_checkpointing) == ("<|endoftext|>", True)
    assert config.adapter.model_dump(exclude={"layers", "path"}) == {
        "kind": "lora", "r": 32, "alpha": 64, "dropout": 0, "targets": "all-linear",
    }  # fmt: skip
    assert (config.data.path, config.data.name, config.data.split) == ("openai/gsm8k", "main", "train")
    assert config.data.transform == "rewards.prompt_transform"
    assert (config.data.eval_size, config.data.max_prompt_length) == (0, 512)
    assert config.rewards.functions == ["rewards.accuracy_reward", "rewards.format_reward"]
    assert config.rewards.weights == [1.0, 0.5]
    assert config.engine.model_dump() == {
        "kind": "http", "urls": ["http://127.0.0.1:8000"], "wait_s": 300, "takeover": False,
    }  # fmt: skip
    assert config.deadlines.generation_s == 300
    assert (config.bridge.kind, config.sampling.temperature) == ("lora_only", 0.7)
    assert (config.batch.prompts_per_step, config.batch.micro_batch_size) == (1, 2)
    assert (config.optimizer.kind, config.optimizer.learning_rate) == ("adamw", 5e-6)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("cosine", 10)
    assert check(config) == []
    assert {finding.level for finding in loaded.findings} == {"note"}


def test_the_quick_start_has_the_defaults_of_its_trainer(load):
    algorithm = load("quickstart").config.algorithm
    assert (algorithm.loss_type, algorithm.use_bias_correction_kl, algorithm.beta) == ("dapo", False, 0.0)
    assert algorithm.sampler_correction == "token_truncate"
    assert (algorithm.sampler_correction_max, algorithm.sampler_correction_min) == (3.0, pytest.approx(1 / 3))


@pytest.mark.parametrize(
    ("name", "processes", "prompts"),
    [("single_gpu", 1, 16), ("dual_gpu", 1, 8), ("multi_gpu", 1, 4), ("multi_gpu", 2, 8)],
)
def test_configurations_for_one_and_more_gpus(load, name, processes, prompts):
    config = load(name, "fragments/custom_dataset", processes=processes).config
    check(config)
    assert config.batch.prompts_per_step == prompts
    assert config.algorithm.beta == 0.001
    assert (config.run.steps, config.run.epochs) == (None, 1.0)
    assert (config.engine.kind, config.bridge.kind) == ("http", "broadcast")


def test_a_configuration_that_lacks_data_and_rewards_says_so(load):
    with pytest.raises(ConfigError) as caught:
        load("single_gpu")
    first, *lines = caught.value.message.splitlines()
    assert first.endswith("2 problems")
    assert ["data.path" in lines[0], "rewards.functions" in lines[1]] == [True, True]


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_every_fragment_fits_the_quick_start(load, fragment):
    check(load("quickstart", f"fragments/{fragment}").config)


@pytest.mark.parametrize(
    ("fragment", "section", "expected"),
    [
        ("rewards", "rewards", {"weights": [1.0, 0.5, 0.1]}),
        ("aggregation", "algorithm", {"aggregation": "normalize_then_sum"}),
        ("reward_model", "rewards", {"weights": [1.0, 0.3]}),
        ("workers", "rewards", {"num_workers": 4}),
        ("sync", "bridge", {"kind": "lora_only", "every_steps": 5}),
        ("prefetch", "bridge", {"every_steps": 2}),
        ("prefetch", "pipeline", {"async_prefetch": True, "prefetch_depth": 1}),
        ("streaming", "pipeline", {"streaming": True, "streaming_min_groups": 1}),
        ("zero_advantage", "algorithm", {"skip_zero_advantage": True}),
        ("replay", "pipeline", {"replay_size": 100, "replay_recompute_logps": True}),
        ("reroll", "pipeline", {"reroll_start_fraction": 0.5, "reroll_max_groups": 1}),
        ("correction", "algorithm", {"off_policy_mask_threshold": 0.5, "importance_sampling_level": "token"}),
        ("fp8", "model", {"compile": "on", "dtype": "bfloat16", "matmul_dtype": "float8"}),
        ("custom_dataset", "data", {"eval_size": 0.1, "processes": 1, "name": None}),
        ("load_in_8bit", "model", {"quantization": "int8"}),
        ("load_in_4bit", "model", {"quantization": "nf4"}),
        ("smaller_batches", "batch", {"micro_batch_size": 2, "prompts_per_step": 4}),
        ("smaller_batches", "data", {"max_prompt_length": 256}),
        ("checkpointing", "model", {"gradient_checkpointing": True}),
    ],
)
def test_a_fragment_means_what_it_says(load, fragment, section, expected):
    config = load("quickstart", f"fragments/{fragment}").config
    written = getattr(config, section).model_dump()
    assert {key: written[key] for key in expected} == expected


def test_a_length_at_the_top_level_counts_where_the_section_has_none(load):
    data = read("quickstart")
    del data["trl"]["max_completion_length"]
    path = "fragments/smaller_batches"
    assert load("dual_gpu", "fragments/custom_dataset", path).config.sampling.max_completion_length == 256
    assert load("quickstart", path, trl={"max_completion_length": None}).config.sampling.max_completion_length == 128


@pytest.mark.parametrize("fragment", ["fsdp", "deepspeed"])
def test_sharding_is_what_several_processes_do(load, fragment):
    loaded = load("quickstart", f"fragments/{fragment}")
    distributed = loaded.config.distributed
    assert (distributed.strategy, distributed.reshard_after_forward) == ("shard", True)
    notes = [finding.message for finding in loaded.findings if finding.message.startswith(fragment)]
    assert any("torchrun --nproc-per-node N" in note for note in notes)


def test_a_file_for_accelerate_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"configuration of accelerate.* -> .*torchrun"):
        recognize(read("accelerate"))
