"""Names that recipes of open-r1, and others like them, have beside TRL's own."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.plugins.dialects.table import Entry, read_names

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
    yield Entry("chat_template", "model.chat_template")
    yield Entry("dataset_id_or_path", "data.path")
    yield Entry("tokenizer_name_or_path", "model.tokenizer")
    yield from read_names("trl", "open_r1")
