"""verl's keys (`ppo_trainer.yaml`, 0.5 to 0.8): translated exactly, refused by name, or without influence on training.

Defaults of verl's that differ from ours are written out: https://github.com/volcengine/verl, verl/trainer/config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_list
from lachesis.config.document import describe
from lachesis.plugins.dialects.convert import module_names, nonzero, number, one_of, top_k
from lachesis.plugins.dialects.table import UNSET, Dialect, Entry, Translation, cannot, refused, together

_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."
_POLICY_LOSS = f"{_ACTOR}policy_loss."
AGGREGATIONS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
_NORMALIZATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant_length",
}
GENERATED, STEP = "data.train_batch_size", f"{_ACTOR}ppo_mini_batch_size"

# Sections that place processes, save memory, log or profile.
_PLACEMENT = (
    f"{_ACTOR}fsdp_config", f"{_ACTOR}megatron", f"{_ACTOR}checkpoint", f"{_ACTOR}profiler", f"{_ACTOR}veomni",
    "actor_rollout_ref.ref", "actor_rollout_ref.profiler", f"{_MODEL}fused_kernel_options", f"{_MODEL}tiled_mlp",
    f"{_ROLLOUT}engine_kwargs", f"{_ROLLOUT}profiler", f"{_ROLLOUT}trace", f"{_ROLLOUT}checkpoint_engine",
    f"{_ROLLOUT}prometheus", f"{_ROLLOUT}disaggregation", f"{_ROLLOUT}val_kwargs", f"{_ROLLOUT}agent", "critic",
    "reward_model.model", "reward_model.rollout", "reward_model.sandbox_fusion", "reward.reward_model",
    "reward.sandbox_fusion", "sandbox_fusion", "algorithm.pf_ppo",
    "ray_init", "ray_kwargs", "global_profiler", "transfer_queue", "hydra", "trainer", "resource_pool",
)  # fmt: skip
_NO_INFLUENCE = {
    _ACTOR: (
        "strategy", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "use_torch_compile",
        "ppo_max_token_len_per_gpu", "ulysses_sequence_parallel_size", "entropy_from_logits_with_chunking",
        "entropy_from_logits_chunk_size", "entropy_checkpointing", "calculate_entropy", "use_remove_padding",
        "use_fused_kernels", "use_prefix_grouper", "calculate_sum_pi_squared", "pad_to_length", "rollout_n",
        "data_loader_seed", "recompute_old_log_prob", "load_weight", "shuffle",
        "optim.total_training_steps", "optim.zero_indexed_step", "optim.optimizer_impl",
    ),
    _MODEL: (
        "use_shm", "enable_activation_offload", "use_remove_padding", "use_liger", "use_fused_kernels",
        "tokenizer_path", "hf_config_path",
    ),
    _ROLLOUT: (
        "mode", "dtype", "nnodes", "n_gpus_per_node", "seed", "full_determinism", "prompt_length", "response_length",
        "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine", "data_parallel_size", "expert_parallel_size",
        "pipeline_model_parallel_size", "max_num_batched_tokens", "max_model_len", "max_num_seqs",
        "enable_chunked_prefill", "enable_prefix_caching", "logprobs_mode", "scheduling_policy", "load_format",
        "layered_summon", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz",
        "log_prob_max_token_len_per_gpu", "disable_log_stats", "multi_stage_wake_up", "calculate_log_probs",
        "skip_tokenizer_init", "update_weights_bucket_megabytes", "over_sample_rate", "disable_custom_all_reduce",
        "use_fire_sampling", "router_config_path",
    ),
    "data.": (
        "val_batch_size", "gen_batch_size", "return_raw_input_ids", "return_raw_chat", "return_full_prompt",
        "dataloader_num_workers", "validation_shuffle", "filter_overlong_prompts_workers", "reward_fn_key", "use_shm",
        "trust_remote_code", "image_patch_size", "tokenizer", "return_multi_modal_inputs", "val_max_samples",
        "image_key", "video_key", "audio_key", "seed", "mm_processor_kwargs",
    ),
    "algorithm.": (
        "gamma", "lam", "filter_groups.metric", "filter_groups.max_inflight_gen_batches",
        "rollout_correction.rollout_is_threshold", "rollout_correction.rollout_rs_threshold", 
        "rollout_is_threshold",
    ),
    "actor_rollout_ref.": ("hybrid_engine", "nccl_timeout"),
}  # fmt: skip
_BESIDE = "read with the key that turns it on"
_REWARDS = "its rewards have another signature: write rewards.functions"


def _entries() -> Iterator[Entry]:
    yield from _model_and_data()
    yield from _sampling()
    yield from _loss()
    yield from _optimizer()
    yield from _run()
    for section, names in _NO_INFLUENCE.items():
        for name in names:
            yield Entry(f"{section}{name}", treatment="together", note="no influence on training")


def _model_and_data() -> Iterator[Entry]:
    yield Entry(f"{_MODEL}path", "model.path")
    yield Entry(f"{_MODEL}trust_remote_code", "model.trust_remote_code")
    yield Entry(f"{_MODEL}enable_gradient_checkpointing", "model.gradient_checkpointing", default=True)
    yield together(f"{_MODEL}lora_rank", "adapter.r", "0 turns it off")
    yield together(f"{_MODEL}lora_alpha", "adapter.alpha")
    yield together(f"{_MODEL}target_modules", "adapter.targets")
    yield from refused(
        "has no counterpart; take it out of the file", f"{_MODEL}custom_chat_template", f"{_MODEL}external_lib",
        f"{_MODEL}override_config", f"{_MODEL}exclude_modules", f"{_MODEL}mtp.enable", f"{_MODEL}mtp.enable_train",
    )  # fmt: skip
    yield from refused("start from an adapter with model.path: its directory", f"{_MODEL}lora_adapter_path")
    yield from refused("write it as lora_rank, as for FSDP", f"{_MODEL}lora.rank")
    for name in ("alpha", "dropout", "type", "merge", "target_modules", "dtype"):
        yield Entry(f"{_MODEL}lora.{name}", treatment="together", note=_BESIDE)
    yield together("data.train_files", "data.path")
    yield together("data.val_files", "data.eval_path")
    yield Entry("data.prompt_key", "data.prompt_column")
    yield Entry("data.shuffle", "data.shuffle")
    yield Entry("data.max_prompt_length", "data.max_prompt_length", default=512)
    yield Entry("data.filter_overlong_prompts", "data.overlong_prompts", convert=_dropped)
    yield together("data.truncation", "data.overlong_prompts")
    yield from refused("write data.more, or split: train[:N] in data", "data.train_max_samples", fine=(-1,))
    yield Entry("data.apply_chat_template_kwargs", "data.chat_template_kwargs", convert=lambda value: value or UNSET)
    yield from refused(
        "has no counterpart; write the dataset as a file", "data.custom_cls.path", "data.sampler.class_path",
        "data.datagen.path", "data.tool_config_path", "data.function_tool_path",
    )  # fmt: skip
    for name in ("custom_cls.name", "sampler.class_name", "datagen.name"):
        yield Entry(f"data.{name}", treatment="together", note=_BESIDE)


def _sampling() -> Iterator[Entry]:
    yield Entry("data.max_response_length", "sampling.max_completion_length", default=512)
    yield together(GENERATED, "batch.steps_per_generation", "prompts that are generated at once")
    yield together(STEP, "batch.prompts_per_step", "prompts of an optimizer step")
    yield Entry(f"{_ROLLOUT}n", "sampling.num_generations", default=1)
    yield Entry(f"{_ROLLOUT}temperature", "sampling.temperature", default=1.0)
    yield Entry(f"{_ROLLOUT}top_p", "sampling.top_p", default=1.0)
    yield Entry(f"{_ROLLOUT}top_k", "sampling.top_k", convert=top_k)
    yield together(f"{_ROLLOUT}name", "engine.kind")
    yield together(f"{_ROLLOUT}gpu_memory_utilization", "engine.gpu_memory_utilization")
    yield together(f"{_ROLLOUT}tensor_model_parallel_size", "engine.tensor_parallel_size")
    yield from refused("completions end at the model's end of text here", f"{_ROLLOUT}ignore_eos")
    yield Entry(f"{_ROLLOUT}do_sample", convert=_sampled, note="completions are always sampled")
    yield from refused("write the tools as `tools`", f"{_ROLLOUT}multi_turn.enable")
    for name in (
        "max_assistant_turns", "max_user_turns", "tool_config_path", "function_tool_path", "max_parallel_calls",
        "max_tool_response_length", "tool_response_truncate_side", "use_inference_chat_template", "format",
        "tokenization_sanity_check_mode", "num_repeat_rollouts", "interaction_config_path", "completion_callback",
    ):  # fmt: skip
        yield Entry(f"{_ROLLOUT}multi_turn.{name}", treatment="together", note=_BESIDE)
    yield Entry(f"{_ROLLOUT}enable_rollout_routing_replay", "algorithm.router_replay")
    yield from refused("its bytes differ from the trained ones: remove it", f"{_ROLLOUT}quantization",
                       f"{_ROLLOUT}quantization_config_file")  # fmt: skip


def _loss() -> Iterator[Entry]:
    yield together("algorithm.adv_estimator", "algorithm.scale_rewards")
    yield together("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale_rewards")
    yield together(f"{_POLICY_LOSS}loss_mode", "algorithm.loss_type")
    yield together(f"{_ACTOR}loss_agg_mode", "algorithm.loss_type")
    yield from refused("its sum over a fixed length has no counterpart", f"{_ACTOR}loss_scale_factor")
    for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"):
        yield Entry(f"{_POLICY_LOSS}{name}", treatment="together", note=_BESIDE)
    yield together(f"{_ACTOR}tau_pos", "algorithm.sapo_temperature_pos", "with loss_mode sapo")
    yield together(f"{_ACTOR}tau_neg", "algorithm.sapo_temperature_neg", "with loss_mode sapo")
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        yield together(f"{_ACTOR}{name}", "algorithm.epsilon")
    yield Entry(f"{_ACTOR}ppo_epochs", "algorithm.num_iterations")
    yield Entry(f"{_ACTOR}entropy_coeff", "algorithm.entropy_coef")
    for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"):
        yield together(f"{_ACTOR}{name}", "algorithm.beta")
    yield together("algorithm.use_kl_in_reward", "algorithm.kl_placement")
    yield together("algorithm.kl_penalty", "algorithm.kl_estimator")
    for name, path in (
        ("type", "kl_target"),
        ("kl_coef", "beta"),
        ("target_kl", "kl_target"),
        ("horizon", "kl_horizon"),
    ):
        yield together(f"algorithm.kl_ctrl.{name}", f"algorithm.{path}", _BESIDE)
    yield from refused("has no counterpart; take it out of the file", "algorithm.use_pf_ppo", "distillation.enabled")
    yield together("algorithm.filter_groups.enable", "pipeline.refill_zero_signal")
    yield together("algorithm.filter_groups.max_num_gen_batches", "pipeline.refill_zero_signal")
    yield from refused(
        "write algorithm.sampler_correction and its bounds, and take this out",
        "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs", "algorithm.rollout_is",
        "algorithm.rollout_rs", "algorithm.rollout_correction.bypass_mode",
    )  # fmt: skip
    yield from refused("write algorithm.sampler_correction: token_truncate, and take this out",
                       f"{_ACTOR}tis_imp_ratio_cap", fine=(-1, -1.0))  # fmt: skip
    yield from refused("quantized training has another form: model.quantization", f"{_ACTOR}qat.enable")


def _optimizer() -> Iterator[Entry]:
    optim = f"{_ACTOR}optim."
    yield Entry(f"{optim}lr", "optimizer.learning_rate", default=1e-6)
    yield Entry(f"{optim}weight_decay", "optimizer.weight_decay", default=0.01)
    yield Entry(f"{optim}betas", "optimizer.betas")
    yield Entry(f"{optim}lr_warmup_steps", "optimizer.warmup_steps", convert=_warmup)
    yield Entry(f"{optim}lr_warmup_steps_ratio", "optimizer.warmup_ratio")
    for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style"):
        yield Entry(
            f"{optim}{name}", "optimizer.schedule", convert=one_of({"constant": "constant", "cosine": "cosine"})
        )
    yield Entry(f"{optim}min_lr_ratio", "optimizer.min_lr_ratio")
    yield from refused("Lachesis' cosine falls once: write 0.5", f"{optim}num_cycles", fine=(0.5,))
    yield from refused("both have AdamW", f"{optim}optimizer", fine=("AdamW", "adam", "adamw"))
    yield from refused("write the options as optimizer keys", f"{optim}override_optimizer_config")
    for name in ("grad_clip", "optim.clip_grad"):  # of FSDP, and of Megatron
        yield Entry(f"{_ACTOR}{name}", "optimizer.max_grad_norm", convert=nonzero)


def _run() -> Iterator[Entry]:
    yield Entry("trainer.total_epochs", "run.epochs", convert=number, default=30.0)
    yield Entry("trainer.total_training_steps", "run.steps")
    yield Entry("trainer.save_freq", "checkpoint.every_steps", convert=_frequency)
    yield Entry("trainer.test_freq", "evaluation.every_steps", convert=_frequency)
    yield Entry("trainer.experiment_name", "run.name")
    yield from cannot(_REWARDS, "custom_reward_function.path", "reward.custom_reward_function.path")
    for section in ("custom_reward_function.", "reward.custom_reward_function."):
        yield Entry(f"{section}name", treatment="together", note=_BESIDE)
    yield Entry("trainer.project_name", treatment="together", note="no influence on training")
    for section in ("reward_model.", "reward."):
        yield from refused("write a reward function that asks the model, or rewards.models", f"{section}enable")
        for name in ("reward_manager", "num_workers", "launch_reward_fn_async", "use_reward_loop", "strategy",
                     "micro_batch_size_per_gpu", "enable_resource_pool", "n_gpus_per_node", "nnodes"):  # fmt: skip
            yield Entry(f"{section}{name}", treatment="together", note=_BESIDE)
        for start in ("overlong_buffer.", "reward_kwargs.overlong_buffer_cfg."):
            yield from refused("write soft_overlong_punishment in rewards.functions, and take this out",
                               f"{section}{start}enable")  # fmt: skip
            for name in ("len", "penalty_factor", "log"):
                yield Entry(f"{section}{start}{name}", treatment="together", note=_BESIDE)
        yield Entry(f"{section}reward_kwargs.max_resp_len", treatment="together", note=_BESIDE)


def _dropped(value: Any) -> Any:
    return "drop" if value else "error"


def _sampled(value: Any) -> Any:
    if value is False:
        raise ConfigError("completions of a group would be alike: write True")
    return UNSET


def _warmup(value: Any) -> Any:
    return UNSET if isinstance(value, int) and value < 0 else value


def _frequency(value: Any) -> Any:
    return max(0, value) if isinstance(value, int) else value


VERL = Dialect("verl", list(_entries()), open_sections=_PLACEMENT)


def finish(translation: Translation) -> None:
    """Translate what takes several of verl's keys together."""
    _put_files(translation)
    _check_truncation(translation)
    _put_loss(translation)
    _put_kl(translation)
    _put_adapter(translation)
    _put_engine(translation)
    if translation.value("algorithm.filter_groups.enable") is True:
        # 0 there is as many batches as it takes.
        rounds = translation.value("algorithm.filter_groups.max_num_gen_batches", 0)
        translation.put("pipeline.refill_zero_signal", rounds or 100, "algorithm.filter_groups.enable")


