"""Names of transformers' TrainingArguments, of today and of earlier versions, that set nothing here.

Axolotl's files have many of them too. What sets something is in :mod:`lachesis.plugins.dialects.grpo`.
"""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.plugins.dialects.hub import hub_names, transformers_hub_names
from lachesis.plugins.dialects.table import Entry, cannot, nothing, refused, together

_ONE_PROCESS = "one process has the data, in one thread; prompts are few and small"
_MEMORY = "Lachesis bounds a pass by its tokens (batch.max_tokens_per_microbatch)"


def shared_names() -> Iterator[Entry]:
    """Yield the names that Axolotl's files have as well."""
    yield from nothing(_MEMORY, "auto_find_batch_size", "torch_empty_cache_steps")
    yield from nothing(
        "inductor, as it is by default, compiles the decoder layers", "torch_compile_backend", "torch_compile_mode"
    )
    yield from nothing("the model of the last step is final/; nothing is chosen", "metric_for_best_model")
    yield from nothing("the model of the last step is final/; nothing is chosen", "greater_is_better")
    yield from refused(
        "Lachesis keeps the model of the last step; take another step's with `lachesis export`",
        "load_best_model_at_end",
    )
    yield from nothing("`lachesis export` makes a model of a checkpoint", "save_only_model")
    yield from refused("Lachesis puts no noise on embeddings; remove it", "neftune_noise_alpha")
    yield from refused("Lachesis has these options as keys of `optimizer`; remove it", "optim_args")
    yield from refused("Lachesis trains all layers, or model.train_layers; remove it", "optim_target_modules")
    yield from nothing("of accelerate, whose part Lachesis does itself", "accelerator_config", "local_rank")
    yield from hub_names()
    yield from nothing("gradients are added up by FSDP2, or once a step", "ddp_bucket_cap_mb", "ddp_broadcast_buffers")
    yield together("trackio_space_id", "logging.trackio.space", "with Trackio")
    yield from nothing(_ONE_PROCESS, "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor")
    yield from nothing("a batch may span two epochs: no problem is left out", "dataloader_drop_last")
    yield from nothing("rewards get every column", "remove_unused_columns")
    yield from nothing("passes are packed by tokens; what is not padded needs no order", "group_by_length")


def transformers_names() -> Iterator[Entry]:
    """Yield the names of TRL's files alone."""
    yield from nothing(
        _ONE_PROCESS,
        *("dataloader_persistent_workers", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("dispatch_batches", "split_batches"),
    )
    yield from nothing(
        "data.shuffle and data.order say in which order problems come", "train_sampling_strategy", "length_column_name"
    )
    yield from nothing("a run that is resumed goes on where it was in the data", "ignore_data_skip")
    yield from nothing("of models that give something else than logits", "label_names", "past_index")
    yield from nothing("losses are normalized over the tokens of all devices", "average_tokens_across_devices")
    yield from nothing("GRPO has no labels to smooth", "label_smoothing_factor")
    yield from nothing("the loss never makes the logits here, with any loss_type", "liger_kernel_config")
    yield from nothing(
        "evaluation generates and scores, with the weights as they are",
        *("bf16_full_eval", "fp16_full_eval", "prediction_loss_only", "eval_do_concat_batches", "do_predict"),
        *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
        *("include_inputs_for_metrics", "per_gpu_eval_batch_size"),
    )
    yield from cannot("evaluation is before the run and every evaluation.every_steps", "eval_delay")
    yield from nothing(
        "what is logged, and where, is in `logging`; all logs are in logs/ of the run directory",
        *("log_on_each_node", "log_level_replica", "disable_tqdm", "logging_dir"),
    )
    yield from nothing(
        "a step whose gradient is not finite is skipped and said (optimizer.max_skipped_steps)",
        "logging_nan_inf_filter",
    )
    yield from nothing(
        "tokens, memory and the times of each part of a step are always measured",
        *("include_num_input_tokens_seen", "include_tokens_per_second", "skip_memory_metrics", "debug"),
    )
    yield from nothing("logging.trackio.space is the one place", "trackio_bucket_id", "trackio_static_space_id")
    yield from nothing(
        "checkpoints are written by one process, whole, on a stop too", "save_on_each_node", "enable_jit_checkpoint"
    )
    yield from nothing("Lachesis runs no callbacks of others", "restore_callback_states_from_checkpoint")
    yield from nothing("no run is written over: --resume goes on, another run.name is another", "overwrite_output_dir")
    yield from nothing("weights are always saved as safetensors", "save_safetensors")
    yield from transformers_hub_names()
    yield from cannot("run.seed orders the data too", "data_seed")
    yield from cannot("on a CPU runs repeat bitwise; on GPUs torch's kernels may not", "full_determinism")
    yield from nothing("gradients are added up by FSDP2, or once a step", "ddp_static_graph")
    yield from nothing(
        "of earlier versions or other devices",
        *("fp16_backend", "fp16_opt_level", "half_precision_backend", "use_mps_device", "jit_mode_eval", "use_ipex"),
        *("tpu_num_cores", "tpu_metrics_debug", "ray_scope", "torchdynamo", "mp_parameters"),
        *("use_legacy_prediction_loop", "xpu_backend", "per_gpu_train_batch_size"),
    )
    yield from nothing(
        "decoder layers are found, and sharded one by one", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"
    )
