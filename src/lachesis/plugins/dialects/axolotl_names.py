"""Axolotl's names."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.plugins.dialects.convert import (
    OPTIMIZERS,
    SCHEDULES,
    checkpointing,
    held_out,
    one_of,
)
from lachesis.plugins.dialects.distributed import CONTEXTS, TENSOR, fsdp_option_entries, scaling_entries
from lachesis.plugins.dialects.grpo import grpo_entries, transformers_entries
from lachesis.plugins.dialects.table import Dialect, Entry, cannot, nothing, read_names, refused, together


def _model() -> Iterator[Entry]:
    yield Entry("base_model", "model.path")
    yield Entry("tokenizer_config", "model.tokenizer")
    yield together("rl", "", "grpo, or gdpo, which normalizes each reward first (algorithm.aggregation)")
    yield together(
        "chat_template",
        "model.chat_template",
        "jinja is chat_template_jinja; others are the tokenizer's own if the model is of that family",
    )
    yield together("chat_template_jinja", "model.chat_template")
    yield Entry("default_system_message", "data.system_prompt")
    yield Entry("special_tokens.pad_token", "model.pad_token")
    for name in ("bos_token", "eos_token", "unk_token"):
        yield together(f"special_tokens.{name}", "model.special_tokens", "a token of the vocabulary")
    yield from refused(
        "Lachesis adds no tokens to a model; save a tokenizer and a model that have them",
        *("special_tokens.additional_special_tokens", "tokens", "added_tokens_overrides"),
    )
    yield Entry("revision_of_model", "model.revision")
    yield Entry("chat_template_kwargs", "data.chat_template_kwargs")
    yield from read_names("axolotl", "rest")
    yield together("adapter", "adapter.kind", "qlora is lora on model.quantization nf4")
    yield together("lora_r", "adapter.r")
    yield together("lora_alpha", "adapter.alpha")
    yield together("lora_dropout", "adapter.dropout")
    yield together("lora_target_linear", "adapter.targets", "true is all-linear")
    yield together("lora_target_modules", "adapter.targets")
    yield together("peft_layers_to_transform", "adapter.layers")
    yield together("lora_model_dir", "adapter.path")
    yield from refused(
        "Lachesis trains plain LoRA, from the start and on linear layers only; remove it",
        *("lora_modules_to_save", "lora_target_parameters", "peft_use_dora", "peft_use_rslora"),
        *("loftq_config", "unfrozen_parameters"),
    )
    for name in ("bf16", "bfloat16", "fp16", "float16", "float32"):
        yield together(name, "model.dtype", "weights of that dtype, with fp32 masters (optimizer.weight_update)")
    yield from nothing("matrix products are as precise as torch's default", "tf32")
    yield from _float8()
    yield Entry("gradient_checkpointing", "model.gradient_checkpointing", convert=checkpointing)
    yield together("activation_offloading", "model.activations", "true and legacy are offload, over recomputing")
    yield from nothing(
        "Lachesis chooses the variant that works with the backend",
        *("gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs.use_reentrant"),
    )
    yield from nothing(
        "Lachesis chooses: variable-length kernels over packed batches on GPU, SDPA elsewhere",
        *("attn_implementation", "flash_attention", "sdp_attention", "xformers_attention", "flex_attention"),
        *("eager_attention", "sample_packing", "batch_flattening", "pad_to_sequence_len"),
    )


def _float8() -> Iterator[Entry]:
    yield together("fp8", "model.matmul_dtype", "true is float8: products are in FP8, weights stay in model.dtype")
    yield together("fp8_config", "model.matmul_dtype", "by the keys below")
    yield together("fp8_config.recipe_name", "model.matmul_dtype", "tensorwise is float8, rowwise float8_rowwise")
    yield together("fp8_config.backend", "model.matmul_dtype", "ao only: torchao is what Lachesis has")
    yield from nothing("tokens are always padded to what FP8 products need", "fp8_config.pad_inner_dim")
    yield from cannot(
        "weights are gathered in their own dtype; the products alone are in FP8",
        *("fp8_enable_fsdp_float8_all_gather", "fp8_config.enable_fsdp_float8_all_gather"),
    )
    yield from refused(
        "an option of TransformerEngine or MS-AMP, and FP8 is torchao's here; remove it",
        *(f"fp8_config.{name}" for name in ("amax_compute_algo", "amax_compute_algorithm", "amax_history_len")),
        *(f"fp8_config.{name}" for name in ("amax_history_length", "fp8_format", "interval", "margin", "opt_level")),
        *(f"fp8_config.{name}" for name in ("override_linear_precision", "use_autocast_during_eval")),
    )
    yield from refused(
        "it follows from the recipe and the device here; remove it",
        *(f"fp8_config.cast_config_{name}" for name in ("input", "weight", "grad_output")),
        *(f"fp8_config.gemm_config_{name}" for name in ("output", "grad_input", "grad_weight")),
        *("fp8_config.emulate", "fp8_config.round_scales_to_power_of_2"),
    )


def _data() -> Iterator[Entry]:
    for key, path in (("path", "path"), ("name", "name"), ("split", "split"), ("type", "transform")):
        yield together(f"datasets.{key}", f"data.{path}")
    yield together("datasets.data_files", "data.path")
    yield together("datasets.field_messages", "data.prompt_column", "with type chat_template")
    yield together("test_datasets.field_messages", "data.prompt_column", "of the first of datasets")
    yield from nothing("Lachesis sees it from the file", "datasets.ds_type", "test_datasets.ds_type")
    yield from nothing("no code of a dataset is run", "datasets.trust_remote_code", "test_datasets.trust_remote_code")
    yield together("test_datasets.data_files", "data.eval_path")
    for key, path in (("path", "eval_path"), ("split", "eval_split"), ("name", "name"), ("type", "transform")):
        yield together(f"test_datasets.{key}", f"data.{path}")
    yield Entry("val_set_size", "data.eval_size", convert=held_out)
    yield Entry("dataset_prepared_path", "data.prepared_path")
    for name in ("dataset_processes", "dataset_num_proc"):
        yield Entry(name, "data.processes")
    yield Entry("shuffle_merged_datasets", "data.shuffle")
    yield from nothing("prompts are always prepared when the run begins", "skip_prepare_dataset")
    yield together("sequence_len", "data.max_prompt_length", "longer prompts are dropped; completions have their own")
    yield together("excess_length_strategy", "data.overlong_prompts", "raise is error")
    yield from nothing("problems are always held in memory", "dataset_keep_in_memory")
    yield from nothing("of supervised training: a prompt is not trained on", "train_on_inputs")


def _process() -> Iterator[Entry]:
    yield from transformers_entries()
    yield together("max_steps", "run.steps")
    yield together("num_epochs", "run.epochs", "without max_steps")
    yield together("micro_batch_size", "batch.micro_batch_size")
    yield together(
        "gradient_accumulation_steps",
        "batch.prompts_per_step",
        "prompts = micro_batch_size x gradient_accumulation_steps x processes / num_generations",
    )
    yield from nothing("evaluation decodes as many at once as the engine takes", "eval_batch_size")
    yield Entry("learning_rate", "optimizer.learning_rate", convert=_number)
    yield Entry("optimizer", "optimizer.kind", convert=one_of(OPTIMIZERS))
    yield Entry("lr_scheduler", "optimizer.schedule", convert=one_of(SCHEDULES), default="cosine")
    yield Entry("cosine_min_lr_ratio", "optimizer.min_lr_ratio")
    yield Entry("warmup_steps", "optimizer.warmup_steps")
    yield Entry("logging_steps", "logging.every_steps")
    yield together("saves_per_epoch", "checkpoint.every_epochs", "the share of an epoch between two")
    yield together("evals_per_epoch", "evaluation.every_epochs", "as saves_per_epoch; only with held-out problems")
    yield together("save_strategy", "checkpoint.every_epochs", "epoch, steps or no; epoch if nothing else is said")
    yield together("eval_strategy", "evaluation.every_epochs", "epoch, steps or no; only with held-out problems")
    yield from nothing("weights are always saved as safetensors", "save_safetensors")
    yield from nothing("resume with `lachesis train CONFIG --resume`", "auto_resume_from_checkpoints")
    yield Entry("use_tensorboard", "logging.tensorboard")
    for key in ("project", "name", "mode", "entity"):
        yield together(f"wandb_{key}", f"logging.wandb.{key}")
    for name, path in TRACKERS:
        yield together(name, path)
    yield together("use_wandb", "logging.wandb.project", "false: none")
    yield from nothing("the run's id follows from its name", "wandb_run_id")
    yield from cannot("Lachesis does not log the weights", "wandb_log_model", "wandb_watch")


# Keys of `vllm:` that earlier versions had as `trl.vllm_KEY`.
EARLIER_SERVER_KEYS = ("gpu_memory_utilization", "max_model_len", "dtype")
# The switches of Trackio and MLflow, with their notes.
TRACKERS = (
    ("use_trackio", "logging.trackio.project"),
    ("trackio_project_name", "logging.trackio.project"),
    ("trackio_run_name", "logging.trackio.name"),
    ("use_mlflow", "logging.mlflow.experiment"),
    ("mlflow_experiment_name", "logging.mlflow.experiment"),
    ("mlflow_run_name", "logging.mlflow.name"),
    ("mlflow_tracking_uri", "logging.mlflow.tracking_uri"),
)


def _scaling() -> Iterator[Entry]:
    yield from scaling_entries()
    yield from fsdp_option_entries()
    yield Entry("dp_shard_size", "distributed.shard_size")
    yield Entry("dp_replicate_size", "distributed.replicate_size")
    yield from nothing("sharding is FSDP2's", "fsdp_version")
    yield from nothing("the trained model is written whole", "fsdp_final_state_dict_type")
    for name in CONTEXTS:
        yield together(name, "distributed.context_parallel_size", "by Ulysses")
    yield together(TENSOR, "distributed.tensor_parallel_size")


def _server() -> Iterator[Entry]:
    yield together("vllm.host", "engine.urls", "0.0.0.0 is this machine")
    yield together("vllm.port", "engine.urls")
    for key in ("gpu_memory_utilization", "tensor_parallel_size", "data_parallel_size", "max_model_len", "dtype"):
        yield together(f"vllm.{key}", f"engine.{key}", "with vllm_mode colocate; the server's own otherwise")
    yield together("vllm.enforce_eager", "engine.enforce_eager", "needed by no bridge")
    yield from nothing(
        "Lachesis brings its own server and extension",
        *("vllm.serve_module", "vllm.worker_extension_cls"),
    )
    yield from nothing("the server's devices are those of its CUDA_VISIBLE_DEVICES", "vllm.device")
    yield from nothing("vLLM's own default is on", "vllm.enable_prefix_caching")
    yield from nothing("thoughts stay in the completion", "vllm.enable_reasoning", "vllm.reasoning_parser")


def _trl() -> Iterator[Entry]:
    yield together("max_completion_length", "sampling.max_completion_length", "its place is below trl:")
    yield from grpo_entries("trl.", bias_correction=False)
    yield together("trl.use_vllm", "engine.kind", "false: the trainer's own weights generate (embedded)")
    yield together("trl.vllm_mode", "engine.kind", "server is http, colocate a vLLM server of the run's own")
    yield together("trl.vllm_server_host", "engine.urls", "0.0.0.0 is this machine")
    yield together("trl.vllm_server_port", "engine.urls")
    yield together(
        "trl.vllm_server_timeout", "deadlines.generation_s", "also engine.wait_s: the wait for the server to be up"
    )
    yield together("trl.generation_batch_size", "batch.steps_per_generation", "unique prompts of one generation")
    yield Entry("trl.rollout_func", "source.rollout_func")
    yield Entry("trl.vllm_guided_decoding_regex", "sampling.guided_regex")
    yield from nothing("asynchronous features need no separate switch here", "trl.use_data_producer")
    alike = ("async_prefetch", "prefetch_depth", "streaming_min_groups", "replay_recompute_logps")
    for name in (*alike, "reroll_start_fraction", "reroll_max_groups"):
        yield Entry(f"trl.{name}", f"pipeline.{name}")
    yield together("trl.vllm_sync_interval", "bridge.every_steps")
    yield together("trl.vllm_lora_sync", "bridge.kind", "true is lora_only, false broadcast")
    yield Entry("trl.streaming_partial_batch", "pipeline.streaming")
    yield Entry("trl.skip_zero_advantage_batches", "algorithm.skip_zero_advantage")
    yield Entry(
        "trl.reward_num_workers", "rewards.num_workers", convert=_workers, note="1 means no separate worker: 0 here"
    )
    yield together("trl.vllm_enable_sleep_mode", "engine.enable_sleep_mode")
    for key in EARLIER_SERVER_KEYS:
        yield together(f"trl.vllm_{key}", f"engine.{key}", f"of earlier versions, where vllm.{key} is not written")
    yield together("trl.vllm_device", "engine.devices", "of earlier versions; cuda:1 is 1, auto the trainer's own GPU")
    yield Entry("trl.replay_buffer_size", "pipeline.replay_size")
    yield from nothing("the loss never makes the logits here, with any loss_type", "trl.use_liger_loss")


def _number(value: object) -> object:
    """YAML 1.1 reads 1e-6 as text, so files have it in quotes."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _workers(value: object) -> object:
    """Return the number of workers; one worker there is the trainer's own thread."""
    return 0 if value == 1 and not isinstance(value, bool) else value


AXOLOTL = Dialect(
    "Axolotl",
    [*_model(), *_data(), *_process(), *_scaling(), *_server(), *_trl()],
    row_sections=("datasets", "test_datasets"),
    open_sections=("gradient_checkpointing_kwargs", "fsdp_config"),
)
