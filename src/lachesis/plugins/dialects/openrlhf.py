"""OpenRLHF's flags, of 0.8 (`--eps_clip`) and 0.10 (`--actor.eps_clip`): translated exactly, or refused by name.

Defaults of OpenRLHF's that differ from ours are written out: https://github.com/OpenRLHF/OpenRLHF,
openrlhf/cli/train_ppo_ray.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.common.json_values import is_list
from lachesis.config.document import Document, describe
from lachesis.plugins.dialects.convert import frequency, module_names, nonzero, one_of
from lachesis.plugins.dialects.grpo import put_generation
from lachesis.plugins.dialects.table import Dialect, Entry, Translation, read_names
from lachesis.plugins.dialects.words import Words, read_table

_TABLES = read_table("openrlhf")
_ALL_SAMPLES = 100_000_000  # OpenRLHF's default


class _Words(Words):
    open: list[str]
    estimators: dict[str, tuple[str, str]]
    corrections: dict[str, str]
    schedules: dict[str, str]


_WORDS = _Words.read("openrlhf")


def _entries() -> Iterator[Entry]:
    for names, path, *default in _TABLES["sets"]:
        for place, name in enumerate(names):
            yield Entry(name, path, **({"default": default[0]} if default and not place else {}))
    for names, path in _TABLES["together"]:
        for name in names:
            yield Entry(name, path, "together")
    yield from read_names("openrlhf", "rest")


_ALIASES = {names[0]: names[1:] for names, _ in _TABLES["together"]}
OPENRLHF = Dialect("OpenRLHF", list(_entries()), open_sections=_WORDS.open, prefix="--", aliases=_ALIASES)


def translate(document: Document) -> Translation:
    """Translate OpenRLHF's document to a canonical one."""
    translation = Translation(document, OPENRLHF)
    translation.run()
    split, most = translation.value("data.prompt_split", "train"), translation.value("data.max_samples", _ALL_SAMPLES)
    if most != _ALL_SAMPLES:
        name = "data.max_samples"
        translation.put("data.split", f"{split}[:{translation.whole(name, 1)}]", name)
    else:
        translation.copy("data.prompt_split", "data.split")
    if translation.value("ref_pretrain") not in (None, translation.document.data.get("model", {}).get("path")):
        translation.problem("ref_pretrain", "the reference is the model from before training; write that of --pretrain")
    _put_lengths(translation)
    _put_loss(translation)
    _put_kl(translation)
    _put_optimizer(translation)
    _put_correction(translation)
    _put_rest(translation)
    _put_batch(translation)
    translation.finish()
    return translation


def _put_batch(translation: Translation) -> None:
    """Set the prompts of a generation and of an optimizer step, which OpenRLHF counts in completions."""
    part, group = "train.batch_size", translation.document.data["sampling"]["num_generations"]
    prompts = translation.whole("rollout.batch_size", 1024)
    completions = translation.whole(part, 128)
    if completions is None or not isinstance(group, int):
        return
    if completions % group:
        translation.problem(part, f"{completions} completions are not whole groups of {group}")
        return
    counted = ("checkpoint.every_steps", "evaluation.every_steps")  # not the schedule, which its optimizer moves
    put_generation(translation, prompts, completions // group, written="rollout.batch_size", part=part, counted=counted)


def _put_correction(translation: Translation) -> None:
    """Set the weight of the trainer's probability over vLLM's, within OpenRLHF's two bounds, or under one alone."""
    start = "algo.advantage.is_correction_"
    name, level = f"{start}enable", translation.value(f"{start}level", "off")
    written = f"{start}mode" if level != "off" else f"{start}type"
    kind = translation.value(written, "mask" if level != "off" else "tis")
    bounds = translation.value(f"{start}threshold", [0.5, 5.0])
    translation.put("algorithm.sampler_correction", "none", name)
    if not translation.value(name) and level == "off":
        return
    low, high = bounds if is_list(bounds) and len(bounds) == 2 else (None, bounds)
    if level not in ("off", "token") or kind == "seq-mask-tis":
        at = f"{start}level" if level != "off" else written
        translation.problem(
            at, "leaves out a completion by its mean ratio and weights tokens of others, which has no counterpart; "
            "weight tokens alone"
        )  # fmt: skip
    elif translation.value("actor.policy_loss_type", "ppo") != "ppo":
        translation.problem(name, "it changes the ratio of gspo itself there, which has no counterpart; take it out")
    elif not isinstance(high, int | float):
        translation.problem(f"{start}threshold", f"expected one or two numbers, got {describe(bounds)}")
    else:
        translation.put_converted("algorithm.sampler_correction", kind, written, one_of(_WORDS.corrections))
        translation.put("algorithm.sampler_correction_max", high, f"{start}threshold")
        if low:
            translation.put("algorithm.sampler_correction_min", low, f"{start}threshold")
    if translation.has("enable_vllm_is_correction") and not translation.has(f"{start}threshold"):
        translation.warning(f"{start}threshold", "0.5 and 5 from 0.9.3 on, and 2 without a lower bound before it")


def _put_lengths(translation: Translation) -> None:
    """Set the lengths: 0.10 bounds prompt and completion together, 0.8 each (1,024 tokens by default)."""
    old = any(translation.has(name) for name in ("pretrain", "prompt_data", "generate_max_len"))
    if old or translation.has("data.prompt_max_len"):
        longest = translation.value("data.prompt_max_len", 1024)
        translation.put("data.max_prompt_length", longest, "data.prompt_max_len")
    written = translation.value("rollout.max_new_tokens", 1024 if old else None)
    if written is not None:
        translation.put("sampling.max_completion_length", written, "rollout.max_new_tokens")
        return
    whole, name = translation.value("data.max_len", 2048), "data.max_len"
    translation.put("sampling.max_completion_length", whole, name)
    translation.warning(
        name, f"there prompt and completion have {whole} tokens together; here a completion alone may have as many"
    )


def _put_loss(translation: Translation) -> None:
    estimator = translation.value("algo.advantage.estimator", "gae")
    baseline, scale = _WORDS.estimators.get(estimator, ("group_mean", "group"))
    if estimator not in _WORDS.estimators:
        needs = "trains a critic, which Lachesis does not have" if estimator == "gae" else "has no counterpart"
        translation.problem(
            "algo.advantage.estimator", f"{estimator} {needs}; write one of {', '.join(_WORDS.estimators)}"
        )
    if translation.value("algo.advantage.no_std_norm"):
        if scale == "tokens":
            translation.problem("algo.advantage.no_std_norm", f"with {estimator} it has no counterpart; remove it")
        scale = "none"
    translation.put("algorithm.baseline", baseline, "algo.advantage.estimator")
    translation.put("algorithm.scale_rewards", scale, "algo.advantage.estimator")
    aggregation = translation.value("actor.loss_agg_mode", "token-mean")
    kinds = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}
    translation.put_converted("algorithm.loss_type", aggregation, "actor.loss_agg_mode", one_of(kinds))
    kind = translation.value("actor.policy_loss_type", "ppo")
    if kind == "gspo":
        translation.put("algorithm.importance_sampling_level", "sequence", "actor.policy_loss_type")
        translation.put("algorithm.loss_type", "grpo", "actor.policy_loss_type")
    elif kind != "ppo":
        translation.problem("actor.policy_loss_type", f"{kind} has no counterpart; Lachesis has ppo and gspo")
    clip = translation.value("actor.eps_clip", 0.2)
    bounds = translation.value("actor.eps_clip_low_high", [clip, clip])
    if not is_list(bounds) or len(bounds) != 2:
        translation.problem("actor.eps_clip_low_high", f"expected two numbers, got {describe(bounds)}")
        return
    translation.put("algorithm.epsilon", bounds[0], "actor.eps_clip_low_high")
    translation.put("algorithm.epsilon_high", bounds[1], "actor.eps_clip_low_high")


