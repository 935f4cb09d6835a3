"""The names of TRL's GRPOConfig that Axolotl has too, there below ``trl:``, and what needs several of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.config.dialects.convert import listed, run_directory, scale_rewards, top_k
from lachesis.config.dialects.table import UNSET, Convert, Entry, Translation, cannot, nothing, same, together
from lachesis.config.document import describe
from lachesis.config.keys import find_section

LARGE_COMPLETIONS = 512

# name there, path here, converter
_NAMES: tuple[tuple[str, str, Convert], ...] = (
    ("beta", "algorithm.beta", same),
    ("num_iterations", "algorithm.num_iterations", same),
    ("epsilon", "algorithm.epsilon", same),
    ("epsilon_high", "algorithm.epsilon_high", same),
    ("delta", "algorithm.delta", same),
    ("scale_rewards", "algorithm.scale_rewards", scale_rewards),
    ("mask_truncated_completions", "algorithm.mask_truncated", same),
    ("importance_sampling_level", "algorithm.importance_sampling_level", same),
    ("multi_objective_aggregation", "algorithm.aggregation", same),
    ("off_policy_mask_threshold", "algorithm.off_policy_mask_threshold", same),
    ("entropy_coef", "algorithm.entropy_coef", same),
    ("top_entropy_quantile", "algorithm.top_entropy_quantile", same),
    ("sapo_temperature_pos", "algorithm.sapo_temperature_pos", same),
    ("sapo_temperature_neg", "algorithm.sapo_temperature_neg", same),
    ("vespo_k_pos", "algorithm.vespo_k_pos", same),
    ("vespo_lambda_pos", "algorithm.vespo_lambda_pos", same),
    ("vespo_k_neg", "algorithm.vespo_k_neg", same),
    ("vespo_lambda_neg", "algorithm.vespo_lambda_neg", same),
    ("reward_funcs", "rewards.functions", listed),
    ("reward_weights", "rewards.weights", same),
    ("num_generations", "sampling.num_generations", same),
    ("temperature", "sampling.temperature", same),
    ("top_p", "sampling.top_p", same),
    ("top_k", "sampling.top_k", top_k),
    ("min_p", "sampling.min_p", same),
    ("repetition_penalty", "sampling.repetition_penalty", same),
    ("chat_template_kwargs", "data.chat_template_kwargs", same),
)


def grpo_entries(prefix: str, *, bias_correction: Any = UNSET) -> Iterator[Entry]:
    """The shared names below ``prefix``; ``bias_correction`` is the default of use_bias_correction_kl there."""
    for name, path, convert in _NAMES:
        yield Entry(f"{prefix}{name}", path, convert=convert)
    yield Entry(f"{prefix}loss_type", "algorithm.loss_type", default="dapo", note="null is TRL's default, dapo")
    yield Entry(f"{prefix}use_bias_correction_kl", "algorithm.use_bias_correction_kl", default=bias_correction)
    yield Entry(f"{prefix}max_completion_length", "sampling.max_completion_length", default=LARGE_COMPLETIONS)
    yield together(f"{prefix}generation_kwargs", "sampling.generation_kwargs")
    yield together(f"{prefix}sync_ref_model", "algorithm.kl_reference", "true is the reference `ema`")
    yield together(f"{prefix}ref_model_mixup_alpha", "algorithm.ref_mixup_alpha")
    yield together(f"{prefix}ref_model_sync_steps", "algorithm.ref_sync_steps")
    for name, path in (
        ("correction", "sampler_correction"),
        ("mode", "sampler_correction"),
        ("cap", "sampler_correction_max"),
        ("clip_max", "sampler_correction_max"),
        ("clip_min", "sampler_correction_min"),
    ):
        yield together(f"{prefix}vllm_importance_sampling_{name}", f"algorithm.{path}")
    yield together(f"{prefix}log_completions", "logging.completions", "true is all; the tape has them in any case")
    yield together(f"{prefix}num_completions_to_print", "logging.completions", "with log_completions")
    yield from nothing("multimodal prompts are not trained on here", f"{prefix}log_multimodal")
    yield from cannot(
        "the entropy's weight is constant here (algorithm.entropy_coef); it does not adapt",
        *(f"{prefix}{name}" for name in ("use_adaptive_entropy", "entropy_target", "entropy_coef_delta")),
        *(f"{prefix}{name}" for name in ("entropy_coef_min", "entropy_coef_max")),
    )


def put_reference(translation: Translation, prefix: str, *, alpha: float, steps: int) -> None:
    """An averaged reference, with ``alpha`` and ``steps`` as defaults there."""
    if not translation.value(f"{prefix}sync_ref_model"):
        return
    translation.put("algorithm.kl_reference", "ema", f"{prefix}sync_ref_model")
    for name, path, default in (
        (f"{prefix}ref_model_mixup_alpha", "algorithm.ref_mixup_alpha", alpha),
        (f"{prefix}ref_model_sync_steps", "algorithm.ref_sync_steps", steps),
    ):
        translation.put(path, translation.value(name, default), name)


def put_sampler_correction(translation: Translation, prefix: str, *, mode: str, floor: bool) -> None:
    """The correction for a sampler of its own, which is on unless it is switched off.

    Args:
        mode: the default there.
        floor: whether truncation has the floor 1 / cap there. (There, masks get it too, which undoes them; here
            a mask masks.)
    """
    names = {key: f"{prefix}vllm_importance_sampling_{key}" for key in ("correction", "mode", "cap")}
    names |= {key: f"{prefix}vllm_importance_sampling_{key}" for key in ("clip_max", "clip_min")}
    if not translation.value(f"{prefix}use_vllm"):
        return
    correction = translation.value(names["correction"], True)
    if correction is False:
        return
    if correction is not True:
        translation.problem(names["correction"], f"expected true or false, got {describe(correction)}")
        return
    chosen = translation.value(names["mode"], mode)
    translation.put("algorithm.sampler_correction", chosen, names["mode"])
    source = names["cap"] if translation.has(names["cap"]) else names["clip_max"]
    cap = translation.value(source, 3.0)
    translation.put("algorithm.sampler_correction_max", cap, source)
    if translation.has(names["clip_min"]):
        translation.put("algorithm.sampler_correction_min", translation.value(names["clip_min"]), names["clip_min"])
    elif floor and str(chosen).endswith("truncate") and isinstance(cap, int | float) and cap > 0:
        translation.put("algorithm.sampler_correction_min", 1 / cap, source)


def put_completions(translation: Translation, prefix: str) -> None:
    """How many completions are shown: a number, all without one, none unless they are asked for."""
    shown = translation.value(f"{prefix}log_completions", False)
    if not isinstance(shown, bool):
        translation.problem(f"{prefix}log_completions", f"expected true or false, got {describe(shown)}")
    elif shown:
        name = f"{prefix}num_completions_to_print"
        translation.put("logging.completions", translation.value(name, "all"), name)


def put_generation_kwargs(translation: Translation, name: str) -> None:
    """Fields of vLLM's SamplingParams: those that every engine here knows go to their own keys."""
    fields = translation.value(name)
    if fields is None:
        return
    if not isinstance(fields, dict):
        translation.problem(name, f"expected a mapping, got {describe(fields)}")
        return
    section = find_section("sampling")
    known = {key.name: key.name for key in section.keys} if section else {}
    known |= {"max_tokens": "max_completion_length", "n": "num_generations"}
    own = {field: value for field, value in fields.items() if field in known and field != "generation_kwargs"}
    for field, value in own.items():
        translation.put(f"sampling.{known[field]}", value, name)
    rest = {field: value for field, value in fields.items() if field not in own}
    if rest:
        translation.put("sampling.generation_kwargs", rest, name)


