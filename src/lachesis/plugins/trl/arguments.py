"""``GRPOConfig`` and ``RLOOConfig``: transformers' arguments with TRL's own, and a record of those that are set."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, cast

import torch
from transformers import TrainingArguments

# Arguments that the trainer handles itself, or that mean nothing in one process; others are translated as in a file.
_OURS = frozenset(
    {"load_best_model_at_end", "metric_for_best_model", "greater_is_better", "resume_from_checkpoint", "do_predict"}
)


@dataclass
class GRPOConfig(TrainingArguments):
    """Arguments of :class:`~lachesis.trl.GRPOTrainer`, with the names and defaults of TRL 1.16.

    ``lachesis explain NAME`` gives the meaning of each here. A name that cannot be honoured gives an error or a warning
    when the trainer is built, as in a file.
    """

    learning_rate: float = 1e-6
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  # TRL: on unless fp16 is
    remove_unused_columns: bool | None = False
    model_init_kwargs: dict[str, Any] | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False
    num_generations: int = 8
    num_generations_eval: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool = True
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    repetition_penalty: float = 1.0
    pad_to_multiple_of: int | str | None = "auto"
    use_transformers_paged: bool = False
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: Any = None
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions: bool = False
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_multimodal: bool = True
    log_completions_hub_repo: str | None = None
    # Arguments of earlier versions of TRL and transformers that scripts still set.
    warmup_ratio: float | None = None
    overwrite_output_dir: bool | None = None
    save_safetensors: bool | None = None
    logging_dir: str | None = None
    vllm_device: str | None = None
    vllm_dtype: str | None = None
    _written: dict[str, Any] = field(default_factory=dict[str, Any], init=False, repr=False)
    _settled: dict[str, Any] = field(default_factory=dict[str, Any], init=False, repr=False)

    def __post_init__(self) -> None:
        self._written = {name: value for name, default, value in self._named() if value != default}
        if self.bf16 is None:
            self.bf16 = False  # transformers does not train here; the dtype follows these switches as in a TRL file
        super().__post_init__()
        self._settled = {name: value for name, _, value in self._named()}

    def _named(self) -> list[tuple[str, Any, Any]]:
        """Yield name, default and value of each argument."""
        return [
            (one.name, one.default, getattr(self, one.name)) for one in fields(self) if not one.name.startswith("_")
        ]

    def to_mapping(self) -> dict[str, Any]:
        """Return the values that the script has set, in the constructor or later, as TRL's file would write them."""
        changed = {name: value for name, _, value in self._named() if value is not self._settled[name]}
        said = {name: _plain(value) for name, value in (self._written | changed).items() if name not in _OURS}
        if not self.fp16 and "bf16" not in said:
            said["bf16"] = True
        said.setdefault("max_completion_length", self.max_completion_length)
        said.setdefault("logging_steps", self.logging_steps)
        said.setdefault("output_dir", self.output_dir)
        return said


@dataclass
class RLOOConfig(GRPOConfig):
    """Arguments of :class:`~lachesis.trl.RLOOTrainer`, with the names and defaults of TRL 1.16.

    A name that only GRPO has in TRL gives an error when the trainer is built.
    """

    num_generations: int = 2
    beta: float = 0.05
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return the values that the script has set, and a mark that they are for RLOO."""
        return {"trl_trainer": "rloo", **super().to_mapping()}


def _plain(value: Any) -> Any:
    """Return a value as a file would have it: a dtype by its name, an enumeration's member by its value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return list(cast(tuple[Any, ...], value))
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in cast(dict[str, Any], value).items()}
    return value.value if isinstance(value, Enum) else value