def _put_files(translation: Translation) -> None:
    files = _listed(translation, "data.train_files")
    for index, path in enumerate(files):
        if index == 0:
            translation.put("data.path", path, "data.train_files")
    if len(files) > 1:
        translation.put("data.more", [{"path": path} for path in files[1:]], "data.train_files")
    held_out = _listed(translation, "data.val_files")
    if held_out:
        translation.put("data.eval_path", held_out[0], "data.val_files")
    if len(held_out) > 1:
        translation.warning("data.val_files", f"Lachesis evaluates on one file: {held_out[0]} is taken")


def _listed(translation: Translation, name: str) -> list[str]:
    value = translation.value(name)
    if value is None:
        return []
    found = [value] if isinstance(value, str) else value
    if not is_list(found) or not all(isinstance(one, str) for one in found):
        translation.problem(name, f"expected a path or a list of paths, got {describe(value)}")
        return []
    return [str(one) for one in found]


def _check_truncation(translation: Translation) -> None:
    """Refuse a file that has verl cut prompts. Where prompts that are too long are left out there are none to cut."""
    name = "data.truncation"
    if translation.text(name, "error") != "error" and translation.value("data.filter_overlong_prompts") is not True:
        translation.problem(
            name, "Lachesis never cuts prompts: write error, or filter_overlong_prompts=True to leave long ones out"
        )


