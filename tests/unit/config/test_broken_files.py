"""Broken files of other trainers: what is wrong is said with the file, the line and the key that the user wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_config
from lachesis.config.rules import check

TRL = """\
model_name_or_path: org/model
torch_dtype: bfloat16
dataset_name: org/data
dataset_config: main
output_dir: out
reward_funcs: [rewards.exact, rewards.short]
reward_weights: [1, 2]
num_generations: 8
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
max_steps: 10
learning_rate: 1.0e-6
lr_scheduler_type: cosine
warmup_ratio: 0.1
beta: 0.04
epsilon: 0.2
epsilon_high: 0.3
loss_type: dapo
scale_rewards: group
importance_sampling_level: token
temperature: 1.0
top_p: 0.9
top_k: 20
max_completion_length: 256
max_prompt_length: 128
gradient_checkpointing: true
use_peft: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.0
use_vllm: true
vllm_mode: server
vllm_server_host: 127.0.0.1
vllm_server_port: 8000
optim: adamw_torch
weight_decay: 0.1
max_grad_norm: 1.0
seed: 3
save_strategy: steps
save_steps: 5
logging_steps: 1
eval_strategy: "no"
report_to: none
sync_ref_model: false
mask_truncated_completions: true
num_iterations: 1
steps_per_generation: 2
bf16: true
"""
AXOLOTL = """\
base_model: org/model
rl: grpo
datasets:
  - path: org/data
    split: train
    type: rewards.transform
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 512
micro_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 10
learning_rate: 1.0e-6
lr_scheduler: cosine
warmup_steps: 2
optimizer: adamw_torch
weight_decay: 0.1
max_grad_norm: 1.0
bf16: true
gradient_checkpointing: true
seed: 3
saves_per_epoch: 1
output_dir: out
val_set_size: 0.1
trl:
  beta: 0.04
  num_generations: 4
  max_completion_length: 256
  reward_funcs: [rewards.exact, rewards.short]
  reward_weights: [1, 2]
  use_vllm: true
  vllm_server_host: 127.0.0.1
  vllm_server_port: 8000
  temperature: 1.0
  loss_type: dapo
  scale_rewards: true
  log_completions: true
  num_iterations: 1
vllm:
  gpu_memory_utilization: 0.5
  tensor_parallel_size: 1
"""

FILES = {"TRL": TRL, "Axolotl": AXOLOTL}

# A file, the keys that are written otherwise or, without a value, left out, and those that the message has to name.
WRONG_TYPES = [
    *(("TRL", {key: value}, [key]) for key, value in {
        "learning_rate": "fast",
        "num_generations": "eight",
        "per_device_train_batch_size": "{a: 1}",
        "gradient_accumulation_steps": "2.5",
        "max_steps": "[10]",
        "reward_weights": "[1, heavy]",
        "beta": "-1",
        "loss_type": "grpoo",
        "temperature": "hot",
        "top_p": "9",
        "max_completion_length": "-7",
        "gradient_checkpointing": "maybe",
        "use_peft": "sometimes",
        "lora_r": "0",
        "torch_dtype": "bfloat17",
        "bf16": "maybe",
        "optim": "lion",
        "lr_scheduler_type": "zigzag",
        "save_strategy": "weekly",
        "eval_strategy": "sometimes",
        "vllm_server_host": "[1]",
        "vllm_server_port": "99999",
        "seed": "three",
        "steps_per_generation": "3",
        "reward_weigths": "[1, 2]",
    }.items()),
    *(("Axolotl", {key: value}, [key]) for key, value in {
        "rl": "dpo",
        "adapter": "dora",
        "lora_alpha": "big",
        "lora_target_linear": "maybe",
        "sequence_len": "long",
        "micro_batch_size": "0",
        "learning_rate": "fast",
        "lr_scheduler": "zigzag",
        "optimizer": "lion",
        "bf16": "maybe",
        "val_set_size": "-1",
        "split": "[1]",
        "type": "3",
        "num_generations": "1",
        "beta": "-1",
        "vllm_server_host": "{a: 1}",
        "scale_rewards": "3",
        "fsdp_config": "3",
        "early_stopping_patience": "3",
    }.items()),
]  # fmt: skip
# Rules over several keys name each of them where it is.
ACROSS = [
    ("TRL", {"reward_weights": "[1, 2, 3]"}, ["reward_weights", "reward_funcs"]),
    ("TRL", {"sync_ref_model": "true", "beta": "0.0"}, ["sync_ref_model"]),
    ("TRL", {"generation_batch_size": "16"}, ["generation_batch_size"]),
    ("TRL", {"warmup_steps": "50"}, ["warmup_steps"]),
    ("TRL", {"load_in_4bit": "true"}, ["load_in_4bit", "use_vllm"]),
    ("Axolotl", {"reward_weights": "[1]"}, ["reward_weights", "reward_funcs"]),
    ("Axolotl", {"adapter": "qlora"}, ["adapter", "use_vllm"]),
    ("Axolotl", {"warmup_ratio": "0.1"}, ["warmup_steps"]),
]
MISSING = [
    ("TRL", "model_name_or_path", "TRL's model_name_or_path: missing"),
    ("TRL", "dataset_name", "TRL's dataset_name: missing"),
    ("TRL", "reward_funcs", "TRL's reward_funcs: missing"),
    ("Axolotl", "base_model", "Axolotl's base_model: missing"),
    ("Axolotl", "rl", "rl: is missing"),
    ("Axolotl", "reward_funcs", "Axolotl's trl.reward_funcs (line 27): missing"),
]


def key_of(line: str) -> str:
    return line.partition(":")[0].strip(" -")


def broken(text: str, values: dict[str, str | None]) -> str:
    """The file with each of those keys in its place, or at the end, or left out."""
    lines = []
    for line in text.splitlines():
        value = values.get(key_of(line), line)
        if value is not None:
            lines.append(line if value is line else f"{line.partition(':')[0]}: {value}")
    written = {key_of(line) for line in lines}
    lines += [f"{key}: {value}" for key, value in values.items() if value is not None and key not in written]
    return "\n".join([*lines, ""])


def said(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded = load_config(path)
        check(loaded.config, located=loaded.located, name=loaded.name)
    assert caught.value.message.startswith(str(path)), caught.value.message
    return caught.value.message


@pytest.mark.parametrize("file", FILES)
def test_whole_files_are_fine(write, file: str):
    loaded = load_config(write(FILES[file]))
    check(loaded.config)


@pytest.mark.parametrize(("file", "values", "keys"), [*WRONG_TYPES, *ACROSS], ids=str)
def test_what_is_wrong_is_named_with_file_line_and_key(
    write, file: str, values: dict[str, str | None], keys: list[str]
):
    wrong = broken(FILES[file], values)
    message = said(write(wrong))
    for key in keys:
        (line,) = [number for number, line in enumerate(wrong.splitlines(), start=1) if key_of(line) == key]
        assert f"(line {line}: " in message or f"{key} (line {line})" in message, message
        assert key in message


@pytest.mark.parametrize(("file", "key", "expected"), MISSING, ids=str)
def test_a_missing_key_is_named_as_it_would_be_written(write, file: str, key: str, expected: str):
    assert expected in said(write(broken(FILES[file], {key: None})))


def test_there_are_enough_of_them():
    assert len(WRONG_TYPES) + len(ACROSS) + len(MISSING) >= 40
