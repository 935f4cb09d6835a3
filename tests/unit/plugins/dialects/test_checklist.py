"""Every name that the other trainers' documents list is in a table."""

from __future__ import annotations

import pytest

from lachesis.config.keys import all_keys
from lachesis.plugins.dialects import DIALECTS
from lachesis.plugins.dialects.atropos import SERVER, TRAINER
from lachesis.plugins.dialects.axolotl import AXOLOTL
from lachesis.plugins.dialects.distributed import ACCELERATE
from lachesis.plugins.dialects.explain import explain
from lachesis.plugins.dialects.table import UNSET, Dialect

TOP_LEVEL = """
base_model rl chat_template adapter lora_r lora_alpha lora_target_linear vllm.host vllm.port
vllm.gpu_memory_utilization vllm.dtype vllm.max_model_len vllm.tensor_parallel_size datasets.path datasets.name
datasets.type datasets.split skip_prepare_dataset dataset_prepared_path dataset_processes val_set_size sequence_len
micro_batch_size gradient_accumulation_steps max_steps learning_rate optimizer lr_scheduler warmup_steps bf16 fp8
torch_compile load_in_8bit load_in_4bit attn_implementation gradient_checkpointing
gradient_checkpointing_kwargs.use_reentrant special_tokens.pad_token output_dir logging_steps fsdp
fsdp_config.fsdp_transformer_layer_cls_to_wrap deepspeed ddp_find_unused_parameters
"""
TRL_SECTION = """
use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_timeout num_generations generation_batch_size
max_completion_length beta num_iterations epsilon epsilon_high loss_type scale_rewards mask_truncated_completions
reward_funcs reward_weights multi_objective_aggregation rollout_func temperature top_p top_k min_p repetition_penalty
generation_kwargs chat_template_kwargs vllm_guided_decoding_regex use_data_producer async_prefetch prefetch_depth
vllm_sync_interval vllm_lora_sync streaming_partial_batch streaming_min_groups skip_zero_advantage_batches
reward_num_workers vllm_enable_sleep_mode vllm_importance_sampling_correction importance_sampling_level
vllm_importance_sampling_mode vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl
replay_buffer_size replay_recompute_logps reroll_start_fraction reroll_max_groups sync_ref_model
ref_model_mixup_alpha ref_model_sync_steps log_completions num_completions_to_print use_liger_loss
"""
LAUNCHER = """
compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity machine_rank main_training_function
mixed_precision num_machines num_processes rdzv_backend same_network use_cpu
"""
TRAINER_FLAGS = """
model-name weight-bridge-mode single-copy vllm-config-path vllm-port atropos-url training-steps batch-size
gradient-accumulation-steps learning-rate lr seq-len optimizer kl-coef clip-eps lora-r lora-alpha lora-dropout
gpu-memory-utilization vllm-restart-interval save-path use-wandb wandb-project wandb-run-name checkpoint-interval
benchmark device nccl-init-method nccl-world-size nccl-sync-every-step
"""
SERVER_FLAGS = """
model port tensor-parallel-size dtype gpu-memory-utilization max-model-len enable-lora enforce-eager
"""

LISTS = [
    (AXOLOTL, TOP_LEVEL.split()),
    (AXOLOTL, [f"trl.{name}" for name in TRL_SECTION.split()]),
    (ACCELERATE, LAUNCHER.split()),
    (TRAINER, TRAINER_FLAGS.split()),
    (SERVER, SERVER_FLAGS.split()),
]


@pytest.mark.parametrize(("dialect", "names"), LISTS)
def test_every_name_is_known(dialect: Dialect, names: list[str]):
    assert sorted(set(names) - set(dialect.entries)) == []


@pytest.mark.parametrize(("dialect", "names"), LISTS)
def test_every_name_is_explained(dialect: Dialect, names: list[str]):
    for name in names:
        answer = explain(name)
        aliases = [alias for found in answer.explanations for alias in found.aliases]
        assert (dialect.name, f"{dialect.prefix}{name}") in [(alias.dialect, alias.name) for alias in aliases] or any(
            found.path == name for found in answer.explanations
        )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_path_is_a_key_of_ours_and_every_other_name_has_a_sentence(dialect: Dialect):
    paths = {key.path for key in all_keys()}
    for entry in dialect.entries.values():
        assert entry.path in paths or (not entry.path and entry.note), entry.name
        assert entry.treatment in ("sets", "together") or not entry.path, entry.name
        assert entry.default is UNSET or entry.treatment == "sets", entry.name