def _put_loss(translation: Translation) -> None:
    _put_advantages(translation)
    mode, name = translation.text(f"{_POLICY_LOSS}loss_mode", "vanilla").replace("-", "_"), f"{_POLICY_LOSS}loss_mode"
    low, high = _clip(translation, "low"), _clip(translation, "high")
    bound = translation.value(f"{_ACTOR}clip_ratio_c", 3.0)
    if mode in ("vanilla", "gspo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl"):
        translation.put("algorithm.epsilon", low, f"{_ACTOR}clip_ratio_low")
        translation.put("algorithm.epsilon_high", high, f"{_ACTOR}clip_ratio_high")
    if mode in ("vanilla", "dppo_tv", "dppo_kl"):
        translation.put("algorithm.delta", bound, f"{_ACTOR}clip_ratio_c")
    if mode == "gspo":
        translation.put("algorithm.importance_sampling_level", "sequence", name)
    if mode in _OF_SEQUENCES:
        translation.put("algorithm.loss_type", _OF_SEQUENCES[mode], name)
        translation.value(f"{_ACTOR}loss_agg_mode")  # these are means over sequences there, whatever it says
    elif mode == "vanilla":
        _put_normalization(translation)
    elif mode in _OF_TOKENS:
        translation.put("algorithm.loss_type", _OF_TOKENS[mode], name)
        _put_normalization(translation, key="algorithm.normalization")
    else:
        known = ", ".join(("vanilla", *_OF_SEQUENCES, *_OF_TOKENS))
        translation.problem(name, f"{mode} has no counterpart; Lachesis has {known}")
    if mode == "cispo":
        _put_cispo(translation, low=low, high=high)
    for key, (ours, default) in _OPTIONS.get(mode, {}).items():
        translation.put(ours, translation.value(key, default), key)
    if mode in ("clip_cov", "kl_cov"):
        translation.warning(name, "verl chooses tokens within each micro-batch, Lachesis of the whole step")


