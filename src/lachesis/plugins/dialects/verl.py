"""verl's keys (`ppo_trainer.yaml`, 0.5 to 0.9): translated exactly, refused by name, or without influence on training.

Defaults of verl's that differ from ours are written out: https://github.com/volcengine/verl, verl/trainer/config.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lachesis.common.json_values import is_list
from lachesis.config.document import Document, describe
from lachesis.plugins.dialects.convert import module_names, one_of
from lachesis.plugins.dialects.grpo import put_generation
from lachesis.plugins.dialects.mixtures import put_dropped_prompts
from lachesis.plugins.dialects.table import Dialect, Translation, read_names
from lachesis.plugins.dialects.words import Words, read_table

_ACTOR = "actor_rollout_ref.actor."
_OPTIM = f"{_ACTOR}optim."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."
_POLICY_LOSS = f"{_ACTOR}policy_loss."
_CORRECTION = "algorithm.rollout_correction."
_GENERATED, _STEP = "data.train_batch_size", f"{_ACTOR}ppo_mini_batch_size"
# verl's global step is a generation with all optimizer steps on it, after which the schedule moves once.
_IN_GENERATIONS = ("run.steps", "checkpoint.every_steps", "evaluation.every_steps", "optimizer.warmup_steps")
_TABLES = read_table("verl")


class _Option(NamedTuple):
    """Option of a loss: our key, and verl's default."""

    key: str
    default: float


class _Words(Words):
    up_to_03: list[str]
    aggregations: dict[str, str]
    normalizations: dict[str, str]
    schedules: dict[str, str]
    estimators: dict[str, tuple[str, str]]
    no_estimator: dict[str, str]
    losses_of_sequences: dict[str, str]
    losses_of_tokens: dict[str, str]
    options: dict[str, dict[str, _Option]]
    kl_estimators: dict[str, str]


_WORDS = _Words.read("verl")
_SECTIONS = ("model", "data", "sampling", "loss", "optimizer", "run", "rewards")
VERL = Dialect("verl", list(read_names("verl", *_SECTIONS)), open_sections=_TABLES["placement"])


def translate(document: Document) -> Translation:
    """Translate verl's document to a canonical one."""
    translation = Translation(document, VERL)
    translation.run()
    early = _written_for_03(translation)
    _put_files(translation)
    _put_truncation(translation)
    _put_loss(translation, early=early)
    _put_kl(translation, early=early)
    _put_correction(translation)
    _put_schedule(translation)
    _put_adapter(translation)
    _put_engine(translation)
    _put_evaluation(translation)
    _put_filter(translation)
    prompts = translation.whole(_GENERATED, 1024)
    step = translation.whole(_STEP, min(256, prompts or 256))
    if early and prompts and step:
        step = min(prompts, step)  # later versions refuse a part that is larger than the whole
    put_generation(translation, prompts, step, written=_GENERATED, part=_STEP, counted=_IN_GENERATIONS)
    translation.finish()
    return translation


def _written_for_03(translation: Translation) -> bool:
    """Return True for a file of a version up to 0.3, and say which defaults count; add a term that they had."""
    mark = next(filter(translation.has, _WORDS.up_to_03), None)
    if mark is None:
        return False
    entropy = f"{_ACTOR}entropy_coeff"
    if not translation.has(entropy):
        translation.put("algorithm.entropy_coef", 0.001, entropy)
    if mark.endswith("grad_offload") and not translation.has("data.filter_overlong_prompts"):
        translation.put("data.overlong_prompts", "drop", "data.filter_overlong_prompts")  # always, up to 0.2
    translation.warning(
        mark,
        "a key of verl up to 0.3, whose defaults are taken: entropy_coeff 0.001, clip_ratio on both sides without "
        "clip_ratio_c, and without use_kl_loss a KL in the reward of 0.001",
    )
    return True


def _put_filter(translation: Translation) -> None:
    """Set the replacement of groups without signal; 0 generations there mean as many as needed."""
    name, metric = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric"
    if translation.switch(name) is not True:
        return
    translation.put(
        "pipeline.refill_zero_signal", translation.value("algorithm.filter_groups.max_num_gen_batches", 0) or 100, name
    )
    if (asked := translation.value(metric, "score")) not in ("score", "acc", "seq_reward", "seq_final_reward"):
        translation.problem(metric, f"{describe(asked)}: Lachesis replaces groups whose rewards are equal; write score")


