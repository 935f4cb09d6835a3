"""TRL's names, flat as in files for `trl grpo --config`: GRPOConfig, ModelConfig and the script's arguments.

Read from TRL 1.16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lachesis.common.json_values import is_list, is_object
from lachesis.config.document import Document, describe
from lachesis.plugins.dialects import grpo
from lachesis.plugins.dialects.convert import dtype
from lachesis.plugins.dialects.distributed import is_known_option, option_of, put_distributed
from lachesis.plugins.dialects.hub import put_hub
from lachesis.plugins.dialects.mixtures import put_datasets
from lachesis.plugins.dialects.open_r1_rewards import put_open_r1_rewards
from lachesis.plugins.dialects.table import Dialect, Entry, Translation, read_names
from lachesis.plugins.dialects.words import Words


class _Words(Words):
    trackers: list[str]
    utilization: float
    managed: dict[str, str]
    model_options: list[str]
    lora: dict[str, int | float | str]
    rloo: dict[str, str]


_WORDS = _Words.read("trl")


def translate(document: Document, *, processes: int | None = 1) -> Translation:
    """Translate TRL's document to a canonical one, like :func:`lachesis.plugins.dialects.translate`."""
    rloo = document.data.get(TRAINER_KEY) == "rloo"
    if rloo:
        document.data = {**RLOO_DEFAULTS, **{key: value for key, value in document.data.items() if value is not None}}
    translation = Translation(document, RLOO if rloo else TRL)
    translation.run()
    _put_model(translation)
    put_datasets(translation)
    _put_run(translation)
    counted = grpo.put_batch(
        translation,
        rows="per_device_train_batch_size",
        generations="num_generations",
        default_rows=8,
        processes=processes,
    )
    _check_generation_batch(translation, processes=counted)
    mode = None if rloo else "sequence_mask"
    grpo.put_algorithm(translation, "", optimizer="optim", alpha=0.6, steps=512, mode=mode, floor=False)
    put_open_r1_rewards(translation)
    if translation.value(TRAINER_KEY, "grpo") not in ("grpo", "rloo"):
        translation.problem(TRAINER_KEY, "expected grpo or rloo")
    if rloo:
        _put_rloo(translation)
    _put_new_tokens(translation)
    if not translation.has("max_grad_norm"):
        translation.put_entry("gradient_clipping")
    _put_engine(translation)
    _put_copies(translation, processes=processes or 1)
    put_distributed(translation, _fsdp_options(translation), processes=processes or 1)
    translation.finish()
    return translation