_ESTIMATORS: Mapping[str, tuple[str, str]] = {
    "grpo": ("group_mean", "group"), "grpo_vectorized": ("group_mean", "group"), "rloo": ("leave_one_out", "none"),
    "rloo_vectorized": ("leave_one_out", "none"), "opo": ("length_weighted", "none"), "maxrl": ("group_mean", "mean"),
    "reinforce_plus_plus": ("none", "tokens"), "reinforce_plus_plus_baseline": ("group_mean", "tokens"),
}  # fmt: skip
_NO_ESTIMATOR = {
    "gae": "trains a critic, which Lachesis does not have",
    "gpg": "scales by how many rewards are not 0, which is not the paper's; algorithm.preset: gpg is",
}
_OF_SEQUENCES = {"gspo": "grpo", "sapo": "sapo", "geo_mean": "gmpo"}
_OF_TOKENS = {mode: mode for mode in ("cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")} | {"gpg": "reinforce"}
_OPTIONS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "sapo": {
        f"{_ACTOR}tau_pos": ("algorithm.sapo_temperature_pos", 1.0),
        f"{_ACTOR}tau_neg": ("algorithm.sapo_temperature_neg", 1.05),
    },
    "clip_cov": {
        f"{_POLICY_LOSS}clip_cov_ratio": ("algorithm.cov_share", 2e-4),
        f"{_POLICY_LOSS}clip_cov_lb": ("algorithm.cov_low", 1.0),
        f"{_POLICY_LOSS}clip_cov_ub": ("algorithm.cov_high", 5.0),
    },
    "kl_cov": {
        f"{_POLICY_LOSS}kl_cov_ratio": ("algorithm.cov_share", 2e-4),
        f"{_POLICY_LOSS}ppo_kl_coef": ("algorithm.cov_kl_coef", 0.1),
    },
}