def _put_schedule(translation: Translation) -> None:
    """Set the schedule, by default a cosine if VeOmni trains, and its end."""
    veomni = "veomni" in (translation.value(f"{_ACTOR}strategy"), translation.value("model_engine"))
    names = [f"{_OPTIM}{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style", "decay_type")]
    name = next(filter(translation.has, names), names[0])
    kind = translation.value(name, "cosine" if veomni else "constant")
    translation.put_converted("optimizer.schedule", kind, name, one_of(_WORDS.schedules))
    if translation.document.data["optimizer"].get("warmup_steps") is not None:
        translation.put("optimizer.warmup_ratio", 0.0, f"{_OPTIM}lr_warmup_steps")  # steps win there unless negative
    rate = translation.value(f"{_OPTIM}lr", 1e-6)
    for lowest in (f"{_OPTIM}min_lr", f"{_OPTIM}lr_min"):
        value = translation.value(lowest, 0)
        if isinstance(value, int | float) and isinstance(rate, int | float) and value and rate:
            translation.put("optimizer.min_lr_ratio", value / rate, lowest)


def _put_correction(translation: Translation) -> None:
    """Set the weight of the trainer's probability over the engine's, which verl truncates from above."""
    names = (f"{_CORRECTION}rollout_is", "algorithm.rollout_is")
    name = next(filter(translation.has, names), names[0])
    cap = translation.value(f"{_ACTOR}tis_imp_ratio_cap", -1)
    level = translation.value(name)
    bound = translation.value(f"{name}_threshold", 2.0)
    if level is None and isinstance(cap, int | float) and cap > 0:
        level, bound, name = "token", cap, f"{_ACTOR}tis_imp_ratio_cap"
    translation.put("algorithm.sampler_correction", "none", name)
    if level is None or level is False:
        return
    low, underscore, high = str(bound).rpartition("_")
    try:
        limits = (float(low) if underscore else None, float(high))
    except ValueError:
        translation.problem(f"{name}_threshold", f"expected a number, or two such as 0.5_5.0, got {describe(bound)}")
        return
    if level not in ("token", "sequence"):
        translation.problem(name, f"{describe(level)} has no counterpart; Lachesis has token and sequence")
        return
    # Two bounds mean IcePop's: a weight outside them is 0.
    translation.put("algorithm.sampler_correction", f"{level}_{'mask' if underscore else 'truncate'}", name)
    translation.put("algorithm.sampler_correction_max", limits[1], f"{name}_threshold")
    if limits[0] is not None:
        translation.put("algorithm.sampler_correction_min", limits[0], f"{name}_threshold")


def _put_evaluation(translation: Translation) -> None:
    """Set the sampling of held-out problems: greedy unless the file samples there."""
    start = f"{_ROLLOUT}val_kwargs."
    if translation.switch(f"{start}do_sample"):
        translation.put("evaluation.temperature", translation.value(f"{start}temperature", 0), f"{start}temperature")
        translation.put("evaluation.samples_per_problem", translation.value(f"{start}n", 1), f"{start}n")
    for name, path in (("val_temperature", "temperature"), ("n_val", "samples_per_problem")):
        translation.copy(f"{_ROLLOUT}{name}", f"evaluation.{path}")


def _put_files(translation: Translation) -> None:
    files = _listed(translation, "data.train_files")
    if files:
        translation.put("data.path", files[0], "data.train_files")
    if len(files) > 1:
        translation.put("data.more", [{"path": path} for path in files[1:]], "data.train_files")
    _put_rows(translation, files)
    held_out = _listed(translation, "data.val_files")
    if held_out:
        translation.put("data.eval_path", held_out[0], "data.val_files")
    if len(held_out) > 1:
        translation.warning("data.val_files", f"Lachesis evaluates on one file: {held_out[0]} is used")


def _put_rows(translation: Translation, files: list[str]) -> None:
    """Set the number of rows that are used, which verl samples from all files if it shuffles; -1 is all."""
    name = "data.train_max_samples"
    if translation.value(name, -1) == -1 or (rows := translation.whole(name, 1)) is None:
        return
    if len(files) > 1:
        translation.problem(name, "counts the rows of all files together; write data.more, with a split for each")
        return
    translation.put("data.split", f"train[:{rows}]", name)
    if translation.value("data.shuffle", True) is not False:
        translation.warning(
            name, "the first rows are taken here; verl draws them at random unless data.shuffle is False"
        )


def _listed(translation: Translation, name: str) -> list[str]:
    value = translation.value(name, [])
    found = [value] if isinstance(value, str) else value
    if is_list(found) and all(isinstance(one, str) for one in found):
        return [str(one) for one in found]
    translation.problem(name, f"expected a path or a list of paths, got {describe(value)}")
    return []


def _put_truncation(translation: Translation) -> None:
    """Leave out the prompts that verl truncates. If verl leaves out long prompts, none are truncated."""
    name = "data.truncation"
    if translation.text(name, "error") != "error" and translation.value("data.filter_overlong_prompts") is not True:
        put_dropped_prompts(translation, name)


