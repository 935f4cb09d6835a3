"""The same configuration in other trainers' keys and in ours: `lachesis plan` counts the same memory for both."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis.config.load import LoadedConfig, load_argv, load_config
from lachesis.plan.cards import CARDS, card_use
from lachesis.plan.plan import Plan, plan
from lachesis.plugins.planning.plan_text import card_lines

# Qwen2.5-1.5B.
MODEL = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
# Eight completions in a step of one process, two in a pass, of 512 + 512 tokens.
OURS = """
run: {steps: 10}
model: {path: model}
data: {path: data.jsonl, max_prompt_length: 512}
rewards: {functions: [rewards.right]}
sampling: {num_generations: 4, max_completion_length: 512}
batch: {prompts_per_step: 2, micro_batch_size: 2}
"""
AXOLOTL = """
base_model: model
rl: grpo
datasets: [{path: data.jsonl}]
max_steps: 10
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
trl: {reward_funcs: [rewards.right], num_generations: 4, max_completion_length: 512}
"""
TRL = """
model_name_or_path: model
dataset_name: data.jsonl
reward_funcs: rewards.right
max_steps: 10
max_prompt_length: 512
max_completion_length: 512
num_generations: 4
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: false
"""
# Of its documented defaults those that have memory.
OURS_WITH_ATROPOS = """
run: {steps: 10}
model: {path: model}
source: {kind: atropos, batch_size: 8, max_sequence_length: 1024}
batch: {micro_batch_size: 2}
algorithm: {beta: 0.1, kl_reference: base}
"""
ATROPOS = "--model-name model --training-steps 10 --batch-size 2 --gradient-accumulation-steps 4 --seq-len 1024"

COLOCATED = "engine: {kind: vllm, gpu_memory_utilization: 0.3}\nbridge: {kind: broadcast}"
AXOLOTLS_COLOCATED = "trl: {use_vllm: true, vllm_mode: colocate}\nvllm: {gpu_memory_utilization: 0.3}"
TRLS_COLOCATED = "use_vllm: true\nvllm_gpu_memory_utilization: 0.3"  # in a process, which is its default
ADAPTER = "adapter: {kind: lora, r: 8}"
AXOLOTLS_ADAPTER, TRLS_ADAPTER = "lora_r: 8\nlora_target_linear: true", "use_peft: true\nlora_r: 8"
TWO = "batch: {prompts_per_step: 4}"


@dataclass(frozen=True)
class Case:
    """What the keys of each add to those above; None where it has none for that."""

    name: str
    ours: str
    axolotl: str | None = None
    trl: str | None = None
    atropos: str | None = None
    devices: int = 1


CASES = [
    Case("all weights", "", "", ""),
    Case(
        "checkpointing",
        "model: {gradient_checkpointing: true}",
        "gradient_checkpointing: true",
        "gradient_checkpointing: true",
    ),
    Case(
        "offloaded activations",
        "model: {activations: offload}",
        "activation_offloading: true\ngradient_checkpointing: true",
    ),
    Case("float32", "model: {dtype: float32}", "float32: true", "dtype: float32"),
    Case("uncompiled", "model: {compile: 'off'}", "torch_compile: false", "torch_compile: false"),
    Case("8-bit moments", "optimizer: {kind: adamw_8bit}", "optimizer: adamw_bnb_8bit", "optim: adamw_bnb_8bit"),
    Case("moments of matrices", "optimizer: {kind: adafactor}", "optimizer: adafactor", "optim: adafactor"),
    Case("reference", "algorithm: {beta: 0.04}", "trl: {beta: 0.04}", "beta: 0.04"),
    Case(
        "averaged reference of an adapter",
        f"algorithm: {{beta: 0.04, kl_reference: ema}}\n{ADAPTER}",
        f"adapter: lora\n{AXOLOTLS_ADAPTER}\ntrl: {{beta: 0.04, sync_ref_model: true}}",
        f"beta: 0.04\nsync_ref_model: true\n{TRLS_ADAPTER}",
    ),
    Case(
        "adapter of two matrices",
        "adapter: {kind: lora, r: 8, targets: [q_proj, v_proj]}",
        "adapter: lora\nlora_r: 8\nlora_target_modules: [q_proj, v_proj]",
        "use_peft: true\nlora_r: 8\nlora_target_modules: [q_proj, v_proj]",
    ),
    Case(
        "adapter of some layers",
        "adapter: {kind: lora, r: 8, layers: [0, 1]}",
        f"adapter: lora\n{AXOLOTLS_ADAPTER}\npeft_layers_to_transform: [0, 1]",
    ),
    Case(
        "base in 4 bits",
        f"model: {{quantization: nf4}}\n{ADAPTER}",
        f"adapter: qlora\nload_in_4bit: true\n{AXOLOTLS_ADAPTER}",
        f"load_in_4bit: true\n{TRLS_ADAPTER}",
    ),
    Case(
        "base in 8 bits",
        f"model: {{quantization: int8}}\n{ADAPTER}",
        f"adapter: lora\nload_in_8bit: true\n{AXOLOTLS_ADAPTER}",
        f"load_in_8bit: true\n{TRLS_ADAPTER}",
    ),
    Case(
        "two steps of a generation",
        f"batch: {{steps_per_generation: 2}}\n{COLOCATED}",
        "trl: {use_vllm: true, vllm_mode: colocate, generation_batch_size: 4}\nvllm: {gpu_memory_utilization: 0.3}",
        f"generation_batch_size: 16\n{TRLS_COLOCATED}",
    ),
    Case("vLLM beside", COLOCATED, AXOLOTLS_COLOCATED, TRLS_COLOCATED),
    Case(
        "vLLM beside, its share not said",
        "engine: {kind: vllm}\nbridge: {kind: broadcast}",
        "trl: {use_vllm: true, vllm_mode: colocate}",
    ),
    Case("vLLM beside, TRL's share", COLOCATED, None, "use_vllm: true"),
    Case(
        "vLLM that sleeps",
        "engine: {kind: vllm, gpu_memory_utilization: 0.3, enable_sleep_mode: true}\nbridge: {kind: broadcast}",
        "trl: {use_vllm: true, vllm_mode: colocate, vllm_enable_sleep_mode: true}\nvllm: {gpu_memory_utilization: 0.3}",
        f"{TRLS_COLOCATED}\nvllm_enable_sleep_mode: true",
    ),
    Case(
        "vLLM on a card of its own",
        "engine: {kind: vllm, gpu_memory_utilization: 0.3, devices: '1'}\nbridge: {kind: broadcast}",
        "trl: {use_vllm: true, vllm_mode: colocate, vllm_device: 'cuda:1'}\nvllm: {gpu_memory_utilization: 0.3}",
        f"{TRLS_COLOCATED}\nvllm_device: cuda:1",
    ),
    Case(
        "server that runs",
        "engine: {kind: http}\nbridge: {kind: broadcast}",
        "trl: {use_vllm: true, vllm_mode: server}",
        "use_vllm: true\nvllm_mode: server",
        "--weight-bridge-mode broadcast",
    ),
    Case(
        "adapter to a server",
        f"{ADAPTER}\nengine: {{kind: http}}\nbridge: {{kind: lora_only}}",
        f"adapter: lora\n{AXOLOTLS_ADAPTER}\ntrl: {{use_vllm: true, vllm_mode: server, vllm_lora_sync: true}}",
        None,
        "--weight-bridge-mode lora_only --lora-r 8",
    ),
    Case("shards", TWO, "fsdp_config: {reshard_after_forward: true}", "fsdp: full_shard", devices=2),
    Case(
        "shards that stay gathered",
        f"{TWO}\ndistributed: {{reshard_after_forward: false}}",
        "fsdp_config: {reshard_after_forward: false}",
        "fsdp: shard_grad_op",
        devices=2,
    ),
    Case(
        "shards on the host",
        f"{TWO}\ndistributed: {{cpu_offload: true}}",
        "fsdp_config: {offload_params: true}",
        "fsdp: full_shard offload",
        devices=2,
    ),
    Case(
        "replicas",
        f"{TWO}\ndistributed: {{strategy: replicate}}",
        "deepspeed: zero0.json",
        "deepspeed: zero0.json",
        devices=2,
    ),
    Case("shared sequences", "distributed: {context_parallel_size: 2}", "context_parallel_size: 2", devices=2),
    Case(
        "vLLM over both cards",
        f"{TWO}\nbridge: {{kind: broadcast}}\n"
        "engine: {kind: vllm, gpu_memory_utilization: 0.3, tensor_parallel_size: 2}",
        "trl: {use_vllm: true, vllm_mode: colocate}\nvllm: {gpu_memory_utilization: 0.3, tensor_parallel_size: 2}",
        f"{TRLS_COLOCATED}\nvllm_tensor_parallel_size: 2",
        devices=2,
    ),
    Case(
        "engine that starts anew",
        "engine: {kind: vllm, gpu_memory_utilization: 0.4}\nbridge: {kind: none}",
        atropos="--gpu-memory-utilization 0.4",
    ),
    Case(
        "engine that starts anew on a card of its own",
        "engine: {kind: vllm, devices: '1'}\nbridge: {kind: none}\nmodel: {dtype: float16}",
        atropos="--vllm-gpu 1 --dtype float16",
    ),
    Case(
        "adapter for an engine that the run starts",
        f"{ADAPTER}\nengine: {{kind: vllm}}\nbridge: {{kind: lora_only}}\noptimizer: {{kind: adamw_cpu}}",
        atropos="--weight-bridge-mode lora_restart --lora-r 8 --optimizer adamw_cpu",
    ),
    Case(
        "one copy of the weights",
        "engine: {kind: http}\nbridge: {kind: shared_vllm}\noptimizer: {kind: adamw_8bit}\nalgorithm: {beta: 0}",
        atropos="--single-copy --optimizer adamw_8bit --kl-coef 0",
    ),
    Case(
        "some layers' weights",
        "model: {train_layers: [20, 21]}\noptimizer: {kind: adafactor}\n"
        "engine: {kind: http}\nbridge: {kind: broadcast}",
        atropos="--weight-bridge-mode broadcast --train-layer-indices 20-21 --optimizer adafactor",
    ),
    Case(
        "adapter of some layers by NCCL",
        "adapter: {kind: lora, r: 8, targets: [q_proj, v_proj], layers: [20, 21]}\nengine: {kind: http}\n"
        "bridge: {kind: lora_nccl}",
        atropos="--weight-bridge-mode lora_nccl --lora-r 8 --lora-target-modules q_proj v_proj "
        "--lora-layer-indices 20-21",
    ),
]


def merged(base: str, more: str) -> dict[str, Any]:
    """Both documents, sections too."""
    data = yaml.safe_load(base)
    for key, value in (yaml.safe_load(more) or {}).items():
        data[key] = {**data[key], **value} if isinstance(data.get(key), dict) else value
    return data


def loaded(data: dict[str, Any], *, devices: int) -> LoadedConfig:
    """As `lachesis plan --devices` loads a file."""
    Path("config.yaml").write_text(json.dumps(data))
    return load_config("config.yaml", processes=devices if devices > 1 else None)


@pytest.mark.parametrize(
    ("case", "trainer"),
    [
        (case, trainer)
        for case in CASES
        for trainer in ("axolotl", "trl", "atropos")
        if getattr(case, trainer) is not None
    ],
    ids=lambda part: part.name if isinstance(part, Case) else part,
)
def test_their_keys_take_the_memory_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, trainer: str):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model", "config.json").write_text(json.dumps(MODEL))
    more = getattr(case, trainer)
    if trainer == "atropos":
        theirs = load_argv(shlex.split(f"{ATROPOS} {more}"))
    else:
        theirs = loaded(merged({"axolotl": AXOLOTL, "trl": TRL}[trainer], more), devices=case.devices)
    base = OURS_WITH_ATROPOS if trainer == "atropos" else OURS
    ours = loaded(merged(base, case.ours), devices=case.devices)
    assert (ours.dialect, theirs.dialect) == ("canonical", trainer)

    def planned(config: LoadedConfig) -> Plan:
        return plan(config.config, device="cuda", devices=case.devices)

    expected, found = planned(ours), planned(theirs)
    assert expected.memory and found.memory == expected.memory
    assert (found.lengths, found.trained, found.mesh) == (expected.lengths, expected.trained, expected.mesh)
    for size in CARDS:
        taken = card_use(theirs.config, found, card_gb=size)
        assert taken == card_use(ours.config, expected, card_gb=size)
    assert [*card_lines(theirs.config, found)] == [*card_lines(ours.config, expected)]
