"""Writes configuration.md from the schema.

Run ``python docs/generate_reference.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lachesis.config.keys import Key, SectionInfo, all_sections, find_keys, value_in_words
from lachesis.config.presets import PRESETS
from lachesis.config.schema import MixedSourceConfig

TARGET = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_reference.py from src/lachesis/config/schema/ and plugins/*/section.py; do not edit. -->

One YAML file describes a run. `lachesis train config.yaml --set optimizer.learning_rate=2e-6` changes a key for one
run, and `lachesis explain KEY` shows a row of these tables.

**Values.** An unknown key, a key written twice and a value of the wrong type are errors, all reported at once with
their lines. Nothing is converted: `"30"` is text, `30` a number. Scalars follow YAML 1.2: only `true` and `false` are
booleans, and `1e-6` is a number. Anchors, aliases and merge keys (`<<: *defaults`) work. Null counts as unset, unless
it is one of the key's own values.

**Paths** are relative to the directory of the file, also in `--set`; `run.dir` is relative to the current directory.
Files in [another trainer's keys](migration.md) keep their rule.

- `model.path`, `model.tokenizer`: a path if it begins with `.`, `/` or `~` or exists, else a hub id.
- `data.path`, `data.eval_path`, `data.more`: a path too if it ends in `.jsonl`, `.json`, `.parquet` or `.csv`.
- `model.chat_template`: a file, or the template itself if it holds a `{`.
- Functions ([custom parts](custom.md)): `FILE.py:FUNCTION`, or `module.function` with a `module.py` beside the
  configuration or installed. A reward with a `/` is a model.

A run writes its whole configuration to `config.yaml` in its directory, which starts the same run from anywhere.

A key without a default is unset. `KIND`: stands before keys that only this `kind` of the section has.

**Required** keys are `{required}` and one of `run.steps` and `run.epochs`; with `source.kind: local`, which is the
default, also `data.path` and `rewards.functions`.
"""


# Keys that one run in a hundred sets, by section; the page folds them away.
ADVANCED = {
    "model": "revision tokenizer matmul_dtype train_layers pad_token special_tokens packing compile",
    "adapter": "layers dropout",
    "data": "transform more prepared_path processes order overlong_prompts chat_template_kwargs",
    "source": "rollout_func tool_parser tool_timeout_s tool_result_tokens rollout_timeout_s workdir env inherit_env "
    "columns nonzero_exit retries host max_sequence_length wait_s missing_logprobs refill_rounds rollout_s renderer "
    "interface turn_tokens turns_apart",
    "rewards": "text_completions special_tokens num_workers on_error model_device model_batch_size",
    "sampling": "min_p repetition_penalty stop_token_ids min_tokens presence_penalty frequency_penalty guided_regex "
    "generation_kwargs",
    "engine": "host port enforce_eager kv_cache_dtype devices extra_args takeover function wait_s",
    "bridge": "pause config_path keep_last init_method transport staging senders",
    "algorithm": "advantage ref_mixup_alpha ref_sync_steps use_bias_correction_kl sampler_correction_min "
    "off_policy_mask_threshold top_entropy_quantile sapo_temperature_pos sapo_temperature_neg skip_zero_advantage "
    "router_aux_loss_coef",
    "algorithm.teacher": "revision weights reward_weights column beta clip estimate top_k",
    "pipeline": "prefetch_depth streaming_min_groups replay_size replay_recompute_logps "
    "reroll_start_fraction reroll_max_groups",
    "batch": "steps_per_generation micro_batch_size",
    "optimizer": "function scale_parameter betas eps max_skipped_steps stable_steps decay_steps decay min_lr_ratio",
    "distributed": "reshard_after_forward shard_size replicate_size",
    "deadlines": "generation_s batch_s sync_s engine_start_s teacher_s progress_s ranks_s",
    "checkpoint": "max_share asynchronous format",
    "logging": "report_groups report_every_steps health_rules",
    "services.api": "max_queued_tokens max_body_mb ack_timeout_s env_timeout_s",
    "cluster": "ranks_per_node wait_s preflight_s environment",
}


def render() -> str:
    """The whole page."""
    sections = [section for section in all_sections() if section.path]
    required = "`, `".join(
        key.path
        for section in sections
        if section.required
        for key in section.keys
        if key.default is None and not key.kinds
    )
    pages = {section.path: _section(section) for section in sections}
    pages["source"] += f"\n{_sources()}"
    parts = [INTRODUCTION.replace("{required}", required), *pages.values(), _presets()]
    return "\n".join(parts)


def _sources() -> str:
    """Return the list of several sources: the key, and the keys of an entry beside its sections."""
    (whole,) = find_keys("sources")
    of_entry = {section.path: section for section in all_sections(MixedSourceConfig)}
    entry, algorithm = of_entry[""], of_entry["algorithm"]
    keys = [replace(key, name=key.path) for key in (*entry.keys, *algorithm.keys)]
    words = "The keys of an entry, beside its sections `source`, `data` and `rewards`, which are those of this page:"
    parts = ["## `sources`", "", *_table(entry, [whole]), "", words, "", *_table(entry, keys), ""]
    return "\n".join(parts)


def _presets() -> str:
    rows = [
        f"| `{name}` | {', '.join(f'`{key}: {value_in_words(value)}`' for key, value in keys.items())} |"
        for name, keys in PRESETS.items()
    ]
    words = (
        "What `algorithm.preset` stands for. With `dapo` the rewards also get `soft_overlong_punishment`, over the\n"
    )
    words += "last fifth of the longest completion."
    return "\n".join(["## Presets\n", words, "", "| preset | keys |", "|---|---|", *rows, ""])


def _section(section: SectionInfo) -> str:
    """Return a section with the keys that people set, and below them, folded, those that few ever do."""
    advanced = set(ADVANCED.get(section.path, "").split())
    if unknown := advanced - {key.name for key in section.keys}:
        raise ValueError(f"ADVANCED names keys that {section.path} does not have: {sorted(unknown)}")
    usual = [key for key in section.keys if key.name not in advanced]
    rare = [key for key in section.keys if key.name in advanced]
    parts = [f"## `{section.path}`", "", section.description, ""]
    if usual:
        parts += [*_table(section, usual), ""]
    if rare:
        parts += ['<details markdown="1">', "<summary>Advanced</summary>", "", *_table(section, rare), "", "</details>"]
        parts.append("")
    return "\n".join(parts)


def _table(section: SectionInfo, keys: Sequence[Key]) -> Iterator[str]:
    yield "key | type | default | meaning"
    yield "--- | --- | --- | ---"
    yield from (_row(key, discriminated=section.discriminated) for key in keys)


def _row(key: Key, *, discriminated: bool) -> str:
    default = {None: "required", "unset": ""}.get(key.default, f"`{key.default}`")
    only = " or ".join(f"`{kind}`" for kind in key.kinds)
    # The section's description, just above the table, already tells what each kind is.
    meaning = "Which of the above." if key.name == "kind" and discriminated else key.description
    cells = [f"`{key.name}`", type_of(key), default, f"{only}: {meaning}" if only else meaning]
    return " | ".join(cell.replace("|", chr(92) + "|") for cell in cells)


def type_of(key: Key) -> str:
    """Return the type of a key in few words; that an unset key may be null goes without saying."""
    short = {"whole numbers": "integers", "whole number": "integer", "true or false": "boolean", "one of ": ""}
    text = key.type.removesuffix(" or null") if key.default == "unset" else key.type
    for long, word in short.items():
        text = text.replace(long, word)
    return text


def main() -> None:
    TARGET.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