def _put_loss(translation: Translation, *, early: bool) -> None:
    _put_advantages(translation)
    mode, name = translation.text(f"{_POLICY_LOSS}loss_mode", "vanilla").replace("-", "_"), f"{_POLICY_LOSS}loss_mode"
    low, high = _clip(translation, "low", early=early), _clip(translation, "high", early=early)
    bound = translation.value(f"{_ACTOR}clip_ratio_c", None if early else 3.0)
    if mode in ("vanilla", "gspo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl"):
        translation.put("algorithm.epsilon", low, f"{_ACTOR}clip_ratio_low")
        translation.put("algorithm.epsilon_high", high, f"{_ACTOR}clip_ratio_high")
    if mode in ("vanilla", "dppo_tv", "dppo_kl") and bound is not None:
        translation.put("algorithm.delta", bound, f"{_ACTOR}clip_ratio_c")
    if mode == "gspo":
        translation.put("algorithm.importance_sampling_level", "sequence", name)
    if mode in _WORDS.losses_of_sequences:
        translation.put("algorithm.loss_type", _WORDS.losses_of_sequences[mode], name)
        translation.value(f"{_ACTOR}loss_agg_mode")  # verl takes means over sequences for these, whatever the key says
    elif mode == "vanilla":
        _put_normalization(translation)
    elif mode in _WORDS.losses_of_tokens:
        translation.put("algorithm.loss_type", _WORDS.losses_of_tokens[mode], name)
        _put_normalization(translation, key="algorithm.normalization")
    else:
        known = ", ".join(("vanilla", *_WORDS.losses_of_sequences, *_WORDS.losses_of_tokens))
        translation.problem(name, f"{mode} has no counterpart; Lachesis has {known}")
    if mode == "cispo":
        _put_cispo(translation, low=low, high=high)
    for key, (ours, default) in _WORDS.options.get(mode, {}).items():
        newer = key.replace(f"{_ACTOR}tau", f"{_POLICY_LOSS}tau")
        name_of_option = newer if translation.has(newer) else key
        translation.put(ours, translation.value(name_of_option, default), name_of_option)
    if mode in ("clip_cov", "kl_cov"):
        translation.warning(name, "verl chooses tokens within each micro-batch, Lachesis from the whole step")


def _put_advantages(translation: Translation) -> None:
    name = "algorithm.adv_estimator"
    estimator = translation.text(name, "gae")
    if estimator not in _WORDS.estimators:
        reason = _WORDS.no_estimator.get(estimator, "has no counterpart")
        translation.problem(name, f"{estimator} {reason}; write one of {', '.join(_WORDS.estimators)}")
        return
    baseline, scale = _WORDS.estimators[estimator]
    if estimator == "reinforce_plus_plus" and translation.value("algorithm.gamma", 1.0) not in (1, 1.0):
        translation.problem("algorithm.gamma", "a completion's reward comes at its end, undiscounted; write 1.0")
    translation.value("algorithm.gamma")
    if translation.switch("algorithm.norm_adv_by_std_in_grpo") is False and scale == "group":
        scale = "none"
    translation.put("algorithm.baseline", baseline, name)
    translation.put("algorithm.scale_rewards", scale, "algorithm.norm_adv_by_std_in_grpo")


def _put_normalization(translation: Translation, *, key: str = "algorithm.loss_type") -> None:
    """Set the loss type that has verl's aggregation, or the key for the aggregation alone."""
    name = f"{_ACTOR}loss_agg_mode"
    aggregation = translation.text(name, "token-mean")
    if aggregation not in _WORDS.normalizations:
        translation.problem(name, f"{aggregation} has no counterpart; Lachesis has {', '.join(_WORDS.normalizations)}")
        return
    factor, length = f"{_ACTOR}loss_scale_factor", translation.value("data.max_response_length", 512)
    if aggregation == "seq-mean-token-sum-norm" and translation.value(factor, length) != length:
        translation.problem(factor, f"sums are divided by data.max_response_length here, {length}; write that")
    if key == "algorithm.loss_type" and aggregation in _WORDS.aggregations:
        translation.put(key, _WORDS.aggregations[aggregation], name)
    else:
        translation.put("algorithm.normalization", _WORDS.normalizations[aggregation], name)


def _clip(translation: Translation, side: str, *, early: bool) -> Any:
    """Return a bound; from 0.4 on ``clip_ratio`` counts only where both others are null, and they are 0.2."""
    common, name = translation.value(f"{_ACTOR}clip_ratio", 0.2), f"{_ACTOR}clip_ratio_{side}"
    if early:
        return translation.value(name, common)
    if common != 0.2 and not translation.has(name):
        text = f"{common} has no effect in verl, where {name} is 0.2 by default; write {name}"
        translation.problem(f"{_ACTOR}clip_ratio", text)
    return translation.value(name, 0.2)


