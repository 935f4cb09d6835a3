"""Names of Axolotl's schema that set nothing here, and why."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.plugins.dialects.table import Entry, cannot, nothing, refused, together


def axolotl_rest() -> Iterator[Entry]:
    """Yield the remaining entries, by subject."""
    yield from _model()
    yield from _adapter()
    yield from _data()
    yield from _optimizer()
    yield from _other_training()
    yield from _process()
    yield from _rows()


def _model() -> Iterator[Entry]:
    yield from nothing(
        "Lachesis finds model and tokenizer by their files",
        *("model_type", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy", "processor_type", "type_of_model"),
        *("is_falcon_derived_model", "is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model"),
        *("tokenizer_save_jinja_files", "num_labels", "processor_kwargs"),
    )
    yield from refused("write the model to train as base_model", "base_model_config", "cls_model_config")
    yield from refused(
        "Lachesis takes a model as it is; save one that is changed so",
        *("overrides_of_model_config", "overrides_of_model_kwargs", "rope_scaling", "reinit_weights", "gptq"),
        *("model_quantization_config", "model_quantization_config_kwargs", "use_onebitllms", "quantize_moe_experts"),
        *("scaling_softmax", "tokenizer_use_mistral_common", "fix_untrained_tokens", "bnb_config_kwargs", "qat"),
        *("quantization", "llama4_linearized_experts"),
    )
    yield from nothing("of scaling_softmax", "scaling_softmax_factor", "scaling_softmax_bias")
    yield from nothing(
        "the vocabulary stays as it is",
        *("resize_token_embeddings_to_32x", "mean_resizing_embeddings", "shrink_embeddings", "embeddings_skip_upcast"),
    )
    yield from nothing(
        "Lachesis chooses the kernels; they change the speed and not the sums",
        *("flex_attn_compile_kwargs", "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp"),
        *("flash_optimum", "sage_attention", "gemma4_hybrid_attn_impl", "large_head_attention", "flash_attn_d512"),
        *("sdpa_varlen", "fused_attn_kernel", "experts_implementation", "lora_mlp_kernel", "lora_qkv_kernel"),
        *("lora_o_kernel", "lora_embedding_kernel", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks"),
        *("tiled_mlp", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "deepcompile", "use_kernels"),
        *("torch_compile_options", "heads_k_stride", "ring_attn_func", "s2_attention", "liger_rope"),
        *("liger_rms_norm", "liger_rms_norm_gated", "liger_layer_norm", "liger_swiglu", "liger_glu_activation"),
        *("liger_cross_entropy", "liger_fused_linear_cross_entropy", "cut_cross_entropy", "liger_use_token_scaling"),
    )
    yield from nothing(
        "passes are packed by tokens (batch.max_tokens_per_microbatch), without padding",
        *("eval_sample_packing", "pad_to_multiple_of", "sample_packing_group_size", "sample_packing_bin_size"),
        *("sample_packing_sequentially", "sample_packing_mp_start_method", "multipack_real_batches"),
        *("sample_packing_eff_est", "pretrain_multipack_buffer_size", "pretrain_multipack_attn"),
        "max_packed_sequence_len",
    )
    yield from nothing(
        "Lachesis frees memory in its own ways: checkpointed layers, packed passes, model.quantization",
        *("selective_checkpointing", "layer_offloading", "gc_steps", "gc_collect_steps"),
        *("low_cpu_mem_usage", "max_memory", "gpu_memory_limit", "ple_cpu_offload", "lora_on_cpu"),
        *("qlora_sharded_model_loading", "experimental_skip_move_to_device"),
    )
    yield from cannot("norms are in model.dtype", "fp32_norms")
    yield from nothing("of fp32_norms", "fp32_norm_classes")
    yield from nothing(
        "completions end at the tokenizer's and the model's own end tokens, and at sampling.stop_token_ids",
        "eot_tokens",
    )
    yield from nothing("there are no images here", "image_size", "image_resize_algorithm", "freeze_mm_modules")


def _adapter() -> Iterator[Entry]:
    yield from refused(
        "Lachesis trains plain LoRA, from the start and on linear layers only; remove it",
        *("lora_fan_in_fan_out", "lora_rank_pattern", "lora_alpha_pattern", "peft_layers_pattern", "peft"),
        *("peft_layer_replication", "peft_trainable_token_indices", "peft_ensure_weight_tying", "relora"),
        *("jagged_restart_steps", "loraplus_lr_ratio", "lisa_n_layers"),
    )
    yield from refused(
        "Lachesis starts from peft's own initialization; remove it", "peft_init_lora_weights", fine=(True,)
    )
    yield from nothing("adapters are in float32 beside 16-bit weights", "peft_autocast_adapter_dtype")
    yield from nothing("`lachesis export --merge` merges", "merge_lora", "merge_method")
    yield from nothing(
        "of what is not used here",
        *("relora_prune_ratio", "relora_prune_method", "relora_cpu_offload", "jagged_restart_warmup_steps"),
        *("jagged_restart_anneal_steps", "loraplus_lr_embedding", "lisa_step_interval", "lisa_layers_attribute"),
    )


def _data() -> Iterator[Entry]:
    yield from refused(
        "Lachesis trains on a dataset as it is; make one that is so",
        *("dataset_shard_num", "dataset_shard_idx", "pretraining_dataset", "dataset_exact_deduplication"),
        *("min_sample_len", "curriculum_sampling", "use_pose"),
    )
    yield from nothing(
        "problems are read whole, shuffled together, and kept under dataset_prepared_path",
        *("shuffle_before_merging_datasets", "num_dataset_shards_to_save", "streaming", "is_preprocess"),
        *("streaming_multipack_buffer_size", "preprocess_iterable"),
    )
    yield from nothing("Lachesis pushes nothing", "push_dataset_to_hub")
    yield from nothing("held-out prompts are as long as those of training", "eval_sequence_len")
    yield from nothing("of pretraining", "pretraining_sample_concatenation")
    yield from nothing("of use_pose", "pose_split_on_token_ids", "pose_max_context_len", "pose_num_chunks")
    yield from nothing("of the hub: its token is $HF_TOKEN", "hf_use_auth_token")
    yield from nothing("longer prompts are dropped by sequence_len", "max_prompt_len")


def _optimizer() -> Iterator[Entry]:
    yield from refused("write micro_batch_size and gradient_accumulation_steps", "batch_size")
    yield from refused(
        "all weights have one learning rate here, after linear warm-up; remove it",
        *("embedding_lr", "embedding_lr_scale", "lr_groups", "lr_quadratic_warmup", "cosine_constant_lr_ratio"),
    )
    yield from nothing(
        "of schedules and optimizers that Lachesis does not have",
        *("lr_div_factor", "torchdistx_path", "adam_epsilon2", "adam_beta3", "dion_lr", "dion_momentum"),
        *("dion_rank_fraction", "dion_rank_multiple_of", "qgalore_rank", "qgalore_update_proj_gap", "qgalore_scale"),
        *("qgalore_proj_type", "qgalore_proj_quant", "qgalore_proj_bits", "qgalore_proj_group_size"),
        *("qgalore_cos_threshold", "qgalore_gamma_proj", "qgalore_queue_size"),
    )


def _other_training() -> Iterator[Entry]:
    yield from refused("Lachesis trains with GRPO, by its own trainer; remove it", "trainer_cls", "ebft", "use_eaft")
    yield from refused("Lachesis trains language models; name a reward model in trl.reward_funcs", "reward_model")
    yield from refused(
        "Lachesis trains language models; name a reward model in trl.reward_funcs", "process_reward_model"
    )
    yield from nothing(
        "of other methods than GRPO",
        *("center_rewards_coefficient", "dpo_use_weighting", "dpo_label_smoothing", "precompute_ref_log_probs"),
        *("dpo_use_liger_kernel", "dpo_padding_free", "dpo_loss_type", "dpo_loss_weights", "dpo_beta", "rl_beta"),
        *("dpo_use_logits_to_keep", "dpo_generate_during_eval", "dpo_norm_loss", "rpo_alpha", "orpo_alpha"),
        *("simpo_gamma", "cpo_alpha", "kto_desirable_weight", "kto_undesirable_weight", "eaft_alpha", "eaft_k"),
        *("role_boundaries", "total_num_tokens", "total_supervised_tokens"),
    )
    yield from refused("Lachesis puts no noise on embeddings; remove it", "noisy_embedding_alpha")
    yield from refused(
        "Lachesis trains for as long as max_steps or num_epochs say; remove it", "early_stopping_patience"
    )
    # Whether its problems and rewards can be had follows from which plugin it is.
    yield from refused(
        "Lachesis has no plugins of Axolotl's; remove it, or make a rollout_func or an environment of what it does",
        "plugins",
        fine=(*([plugin] for plugin in _KERNEL_PLUGINS), list(_KERNEL_PLUGINS), list(reversed(_KERNEL_PLUGINS))),
    )
    yield from refused(
        "NeMo Gym's servers are no part of Lachesis: ask one from an environment of yours (docs/environments.md)",
        *("nemo_gym_enabled",),
    )
    yield from nothing(
        "of nemo_gym_enabled",
        *(f"nemo_gym_{name}" for name in ("dir", "auto_clone", "auto_start", "config_paths", "head_port", "datasets")),
        *(
            f"nemo_gym_{name}"
            for name in ("server_timeout", "verify_timeout", "multi_turn", "max_turns", "run_timeout")
        ),
    )


# They bring kernels and nothing else.
_KERNEL_PLUGINS = (
    "axolotl.integrations.liger.LigerPlugin",
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
)


def _process() -> Iterator[Entry]:
    yield from nothing("Lachesis checks every key and says what it does", "strict")
    yield from nothing(
        "the launcher says which devices train, and CUDA_VISIBLE_DEVICES",
        *("device", "device_map", "world_size", "ddp"),
    )
    yield from nothing(
        "evaluation generates completions of held-out problems and scores them; logging.completions shows some",
        *("do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset", "bench_split"),
        *("eval_table_size", "eval_max_new_tokens", "generate_samples", "num_generation_samples"),
        *("generation_max_new_tokens", "generation_temperature", "generation_top_p", "generation_top_k"),
        *("generation_prompt_ratio", "generation_do_sample"),
    )
    yield from nothing("health findings say when a run goes wrong", "loss_watchdog_threshold", "loss_watchdog_patience")
    yield from nothing(
        "checkpoints are each checkpoint.every_steps, and on a stop", "save_first_step", "dynamic_checkpoint"
    )
    yield from nothing(
        "the times of each part of a step, and tokens a second, are always measured",
        *("profiler_steps", "profiler_steps_start", "include_tokens_per_second", "include_tkps"),
    )
    yield from nothing(
        "Lachesis reports to tensorboard, wandb, trackio and mlflow",
        *("use_comet", "comet_api_key", "comet_workspace", "comet_project_name", "comet_experiment_key", "comet_mode"),
        *("comet_online", "comet_experiment_config", "use_otel_metrics", "otel_metrics_host", "otel_metrics_port"),
    )
    yield from nothing("what a run writes stays in its directory", "hf_mlflow_log_artifacts")
    yield from nothing(
        "of Axolotl's other commands",
        *("gradio_title", "gradio_share", "gradio_server_name", "gradio_server_port", "gradio_max_new_tokens"),
        *("gradio_temperature", "axolotl_config_path"),
    )
    yield from nothing(
        "processes are started by torchrun", "use_ray", "ray_run_name", "ray_num_workers", "resources_per_worker"
    )
    yield together("evaluation_strategy", "evaluation.every_epochs", "as eval_strategy")


def _rows() -> Iterator[Entry]:
    """Keys of a dataset."""
    for section in ("datasets.", "test_datasets."):
        yield from refused(
            "Lachesis takes whole splits, or the beginning of one; write its size into split, as train[:1000]",
            *(f"{section}{name}" for name in ("shards", "shards_idx", "preprocess_shards")),
        )
        yield from refused("save the dataset as it is at that revision", f"{section}revision")
        yield from refused(
            "messages have role and content; give the dataset a transform (type)",
            f"{section}message_field_role",
            fine=("role",),
        )
        yield from refused(
            "messages have role and content; give the dataset a transform (type)",
            f"{section}message_field_content",
            fine=("content",),
        )
        yield from refused(
            "give the dataset a transform (type) that makes a prompt of its columns",
            *(f"{section}{name}" for name in ("input_transform", "input_format", "field", "message_property_mappings")),
            *(f"{section}{name}" for name in ("field_human", "field_model", "field_chosen", "field_rejected", "roles")),
            *(f"{section}{name}" for name in ("chat_template_jinja", "drop_system_message")),
        )
        yield from refused(
            "one chat template serves all datasets; write it at the top",
            f"{section}chat_template",
            fine=("tokenizer_default",),
        )
        yield from nothing(
            "of supervised training: a prompt is not trained on",
            *(f"{section}{name}" for name in ("conversation", "roles_to_train", "train_on_eos", "train_on_eot")),
            *(f"{section}{name}" for name in ("message_field_training", "message_field_training_detail")),
            *(f"{section}{name}" for name in ("field_tools", "field_thinking", "template_thinking_key")),
            *(f"{section}{name}" for name in ("split_thinking", "logprobs_field", "temperature")),
        )