def put_every(translation: Translation, name: str, path: str, *, max_steps: str) -> None:
    """A number of steps, or a share of ``max_steps`` below 1."""
    value = translation.value(name)
    if value is None:
        return
    steps = translation.value(max_steps)
    if isinstance(value, float) and 0 < value < 1 and isinstance(steps, int):
        value = max(1, round(value * steps))
    translation.put(path, int(value) if isinstance(value, float) and value.is_integer() else value, name)


def put_output_dir(translation: Translation) -> None:
    """Their run directory as the directory of runs and the name in it."""
    if not translation.has("output_dir"):
        return
    try:
        parent, name = run_directory(translation.value("output_dir"))
    except ConfigError as error:
        translation.problem("output_dir", error.message)
    else:
        translation.put("run.dir", parent, "output_dir")
        translation.put("run.name", name, "output_dir")


def put_quantization(translation: Translation) -> None:
    """bitsandbytes' switches."""
    for name, quantization in (("load_in_8bit", "int8"), ("load_in_4bit", "nf4")):
        if translation.value(name):
            translation.put("model.quantization", quantization, name)


def put_betas(translation: Translation, first: str, second: str) -> None:
    """AdamW's two decays as the pair that they are here."""
    if translation.has(first) or translation.has(second):
        pair = [translation.value(first, 0.9), translation.value(second, 0.999)]
        translation.put("optimizer.betas", pair, first if translation.has(first) else second)


def put_steps(translation: Translation, *, max_steps: str, epochs: str, default_epochs: float) -> None:
    """The steps, or where their file counts in epochs only, the epochs."""
    steps = translation.value(max_steps)
    if steps is not None and steps != -1:
        translation.put("run.steps", steps, max_steps)
    else:
        translation.put("run.epochs", translation.value(epochs, default_epochs), epochs)