def _put_advantages(translation: Translation) -> None:
    name = "algorithm.adv_estimator"
    estimator = translation.text(name, "gae")
    if estimator not in _ESTIMATORS:
        reason = _NO_ESTIMATOR.get(estimator, "has no counterpart")
        translation.problem(name, f"{estimator} {reason}; write one of {', '.join(_ESTIMATORS)}")
        return
    baseline, scale = _ESTIMATORS[estimator]
    if translation.switch("algorithm.norm_adv_by_std_in_grpo") is False and scale == "group":
        scale = "none"
    translation.put("algorithm.baseline", baseline, name)
    translation.put("algorithm.scale_rewards", scale, "algorithm.norm_adv_by_std_in_grpo")


def _put_normalization(translation: Translation, *, key: str = "algorithm.loss_type") -> None:
    """Set the loss type that has verl's aggregation, or the key for the aggregation alone."""
    name = f"{_ACTOR}loss_agg_mode"
    aggregation = translation.text(name, "token-mean")
    if aggregation not in _NORMALIZATIONS:
        translation.problem(name, f"{aggregation} has no counterpart; Lachesis has {', '.join(_NORMALIZATIONS)}")
    elif key == "algorithm.loss_type" and aggregation in AGGREGATIONS:
        translation.put(key, AGGREGATIONS[aggregation], name)
    else:
        translation.put("algorithm.normalization", _NORMALIZATIONS[aggregation], name)


