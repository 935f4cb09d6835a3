"""Axolotl's YAML: its own keys at the top, TRL's below ``trl:``, the server's below ``vllm:``.

Read from axolotl 0.19. Where its documentation and its code differ, the documentation counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lachesis.common.json_values import is_object
from lachesis.config.document import Document, describe
from lachesis.config.schema import PipelineConfig
from lachesis.config.steps import oldest_sample
from lachesis.plugins.dialects import grpo
from lachesis.plugins.dialects.convert import one_of
from lachesis.plugins.dialects.distributed import is_known_option, option_of, put_context, put_distributed
from lachesis.plugins.dialects.hub import put_axolotl_hub
from lachesis.plugins.dialects.mixtures import ROW_KEYS, dataset_of
from lachesis.plugins.dialects.table import Dialect, Entry, Translation, read_names
from lachesis.plugins.dialects.words import Words, read_table


class _Words(Words):
    earlier_server_keys: list[str]
    float8_recipes: dict[str, str]
    managed: dict[str, str]


_WORDS = _Words.read("axolotl")
EARLIER_SERVER_KEYS = _WORDS.earlier_server_keys
"""Keys of `vllm:` that earlier versions had as `trl.vllm_KEY`."""


def _names() -> Iterator[Entry]:
    yield from read_names("axolotl", "model", "data", "process")
    yield from read_names("transformers", "shared")
    for prefix in ("fsdp_config.", "fsdp_config.fsdp_"):
        yield from read_names("fsdp", prefix=prefix)
    for entry in read_names("grpo", prefix="trl."):
        # Its own trainer does not weight the KL term.
        yield replace(entry, default=False) if entry.name == "trl.use_bias_correction_kl" else entry
    yield from read_names("axolotl", "scaling", "server", "trl", "rest")


AXOLOTL = Dialect(
    "Axolotl",
    list(_names()),
    row_sections=("datasets", "test_datasets"),
    open_sections=("gradient_checkpointing_kwargs", "fsdp_config"),
    aliases={"trl.beta": ("rl_beta",)},
)

_FSDP = "fsdp_config."
_FSDP_KEYS = {name: name.removeprefix(_FSDP) for name in AXOLOTL.entries if name.startswith(_FSDP)}
# Earlier versions have some of them below trl: too, which count if vllm: does not have them.
_MANAGED = {f"trl.vllm_{key}": key for key in EARLIER_SERVER_KEYS} | _WORDS.managed


def translate(document: Document, *, processes: int | None = 1) -> Translation:
    """Translate Axolotl's document to a canonical one, like :func:`lachesis.plugins.dialects.translate`."""
    translation = Translation(document, AXOLOTL)
    translation.run()
    _put_model(translation)
    _put_datasets(translation)
    _put_run(translation)
    counted = grpo.put_batch(
        translation,
        rows="micro_batch_size",
        generations="trl.num_generations",
        default_rows=1,
        processes=processes,
        sharing=put_context(translation),
    )
    if translation.has("trl.generation_batch_size"):
        prompts = translation.whole("trl.generation_batch_size", 1)
        name = "trl.generation_batch_size"
        grpo.check_generation_batch(translation, name, prompts=prompts, meaning="Axolotl counts unique prompts")
        if (prompts or 0) > translation.document.data["batch"].get("prompts_per_step", prompts or 0):
            translation.warning(name, "unique prompts, as Axolotl's documentation says; its code counts completions")
    if translation.value("optimizer") == "muon":
        _put_muon(translation, processes=counted)
    _put_algorithm(translation)
    _put_engine(translation)
    put_distributed(translation, _fsdp_options(translation), processes=processes or 1)
    translation.finish()
    return translation


def _fsdp_options(translation: Translation) -> dict[str, tuple[str, Any]]:
    keys = {name: key for name, key in _FSDP_KEYS.items() if translation.has(name)}
    return {option_of(key): (name, translation.value(name)) for name, key in keys.items() if is_known_option(key)}