def _put_kl(translation: Translation) -> None:
    """Translate the KL term, which OpenRLHF takes off each token's reward, summed over later ones, or into the loss."""
    if translation.value("algo.kl.init_coef", 0.01) in (0, 0.0):
        return
    translation.put("algorithm.beta", translation.value("algo.kl.init_coef", 0.01), "algo.kl.init_coef")
    translation.put("algorithm.kl_estimator", translation.value("algo.kl.estimator", "k1"), "algo.kl.estimator")
    name = "algo.kl.use_loss"
    if translation.value("algo.kl.use_loss"):
        translation.put("algorithm.use_bias_correction_kl", False, name)
    else:
        translation.put("algorithm.kl_placement", "reward_to_go", name)
    if translation.value("algo.kl.target") is not None:
        translation.copy("algo.kl.target", "algorithm.kl_target")
        translation.put("algorithm.kl_horizon", translation.value("algo.kl.horizon", 10_000), "algo.kl.horizon")


def _put_optimizer(translation: Translation) -> None:
    kind = translation.value("actor.lr_scheduler", "cosine_with_min_lr")
    translation.put_converted("optimizer.schedule", kind, "actor.lr_scheduler", one_of(_WORDS.schedules))
    if kind != "cosine_with_min_lr":
        translation.put("optimizer.min_lr_ratio", 0.0, "actor.lr_scheduler")
    if kind == "constant":
        translation.put("optimizer.warmup_ratio", 0.0, "actor.lr_scheduler")
    norm = nonzero(translation.value("actor.max_norm", 1.0))
    translation.put("optimizer.max_grad_norm", norm, "actor.max_norm")


def _put_rest(translation: Translation) -> None:
    if rank := translation.value("ds.lora.rank", 0):
        translation.put("adapter.kind", "lora", "ds.lora.rank")
        translation.put("adapter.r", rank, "ds.lora.rank")
        translation.put("adapter.alpha", translation.value("ds.lora.alpha", 16), "ds.lora.alpha")
        targets = translation.value("ds.lora.target_modules", "all-linear")
        translation.put("adapter.targets", module_names(targets), "ds.lora.target_modules")
    translation.put_converted(
        "checkpoint.every_steps", translation.value("ckpt.save_steps"), "ckpt.save_steps", frequency
    )
    if translation.has("eval.dataset"):
        translation.put_converted("evaluation.every_steps", translation.value("eval.steps"), "eval.steps", frequency)
    if translation.value("algo.dynamic_filtering_enable"):
        bounds = translation.value("algo.dynamic_filtering_range", [0, 1])
        if list(bounds) not in ([0, 1], [0.0, 1.0]):
            translation.problem(
                "algo.dynamic_filtering_range", f"Lachesis replaces groups of equal rewards, not {bounds}"
            )
        translation.put("pipeline.refill_zero_signal", 100, "algo.dynamic_filtering_enable")
    if translation.value("vllm.num_engines"):
        translation.put("engine.kind", "vllm", "vllm.num_engines")
        translation.put("bridge.kind", "broadcast", "vllm.num_engines")
        translation.copy("vllm.gpu_memory_utilization", "engine.gpu_memory_utilization")
        translation.copy("vllm.tensor_parallel_size", "engine.tensor_parallel_size")
