from __future__ import annotations

import shlex

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_argv
from lachesis.config.rules import check
from lachesis.plugins.dialects.atropos import translate_argv


def config_of(flags: str):
    return load_argv(shlex.split(f"--model-name org/model {flags}")).config


def message(flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_argv(shlex.split(flags))
    return caught.value.message


def test_the_documented_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of("")
    assert (config.run.steps, config.run.dir, config.run.name) == (10, str(tmp_path), "trained_model_checkpoints")
    assert (config.bridge.kind, config.engine.kind) == ("none", "vllm")
    assert config.bridge.kind == "none" and config.bridge.every_steps == 3
    assert config.engine.kind == "vllm" and config.engine.port == 9001
    assert config.source.model_dump() == {
        "kind": "atropos",
        "url": "http://127.0.0.1:8002",
        "batch_size": 2,
        "max_sequence_length": 2048,
        "wait_s": 3600.0,
        "missing_logprobs": "warn",
    }
    assert (config.algorithm.beta, config.algorithm.epsilon, config.algorithm.kl_reference) == (0.1, 0.2, "base")
    assert (config.optimizer.kind, config.optimizer.learning_rate, config.batch.micro_batch_size) == ("adamw", None, 2)
    assert check(config) == []


@pytest.mark.parametrize("flag", ["--lr", "--learning-rate", "--learning_rate", "--lr=3e-6 --device cuda"])
def test_both_spellings(flag):
    text = flag if "=" in flag else f"{flag} 3e-6"
    assert config_of(text).optimizer.learning_rate == 3e-6


@pytest.mark.parametrize(
    ("mode", "engine", "every"),
    [
        ("none", "vllm", 5),
        ("legacy", "vllm", 5),
        ("lora_restart", "vllm", 5),
        ("lora_only", "http", 5),
        ("lora_nccl", "http", 1),
        ("lora_nccl --nccl-sync-every-step false", "http", 5),
    ],
)
def test_modes(mode, engine, every):
    config = config_of(f"--vllm-restart-interval 5 --weight-bridge-mode {mode} --vllm-port 9005")
    kind = mode.split()[0]
    assert (config.bridge.kind, config.engine.kind) == (
        {"legacy": "none", "lora_restart": "lora_only"}.get(kind, kind),
        engine,
    )
    assert getattr(config.bridge, "every_steps", None) == every
    assert "9005" in str(config.engine)
    assert (config.adapter.kind == "lora") == kind.startswith("lora")


def test_the_adapter_has_the_trainers_defaults():
    adapter = config_of("--weight-bridge-mode lora_only --lora-r 8").adapter
    assert adapter.model_dump() == {
        "kind": "lora", "r": 8, "alpha": 32.0, "dropout": 0.05, "targets": "all-linear", "layers": None, "path": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags", ["--single-copy", "--single-copy true", "--single-copy=true", "--weight-bridge-mode shared_vllm"]
)
def test_single_copy(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bridge = config_of(f"{flags} --vllm-config-path x/vllm_bridge_config.json").bridge
    assert bridge.kind == "shared_vllm"
    assert bridge.config_path == f"{tmp_path}/x/vllm_bridge_config.json"
    automatic = config_of(f"{flags} --vllm-config-path auto").bridge
    assert automatic.kind == "shared_vllm" and automatic.config_path is None


def test_a_switch_before_another_flag_takes_no_value():
    config = config_of("--use-wandb --wandb-project p --wandb-run-name 12 --single-copy false --seq-len 1024")
    assert config.logging.wandb is not None
    assert (config.logging.wandb.project, config.logging.wandb.name) == ("p", "12")
    assert config.bridge.kind == "none"
    assert config.source.kind == "atropos" and config.source.max_sequence_length == 1024


def test_batches():
    config = config_of("--batch-size 4 --gradient-accumulation-steps 8")
    assert config.source.kind == "atropos"
    assert (config.source.batch_size, config.batch.micro_batch_size) == (32, 4)


def test_overrides_are_canonical():
    config = load_argv(["--model-name", "m"], overrides=["algorithm.kl_reference=sampler"]).config
    assert config.algorithm.kl_reference == "sampler"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "--model-name: missing, but required"),
        (
            "--model-name m --traning-steps 5",
            "--traning-steps: not a key of the Atropos trainer that Lachesis knows; did",
        ),
        ("--model-name m --traning-steps 5", "did you mean --training-steps?"),
        ("--model-name m --training-steps", "--training-steps: it needs a value"),
        ("--model-name m --training-steps five", "run.steps (--training-steps): expected a whole number >= 1"),
        ("--model-name m --lr 1e-6 --learning-rate 1e-5", "--learning-rate: given twice; keep one"),
        ("--model-name m stray", "'stray' is neither a flag nor a flag's value"),
        ("--model-name m --batch-size 0", "--batch-size: expected a whole number >= 1, got the number 0"),
        ("--model-name m --weight-bridge-mode pigeon", "--weight-bridge-mode: expected one of shared_vllm, lora_only"),
        ("--model-name m --weight-bridge-mode lora_only --single-copy", "single copy is shared_vllm"),
        ("--model-name m --optimizer lion", "--optimizer: the text 'lion' has no counterpart"),
        ("--model-name m --save-path /", "--save-path: expected a directory for the run alone"),
    ],
)
def test_errors_name_the_flag(flags, expected):
    assert expected in message(flags)


def test_flags_that_mean_nothing_here_are_told():
    found = translate_argv(["--model-name", "m", "--benchmark", "--nccl-world-size", "2"]).findings
    (note,) = (finding.message for finding in found)
    assert note.startswith("2 flags without meaning here: --nccl-world-size, --benchmark")


def test_options_of_vllm_are_left_out_of_another_engine_with_a_note():
    words = ["--model-name", "m", "--weight-bridge-mode", "none", "--gpu-memory-utilization", "0.4"]
    loaded = load_argv(words, overrides=["engine.kind=embedded_server"])
    assert loaded.config.engine.kind == "embedded_server"
    assert any("gpu-memory-utilization: has no effect" in finding.message for finding in loaded.findings)