def _put_model(translation: Translation) -> None:
    kind = translation.value("rl")
    if kind == "gdpo":
        translation.put("algorithm.aggregation", "normalize_then_sum", "rl")
    elif kind != "grpo":
        found = "is missing" if kind is None else f"is {kind!r}"
        translation.problem("rl", f"{found}: Lachesis trains with GRPO; write rl: grpo")
    adapter = translation.value("adapter")
    if adapter in ("lora", "qlora"):
        translation.put("adapter.kind", "lora", "adapter")
        if adapter == "qlora":
            translation.put("model.quantization", "nf4", "adapter")
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "peft_layers_to_transform"):
            translation.put_entry(name)
        if translation.switch("lora_target_linear"):
            translation.put("adapter.targets", "all-linear", "lora_target_linear")
    elif adapter is not None:
        translation.problem("adapter", f"{describe(adapter)} has no counterpart; Lachesis has lora and qlora")
    grpo.put_quantization(translation)
    grpo.put_dtype(translation, "float32", "bf16", "bfloat16", "fp16", "float16", others=("auto",))
    _put_float8(translation)
    _put_offloading(translation)
    put_chat_template(translation)
    roles = ("bos_token", "eos_token", "unk_token")
    tokens = {role: found for role in roles if (found := translation.value(f"special_tokens.{role}")) is not None}
    if tokens:
        translation.put("model.special_tokens", tokens, f"special_tokens.{next(iter(tokens))}")


def _put_offloading(translation: Translation) -> None:
    """Set offloading; Axolotl moves inputs kept by ``gradient_checkpointing`` to the host, ours recomputes too."""
    name = "activation_offloading"
    asked = translation.value(name)
    if asked in (True, "legacy"):
        translation.put("model.activations", "offload", name)
        translation.put("model.gradient_checkpointing", False, name)
    elif asked:
        translation.problem(name, f"{describe(asked)} has no counterpart; Lachesis offloads to the host's memory: true")


def _put_float8(translation: Translation) -> None:
    backend = translation.value("fp8_config.backend", "ao")
    if str(backend).lower() not in ("ao", "torchao"):
        translation.problem("fp8_config.backend", f"{describe(backend)} has no counterpart; Lachesis has ao (torchao)")
    if translation.switch("fp8") is not True:
        return
    name = "fp8_config.recipe_name" if translation.has("fp8_config.recipe_name") else "fp8"
    recipe = translation.value("fp8_config.recipe_name", "tensorwise")
    translation.put_converted("model.matmul_dtype", recipe, name, one_of(_WORDS.float8_recipes))


def _put_datasets(translation: Translation) -> None:
    rows = [row for row in translation.value("datasets", []) if is_object(row)]
    datasets = [_dataset(translation, f"datasets[{index}]", row) for index, row in enumerate(rows)]
    for index, dataset in enumerate(datasets[:1]):
        for key, value in dataset.items():
            translation.put(f"data.{key}", value, _row_key(f"datasets[{index}]", rows[index], key))
    if len(datasets) > 1:
        translation.put("data.more", datasets[1:], "datasets[1]")
    held_out = [row for row in translation.value("test_datasets", []) if is_object(row)]
    if len(held_out) > 1:
        translation.problem("test_datasets", "Lachesis holds out problems of one dataset; keep one")
    for row in held_out[:1]:
        if any(row.get(key) not in (None, *(first.get(key) for first in rows[:1])) for key in ("name", "type")):
            translation.warning(
                "test_datasets", "held-out problems are read like the first of datasets: with its name and its type"
            )
        dataset = _dataset(translation, "test_datasets[0]", row)
        for key, path in (("path", "data.eval_path"), ("split", "data.eval_split")):
            if key in dataset:
                translation.put(path, dataset[key], _row_key("test_datasets[0]", row, key))
    if translation.has("sequence_len"):
        translation.copy("sequence_len", "data.max_prompt_length")
        strategy = translation.value("excess_length_strategy", "drop")
        if strategy == "truncate":
            translation.problem("excess_length_strategy", "a truncated prompt asks another question; write drop")
        translation.put("data.overlong_prompts", "error" if strategy == "raise" else "drop", "excess_length_strategy")


def _row_key(name: str, row: dict[str, Any], key: str) -> str:
    """Return the key of a dataset's row there that sets ``key`` here."""
    if key == "path" and row.get("data_files"):
        return f"{name}.data_files"
    written = key if key in ROW_KEYS else "field_messages" if key == "prompt_column" else "type"
    return f"{name}.{written}"