def _clip(translation: Translation, side: str) -> Any:
    return translation.value(f"{_ACTOR}clip_ratio_{side}", translation.value(f"{_ACTOR}clip_ratio", 0.2))


def _put_cispo(translation: Translation, *, low: Any, high: Any) -> None:
    """Set CISPO's bound: verl clips the ratio to 1 - low and 1 + high; ours has only the upper bound, as is."""
    if not all(isinstance(value, int | float) for value in (low, high)):
        translation.problem(f"{_ACTOR}clip_ratio_high", f"expected numbers, got {describe(low)} and {describe(high)}")
        return
    if low < 1:
        translation.problem(
            f"{_ACTOR}clip_ratio_low", f"{low} bounds the ratio from below, which CISPO here does not; write 1 or more"
        )
    translation.put("algorithm.epsilon_high", 1 + high, f"{_ACTOR}clip_ratio_high")


_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _put_kl(translation: Translation) -> None:
    """Translate the KL term of the loss, or that of the reward; verl can have both."""
    in_reward = translation.switch("algorithm.use_kl_in_reward") is True
    if translation.switch(f"{_ACTOR}use_kl_loss") is True:
        if in_reward:
            translation.problem("algorithm.use_kl_in_reward", "Lachesis has one KL term, and use_kl_loss is True too")
        _put_kl_term(translation, f"{_ACTOR}kl_loss_type", "low_var_kl", weight=f"{_ACTOR}kl_loss_coef")
        # verl weights it by nothing.
        translation.put("algorithm.use_bias_correction_kl", False, f"{_ACTOR}kl_loss_type")
    elif in_reward:
        by_token = translation.text("algorithm.adv_estimator", "gae") == "reinforce_plus_plus"
        place = "reward_to_go" if by_token else "reward"
        translation.put("algorithm.kl_placement", place, "algorithm.use_kl_in_reward")
        _put_kl_term(translation, "algorithm.kl_penalty", "kl", weight="algorithm.kl_ctrl.kl_coef")
        if translation.text("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            for name, ours, default in (("target_kl", "kl_target", 0.1), ("horizon", "kl_horizon", 10_000)):
                name = f"algorithm.kl_ctrl.{name}"
                translation.put(f"algorithm.{ours}", translation.value(name, default), name)


def _put_kl_term(translation: Translation, name: str, default: str, *, weight: str) -> None:
    kind = translation.text(name, default)
    if kind not in _KL_ESTIMATORS:
        translation.problem(name, f"{kind} has no counterpart; Lachesis has {', '.join(_KL_ESTIMATORS)}")
        return
    translation.put("algorithm.kl_estimator", _KL_ESTIMATORS[kind], name)
    translation.put("algorithm.beta", translation.value(weight, 0.001), weight)


def _put_adapter(translation: Translation) -> None:
    rank = translation.value(f"{_MODEL}lora_rank", 0)
    alpha = translation.value(f"{_MODEL}lora_alpha", 16)
    targets = translation.value(f"{_MODEL}target_modules", "all-linear")
    if rank:
        translation.put("adapter.kind", "lora", f"{_MODEL}lora_rank")
        translation.put("adapter.r", rank, f"{_MODEL}lora_rank")
        translation.put("adapter.alpha", alpha, f"{_MODEL}lora_alpha")
        translation.put("adapter.targets", module_names(targets), f"{_MODEL}target_modules")


def _put_engine(translation: Translation) -> None:
    name = translation.value(f"{_ROLLOUT}name")
    share = translation.value(f"{_ROLLOUT}gpu_memory_utilization")
    parallel = translation.value(f"{_ROLLOUT}tensor_model_parallel_size")
    if name == "vllm":
        translation.put("engine.kind", "vllm", f"{_ROLLOUT}name")
        translation.put("bridge.kind", "broadcast", f"{_ROLLOUT}name")
        if share is not None:
            translation.put("engine.gpu_memory_utilization", share, f"{_ROLLOUT}gpu_memory_utilization")
        if parallel is not None:
            translation.put("engine.tensor_parallel_size", parallel, f"{_ROLLOUT}tensor_model_parallel_size")
