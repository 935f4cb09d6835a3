"""Names that recipes of open-r1, and others like them, have beside TRL's own."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.plugins.dialects.table import Entry, cannot, nothing, refused, together

# Keys that open-r1's script has and TRL's has not: a file with one of them is for that script.
SCRIPT_NAMES = (
    *("system_prompt", "dataset_prompt_column", "dataset_mixture", "wandb_entity", "wandb_project", "wandb_run_group"),
    *("max_completion_len", "soft_punish_cache", "cosine_max_len", "cosine_min_value_wrong", "cosine_max_value_wrong"),
    *("cosine_min_value_correct", "cosine_max_value_correct", "repetition_n_grams", "repetition_max_penalty"),
    *("code_language", "code_eval_test_batch_size", "code_eval_scoring_mode", "parallel_code_exec_per_proc"),
    *("code_provider", "e2b_router_url", "morph_router_url", "ioi_provider", "hub_model_revision", "benchmarks"),
    *("overwrite_hub_revision", "push_to_hub_revision", "callbacks", "wandb_log_unique_prompts", "dataset_configs"),
)


def open_r1_names() -> Iterator[Entry]:
    """Yield open-r1's names; :mod:`lachesis.plugins.dialects.trl` translates their values."""
    yield Entry("system_prompt", "data.system_prompt")
    yield together("dataset_prompt_column", "data.prompt_column", "a text there becomes the user's message")
    yield Entry("chat_template", "model.chat_template")
    yield together("dataset_mixture", "data.more", "its datasets, of which data.path is the first")
    yield together("wandb_project", "logging.wandb.project", "with report_to wandb")
    yield together("wandb_entity", "logging.wandb.entity", "with report_to wandb")
    yield together("wandb_run_group", "logging.wandb.group", "with report_to wandb")
    for name in ("max_completion_len", "soft_punish_cache", "cosine_max_len"):
        yield together(name, "rewards.functions", "an argument of a reward that reward_funcs names")
    for name in ("cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct"):
        yield together(name, "rewards.functions", "an argument of the reward cosine")
    yield together("cosine_max_value_correct", "rewards.functions", "an argument of the reward cosine")
    for name in ("repetition_n_grams", "repetition_max_penalty"):
        yield together(name, "rewards.functions", "an argument of the reward repetition_penalty")
    yield together("code_language", "rewards.functions", "an argument of the reward code_format")
    yield from nothing(
        "an argument of ioi_code or cf_code, which ask Piston servers and are not rewards of Lachesis",
        *("code_eval_test_batch_size", "code_eval_scoring_mode", "ioi_provider"),
    )
    yield from nothing(
        "rewards for code run in a sandbox on this machine (rewards.sandbox)",
        *("parallel_code_exec_per_proc", "code_provider", "e2b_router_url", "morph_router_url"),
    )
    yield from nothing(
        "the model is uploaded once, at the end (push_to_hub, hub_revision); `lachesis push` uploads it again",
        *("hub_model_revision", "overwrite_hub_revision", "push_to_hub_revision"),
    )
    yield from nothing(
        "evaluation is of held-out problems (data.eval_size); other benchmarks are run apart", "benchmarks"
    )
    yield from refused(
        "Lachesis runs no callbacks of others; remove it",
        "callbacks",
        fine=(["push_to_hub_revision"], ["benchmark_callback"]),
    )
    yield from nothing("the tape has every completion", "wandb_log_unique_prompts")
    yield Entry("dataset_id_or_path", "data.path")
    yield together("eval_dataset_name", "data.eval_path", "with eval_strategy")
    yield Entry("tokenizer_name_or_path", "model.tokenizer")
    yield from nothing("data.split says which part is trained on", "dataset_splits")


def supervised_names() -> Iterator[Entry]:
    """Names of TRL's SFTConfig that stand in files for GRPO, where they do nothing there either."""
    yield Entry("dataset_num_proc", "data.processes")
    yield from nothing(
        "of supervised training; GRPO does not read it",
        *("packing", "packing_strategy", "eval_packing", "padding_free", "completion_only_loss", "assistant_only_loss"),
        *("max_seq_length", "max_length", "pad_to_max_length", "dataset_text_field", "dataset_kwargs"),
    )
    yield from cannot("completions end at the tokenizer's own end of text (model.special_tokens)", "eos_token")