def _dataset(translation: Translation, name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return one of ``datasets:`` as one of ours. ``path: json`` with ``data_files`` is that file."""
    dataset = dataset_of(translation, name, row)
    kind = row.get("type")
    if isinstance(kind, str) and "." in kind:
        dataset["transform"] = kind
    elif kind == "chat_template" and row.get("field_messages") not in (None, "messages"):
        dataset["prompt_column"] = row["field_messages"]
    elif kind == "chat_template":
        dataset["format"] = "messages"
    elif kind is not None:
        translation.problem(
            f"{name}.type",
            f"expected the import path of a transform, as rewards.prompt_transform, got {describe(kind)}; leave it out "
            "for rows that have a prompt, or an instruction and its response",
        )
    return dataset


def _put_run(translation: Translation) -> None:
    grpo.put_run(translation, epochs="num_epochs", default_epochs=1.0, schedule="lr_scheduler")
    _put_saves(translation)
    put_axolotl_hub(translation)
    _put_evaluations(translation)
    if not translation.has("warmup_steps") and not translation.has("warmup_ratio"):
        translation.put("optimizer.warmup_ratio", 0.03, "warmup_ratio")
    if translation.has("wandb_project") and translation.value("use_wandb", True):
        for key in ("project", "name", "mode", "entity"):
            translation.copy(f"wandb_{key}", f"logging.wandb.{key}")
    if translation.value("use_trackio"):
        name = "trackio_project_name"
        translation.put("logging.trackio.project", translation.value(name, "huggingface"), name)
        translation.copy("trackio_run_name", "logging.trackio.name")
        translation.copy("trackio_space_id", "logging.trackio.space")


def _put_saves(translation: Translation) -> None:
    """Set checkpoints every ``save_steps``, several times in an epoch, or by ``save_strategy``, usually each epoch."""
    strategy = translation.value("save_strategy", "epoch")
    if translation.has("save_steps"):
        grpo.put_every(translation, "save_steps", "checkpoint.every_steps")
    elif translation.has("saves_per_epoch"):
        grpo.put_per_epoch(translation, "saves_per_epoch", "checkpoint.every_epochs")
    elif not grpo.put_strategy(translation, "save_strategy", strategy, "checkpoint", default_steps=500):
        return
    if not translation.has("save_total_limit"):
        translation.put("checkpoint.keep_last", 4, "save_total_limit")


def _put_evaluations(translation: Translation) -> None:
    """Set evaluations like checkpoints if there are held-out problems; otherwise they have no effect, as in Axolotl."""
    if not translation.has("test_datasets") and not translation.value("val_set_size"):
        return
    strategy = translation.value("eval_strategy", translation.value("evaluation_strategy", "no"))
    if translation.has("eval_steps"):
        grpo.put_every(translation, "eval_steps", "evaluation.every_steps")
    elif translation.has("evals_per_epoch"):
        grpo.put_per_epoch(translation, "evals_per_epoch", "evaluation.every_epochs")
    else:
        grpo.put_strategy(translation, "eval_strategy", strategy, "evaluation", default_steps=500)


def _put_muon(translation: Translation, *, processes: int) -> None:
    """Set the betas of AdamW, which trains all but matrices; refuse Muon where Axolotl computes another update."""
    ours = "leave it out, and give --set optimizer.kind=muon for Lachesis' own"
    if not translation.has("adapter"):
        translation.problem("optimizer", f"Axolotl's muon trains no norms and no biases, Lachesis' does: {ours}")
    elif processes > 1:
        translation.problem("optimizer", f"with {processes} processes Axolotl's muon has steps of another size: {ours}")
    if not (translation.has("adam_beta1") and translation.has("adam_beta2")):
        translation.put("optimizer.betas", [0.95, 0.95], "optimizer")


def _put_algorithm(translation: Translation) -> None:
    produced = translation.value("trl.use_data_producer") or translation.value("trl.async_prefetch")
    # Only its asynchronous trainer has its own defaults; the other has TRL's.
    mode = "token_truncate" if produced else "sequence_mask"
    grpo.put_algorithm(translation, "trl.", optimizer="optimizer", alpha=0.9, steps=64, mode=mode, floor=bool(produced))
    translation.copy("trl.beta", "algorithm.beta")
    _put_staleness(translation)
    length = "max_completion_length"
    if translation.has(length) and not translation.has(f"trl.{length}"):
        translation.copy(length, f"sampling.{length}")
    elif translation.has(length):
        taken = translation.value(f"trl.{length}")
        translation.warning(length, f"nothing to do: trl.{length} says {describe(taken)}, which is taken")
    elif not (translation.has(f"trl.{length}") or "max_tokens" in translation.mapping("trl.generation_kwargs")):
        text = "left out, so completions there end with the model's context; here they have at most 512 tokens"
        translation.warning(f"trl.{length}", text)


def _put_staleness(translation: Translation) -> None:
    """Set the age limit of samples, which Axolotl lacks, to the age that interval, depth and iterations can cause."""
    names = ("trl.vllm_sync_interval", "trl.prefetch_depth", "trl.num_iterations")
    interval, depth, iterations = (translation.value(name, 1) for name in names)
    if not translation.value("trl.async_prefetch") or not all(
        isinstance(n, int) for n in (interval, depth, iterations)
    ):
        return
    steps = translation.document.data.get("batch", {}).get("steps_per_generation", 1)
    oldest = oldest_sample(every_steps=interval, depth=depth, iterations=iterations * steps)
    limit = PipelineConfig().max_staleness
    if limit is not None and oldest > limit:
        translation.put("pipeline.max_staleness", oldest, "trl.vllm_sync_interval")


def _port(translation: Translation, name: str) -> int:
    value = translation.value(name, 8000)
    if not isinstance(value, bool) and str(value).isdecimal() and 0 < int(value) < 1 << 16:
        return int(value)
    translation.problem(name, f"expected a port, a number from 1 to 65535, got {describe(value)}")
    return 8000


def _put_engine(translation: Translation) -> None:
    host = "trl.vllm_server_host" if translation.has("trl.vllm_server_host") else "vllm.host"
    port = "trl.vllm_server_port" if translation.has("trl.vllm_server_port") else "vllm.port"
    own, asked = _port(translation, "vllm.port"), _port(translation, "trl.vllm_server_port")
    if translation.has("vllm.port") and translation.has("trl.vllm_server_port") and own != asked:
        translation.warning("vllm.port", f"the server listens at {own}, but the trainer's address is {asked}")
    if translation.value("trl.use_vllm"):
        translation.copy("trl.vllm_server_timeout", "deadlines.generation_s")
    translation.value("vllm.host")  # the server's own address, which `lachesis vllm-serve` reads
    if translation.value("trl.vllm_mode") == "colocate":
        translation.copy("vllm.port", "engine.port")
    grpo.put_serving(
        translation,
        "trl.",
        default_mode="server",
        url=grpo.put_address(translation, host, translation.value(port, 8000)),
        url_name=port,
        managed=_MANAGED,
    )


_TEMPLATES = read_table("chat_templates")
CHATML: str = _TEMPLATES["chatml"]
_FAMILIES: Mapping[str, Sequence[str]] = _TEMPLATES["families"]


def put_chat_template(translation: Translation) -> None:
    """Set ``model.chat_template`` if the file asks for another template than the tokenizer's own."""
    name = "chat_template"
    template = translation.value(name)
    if template is None or str(template).startswith("tokenizer_default"):
        return
    if template == "jinja" and translation.has("chat_template_jinja"):
        translation.copy("chat_template_jinja", "model.chat_template")
    elif template == "chatml":
        translation.put("model.chat_template", CHATML, name)
    elif _is_of_family(str(template), str(translation.value("base_model"))):
        translation.note(name, f"{template} is the tokenizer's own template, because the model belongs to that family")
    else:
        translation.problem(
            name,
            f"{describe(template)} is a template of Axolotl, but the model's name does not belong to that family; "
            "write tokenizer_default, or jinja with the template's text or file in chat_template_jinja",
        )


def _is_of_family(template: str, model: str) -> bool:
    words = next((words for family, words in _FAMILIES.items() if template.startswith(family)), ())
    return any(word in model.lower() for word in words)