def _put_cispo(translation: Translation, *, low: Any, high: Any) -> None:
    """Set CISPO's bound: verl clips the ratio to 1 - low and 1 + high; ours has only the upper bound, unchanged."""
    if not all(isinstance(value, int | float) for value in (low, high)):
        translation.problem(f"{_ACTOR}clip_ratio_high", f"expected numbers, got {describe(low)} and {describe(high)}")
        return
    if low < 1:
        translation.problem(
            f"{_ACTOR}clip_ratio_low", f"{low} bounds the ratio from below, unlike CISPO here; write 1 or more"
        )
    translation.put("algorithm.epsilon_high", 1 + high, f"{_ACTOR}clip_ratio_high")


def _put_kl(translation: Translation, *, early: bool) -> None:
    """Translate the KL term of the loss, or that of the reward; verl can have both from 0.4 on."""
    in_loss, told = translation.switch(f"{_ACTOR}use_kl_loss") is True, translation.switch("algorithm.use_kl_in_reward")
    in_reward = told is True or (early and told is None and not in_loss)
    if in_loss:
        if in_reward:
            translation.problem("algorithm.use_kl_in_reward", "Lachesis has one KL term, but use_kl_loss is True too")
        _put_kl_term(translation, f"{_ACTOR}kl_loss_type", "low_var_kl", weight=f"{_ACTOR}kl_loss_coef")
        # verl does not weight it.
        translation.put("algorithm.use_bias_correction_kl", False, f"{_ACTOR}kl_loss_type")
    elif in_reward:
        by_token = translation.text("algorithm.adv_estimator", "gae") == "reinforce_plus_plus"
        place = "reward_to_go" if by_token else "reward"
        translation.put("algorithm.kl_placement", place, "algorithm.use_kl_in_reward")
        _put_kl_term(translation, "algorithm.kl_penalty", "kl", weight="algorithm.kl_ctrl.kl_coef")
        if translation.text("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            for name, ours, default in (("target_kl", "kl_target", 0.1), ("horizon", "kl_horizon", 10_000)):
                name = f"algorithm.kl_ctrl.{name}"
                translation.put(f"algorithm.{ours}", translation.value(name, default), name)
    elif told is None and translation.value("algorithm.kl_ctrl.kl_coef"):
        text = "counts with algorithm.use_kl_in_reward from verl 0.4 on; up to 0.3 it did without it: write that"
        translation.warning("algorithm.kl_ctrl.kl_coef", text)


def _put_kl_term(translation: Translation, name: str, default: str, *, weight: str) -> None:
    kind = translation.text(name, default)
    if kind.endswith("+"):  # the value of the estimator, but k2's gradient, which a term of a reward does not have
        kind = kind.removesuffix("+") if name == "algorithm.kl_penalty" else "k2"
    translation.put_converted("algorithm.kl_estimator", kind, name, one_of(_WORDS.kl_estimators))
    translation.put("algorithm.beta", translation.value(weight, 0.001), weight)


def _put_adapter(translation: Translation) -> None:
    rank = translation.value(f"{_MODEL}lora_rank", 0)
    alpha = translation.value(f"{_MODEL}lora_alpha", 16)
    targets = translation.value(f"{_MODEL}target_modules", "all-linear")
    if rank or translation.has(f"{_MODEL}lora_adapter_path"):
        translation.put("adapter.kind", "lora", f"{_MODEL}lora_rank")
        translation.copy(f"{_MODEL}lora_adapter_path", "adapter.path")
    if rank:
        translation.put("adapter.r", rank, f"{_MODEL}lora_rank")
        translation.put("adapter.alpha", alpha, f"{_MODEL}lora_alpha")
        translation.put("adapter.targets", module_names(targets), f"{_MODEL}target_modules")


def _put_engine(translation: Translation) -> None:
    """Set the engine: vLLM for each of verl's servers, and the trainer itself for ``hf``."""
    name, replay = f"{_ROLLOUT}name", f"{_ACTOR}router_replay.mode"
    engine = translation.value(name)
    if engine in ("vllm", "sglang", "trtllm"):
        translation.put("engine.kind", "vllm", name)
        translation.put("bridge.kind", "broadcast", name)
        translation.copy(f"{_ROLLOUT}gpu_memory_utilization", "engine.gpu_memory_utilization")
        translation.copy(f"{_ROLLOUT}tensor_model_parallel_size", "engine.tensor_parallel_size")
    mode = translation.text(replay, "disabled")
    if mode not in ("disabled", "R3"):
        translation.problem(replay, f"{mode} has no counterpart; Lachesis has R3, and disabled")
    returned = translation.switch(f"{_ROLLOUT}enable_rollout_routing_replay")
    if mode == "R3" or (returned and mode != "disabled"):
        translation.put("algorithm.router_replay", True, replay)