def _fsdp_options(translation: Translation) -> dict[str, tuple[str, Any]]:
    """Return the options of ``fsdp_config`` that matter; the others always apply, or FSDP2 decides."""
    found = translation.value("fsdp_config", {})
    if isinstance(found, str):
        try:
            found = json.loads(Path(found).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            translation.problem("fsdp_config", f"{found} cannot be read: {error}")
            return {}
    if not is_object(found):
        translation.problem("fsdp_config", f"expected a mapping or a JSON file, got {describe(found)}")
        return {}
    return {option_of(key): ("fsdp_config", value) for key, value in found.items() if is_known_option(key)}


def _put_model(translation: Translation) -> None:
    if translation.switch("use_peft"):
        translation.put("adapter.kind", "lora", "use_peft")
        for name, default in _WORDS.lora.items():
            translation.put_entry(name, default)
    grpo.put_quantization(translation)
    options = translation.mapping("model_init_kwargs")
    names = ("dtype", "torch_dtype")
    asked = next((options[name] for name in names if name in options), None)
    translation.put_converted("model.dtype", asked, "model_init_kwargs", dtype)
    for key in ("revision", "trust_remote_code"):
        translation.put(f"model.{key}", options.get(key), "model_init_kwargs")
    for key in options:
        if key not in _WORDS.model_options:
            translation.problem("model_init_kwargs", f"{key} has no counterpart")
    grpo.put_dtype(translation, "fp16", "bf16")
    for name in reversed(names):
        translation.put_converted("model.dtype", translation.value(name), name, dtype)


def _put_warmup(translation: Translation) -> None:
    """Set the warm-up; ``warmup_steps`` below 1 is a share of all steps, as in transformers."""
    value = translation.value("warmup_steps")
    if isinstance(value, float) and 0 < value < 1:
        translation.put("optimizer.warmup_ratio", value, "warmup_steps")
    elif value is not None:
        whole = isinstance(value, float) and value.is_integer()
        translation.put("optimizer.warmup_steps", int(value) if whole else value, "warmup_steps")


def _put_run(translation: Translation) -> None:
    grpo.put_run(
        translation, epochs="num_train_epochs", default_epochs=3.0, schedule="lr_scheduler_type", default_rate=1e-6
    )
    _put_warmup(translation)
    grpo.put_every(translation, "logging_steps", "logging.every_steps")
    saves = translation.value("save_strategy", "steps")
    if grpo.put_strategy(translation, "save_strategy", saves, "checkpoint", default_steps=500) and saves == "steps":
        grpo.put_every(translation, "save_steps", "checkpoint.every_steps")
    evaluates = translation.value("eval_strategy", translation.value("evaluation_strategy", "no"))
    if evaluates == "steps":
        grpo.put_every(translation, "eval_steps", "evaluation.every_steps")
    else:
        grpo.put_strategy(translation, "eval_strategy", evaluates, "evaluation", default_steps=500)
    if evaluates not in ("no", False):
        translation.copy("eval_dataset_name", "data.eval_path")
    if evaluates not in ("no", False) and not translation.has("test_split_size"):
        translation.put("data.eval_split", translation.value("dataset_test_split", "test"), "dataset_test_split")
    if translation.value("num_generations_eval", 1) not in (None, 1):  # TRL samples them as it does in training
        translation.put("evaluation.temperature", translation.value("temperature", 1.0), "num_generations_eval")
    put_hub(translation)
    _put_reports(translation)


def _put_reports(translation: Translation) -> None:
    reports = translation.value("report_to", "none")
    for report in reports if is_list(reports) else [reports]:
        if report == "trackio":
            translation.put("logging.trackio.project", translation.value("project", "huggingface"), "project")
            translation.copy("trackio_space_id", "logging.trackio.space")
            translation.copy("run_name", "logging.trackio.name")
        elif report == "tensorboard":
            translation.put("logging.tensorboard", True, "report_to")
        elif report == "wandb":
            name = "wandb_project" if translation.has("wandb_project") else "project"
            translation.put("logging.wandb.project", translation.value(name, "huggingface"), name)
            for theirs, key in (("run_name", "name"), ("wandb_entity", "entity"), ("wandb_run_group", "group")):
                translation.copy(theirs, f"logging.wandb.{key}")
        elif report != "none":
            translation.warning("report_to", f"Lachesis reports to {', '.join(_WORDS.trackers)}, not to {report}")


def _check_generation_batch(translation: Translation, *, processes: int) -> None:
    """Check the generation batch, in completions or in steps (micro-batches) that share a generation; not both."""
    batch, steps = "generation_batch_size", "steps_per_generation"
    if translation.has(batch) and translation.has(steps):
        translation.problem(batch, f"{batch} and {steps} mean the same; TRL takes one of them")
        return
    name = batch if translation.has(batch) else steps
    rows, group = translation.value("per_device_train_batch_size", 8), translation.value("num_generations", 8)
    if not translation.has(name) or not isinstance(rows, int) or not isinstance(group, int) or group < 1:
        return
    value = translation.whole(name, 1)
    completions = None if value is None else value if name == batch else value * rows * processes
    if completions is not None and completions % group:
        translation.problem(name, f"{completions} completions are not a multiple of num_generations {group}")
        return
    prompts = None if completions is None else completions // group
    grpo.check_generation_batch(translation, name, prompts=prompts, meaning=f"TRL: {completions} completions")


def _put_engine(translation: Translation) -> None:
    url, port = None, None
    if translation.value("vllm_mode", "colocate") == "server":
        port = translation.value("vllm_server_port", 8000)
        url = translation.value("vllm_server_base_url")
    grpo.put_serving(
        translation,
        "",
        default_mode="colocate",
        url=url if isinstance(url, str) else grpo.put_address(translation, "vllm_server_host", port),
        url_name="vllm_server_base_url" if url is not None else "vllm_server_port",
        managed=_WORDS.managed,
    )
    utilization = "vllm_gpu_memory_utilization"
    if translation.document.data.get("engine", {}).get("kind") == "vllm" and not translation.has(utilization):
        translation.put("engine.gpu_memory_utilization", _WORDS.utilization, utilization)


def _put_copies(translation: Translation, *, processes: int) -> None:
    """Set the number of engines: each ``vllm_tensor_parallel_size`` processes share a vLLM on their GPUs."""
    name, engine = "vllm_tensor_parallel_size", translation.document.data.get("engine", {})
    ways = translation.value(name)
    if engine.get("kind") != "vllm" or "devices" in engine or not isinstance(ways, int) or ways < 2:
        return
    if processes > ways and processes % ways == 0:
        translation.put("engine.data_parallel_size", processes // ways, name)
        translation.note(name, f"{processes} processes have {processes // ways} engines of {ways} GPUs on their GPUs")


def _put_new_tokens(translation: Translation) -> None:
    """Set the completion length from transformers' name, which recipes use besides TRL's or instead of it."""
    name, other = "max_new_tokens", "max_completion_length"
    value = translation.value(name)
    if translation.has(other) and value not in (None, translation.value(other)):
        translation.problem(name, f"{value}, and {other} is {translation.value(other)}; TRL reads {other}: keep that")
    elif value is not None:
        translation.put(f"sampling.{other}", value, name)


def _put_rloo(translation: Translation) -> None:
    """Set the loss, the advantages and the place of the KL term that RLOOTrainer's code has."""
    scale = {"scale_rewards": "advantages" if translation.switch("normalize_advantages") else "none"}
    for key, value in (_WORDS.rloo | scale).items():
        translation.put(f"algorithm.{key}", value, TRAINER_KEY)
    if translation.value("beta") != 0:
        translation.put("algorithm.kl_placement", "reward", "beta")


def _names() -> Iterator[Entry]:
    yield from read_names("grpo")
    yield from read_names("transformers")
    yield from read_names("trl")


TRAINER_KEY = "trl_trainer"
RLOO_DEFAULTS: Mapping[str, Any] = {TRAINER_KEY: "rloo", "num_generations": 2, "beta": 0.05}
"""Defaults of TRL 1.16's RLOOConfig that differ from GRPOConfig's."""

TRL = Dialect("TRL", list(_names()), row_sections=("datasets",))
RLOO = Dialect("TRL", [*_names(), *read_names("rloo")], row_sections=("datasets",))
