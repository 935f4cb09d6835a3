"""verl's and OpenRLHF's names: what they have in common with Lachesis, for `lachesis translate`.

Their files are not run as they stand, for their rewards have another signature and most of their keys place processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.config.steps import nearest_multiples
from lachesis.plugins.dialects.convert import listed, module_names, nonzero, one_of
from lachesis.plugins.dialects.table import UNSET, Dialect, Entry, Translation, together

_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."
_AGGREGATIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


def _verl() -> Iterator[Entry]:
    yield Entry(f"{_MODEL}path", "model.path")
    yield Entry(f"{_MODEL}trust_remote_code", "model.trust_remote_code")
    yield Entry(f"{_MODEL}enable_gradient_checkpointing", "model.gradient_checkpointing")
    yield Entry(f"{_MODEL}lora_alpha", "adapter.alpha")
    yield Entry(f"{_MODEL}target_modules", "adapter.targets", convert=module_names)
    yield Entry(f"{_MODEL}lora_rank", "adapter.r", convert=_rank, note="0 is none")
    yield Entry("data.train_files", "data.path", convert=_first)
    yield Entry("data.val_files", "data.eval_path", convert=_first)
    yield Entry("data.prompt_key", "data.prompt_column")
    yield Entry("data.shuffle", "data.shuffle")
    yield Entry("data.max_prompt_length", "data.max_prompt_length")
    yield Entry("data.filter_overlong_prompts", "data.overlong_prompts", convert=_dropped)
    yield Entry("data.max_response_length", "sampling.max_completion_length")
    yield together("data.train_batch_size", "batch.steps_per_generation", "prompts that are generated at once")
    yield together(f"{_ACTOR}ppo_mini_batch_size", "batch.prompts_per_step", "prompts of an optimizer step")
    yield Entry(f"{_ROLLOUT}n", "sampling.num_generations")
    for name in ("temperature", "top_p"):
        yield Entry(f"{_ROLLOUT}{name}", f"sampling.{name}")
    yield Entry(f"{_ROLLOUT}top_k", "sampling.top_k", convert=_cut)
    yield Entry(f"{_ROLLOUT}name", "engine.kind", convert=lambda name: "vllm" if name == "vllm" else UNSET)
    yield Entry(f"{_ROLLOUT}gpu_memory_utilization", "engine.gpu_memory_utilization")
    yield Entry(f"{_ROLLOUT}tensor_model_parallel_size", "engine.tensor_parallel_size")
    yield Entry(f"{_ACTOR}optim.lr", "optimizer.learning_rate")
    yield Entry(f"{_ACTOR}optim.weight_decay", "optimizer.weight_decay")
    yield Entry(f"{_ACTOR}optim.lr_warmup_steps", "optimizer.warmup_steps", convert=_warmup)
    yield Entry(f"{_ACTOR}optim.lr_warmup_steps_ratio", "optimizer.warmup_ratio")
    yield Entry(f"{_ACTOR}grad_clip", "optimizer.max_grad_norm", convert=nonzero)
    yield Entry(f"{_ACTOR}clip_ratio", "algorithm.epsilon")
    yield Entry(f"{_ACTOR}clip_ratio_low", "algorithm.epsilon")
    yield Entry(f"{_ACTOR}clip_ratio_high", "algorithm.epsilon_high")
    yield Entry(f"{_ACTOR}ppo_epochs", "algorithm.num_iterations")
    yield Entry(f"{_ACTOR}entropy_coeff", "algorithm.entropy_coef")
    yield Entry(f"{_ACTOR}kl_loss_coef", "algorithm.beta", note="with use_kl_loss")
    yield Entry(f"{_ACTOR}loss_agg_mode", "algorithm.loss_type", convert=one_of(_AGGREGATIONS), default="dapo")
    yield Entry("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale_rewards", convert=_scaled)
    yield Entry("trainer.total_epochs", "run.epochs", convert=float)
    yield Entry("trainer.total_training_steps", "run.steps")
    yield Entry("trainer.save_freq", "checkpoint.every_steps", convert=_frequency)
    yield Entry("trainer.test_freq", "evaluation.every_steps", convert=_frequency)
    yield Entry("trainer.experiment_name", "run.name")


def _openrlhf() -> Iterator[Entry]:
    for names, path in (
        (("pretrain", "actor.model_name_or_path"), "model.path"),
        (("prompt_data", "data.prompt_dataset"), "data.path"),
        (("input_key", "data.input_key"), "data.prompt_column"),
        (("apply_chat_template", "data.apply_chat_template"), "data.conversations"),
        (("prompt_max_len", "data.prompt_max_len"), "data.max_prompt_length"),
        (("generate_max_len", "rollout.max_new_tokens"), "sampling.max_completion_length"),
        (("n_samples_per_prompt", "rollout.n_samples_per_prompt"), "sampling.num_generations"),
        (("temperature", "rollout.temperature"), "sampling.temperature"),
        (("top_p", "rollout.top_p"), "sampling.top_p"),
        (("actor_learning_rate", "actor.adam.lr"), "optimizer.learning_rate"),
        (("lr_warmup_ratio", "actor.lr_warmup_ratio"), "optimizer.warmup_ratio"),
        (("max_norm", "actor.max_norm"), "optimizer.max_grad_norm"),
        (("eps_clip", "actor.eps_clip"), "algorithm.epsilon"),
        (("eps_clip_low_high.0",), "algorithm.epsilon"),
        (("init_kl_coef", "algo.kl.init_coef"), "algorithm.beta"),
        (("max_epochs", "train.max_epochs"), "algorithm.num_iterations"),
        (("entropy_loss_coef", "actor.entropy_coef"), "algorithm.entropy_coef"),
        (("gradient_checkpointing", "actor.gradient_checkpointing_enable"), "model.gradient_checkpointing"),
        (("lora_alpha", "ds.lora.alpha"), "adapter.alpha"),
        (("save_steps", "ckpt.save_steps"), "checkpoint.every_steps"),
        (("eval_steps", "eval.steps"), "evaluation.every_steps"),
        (("seed", "train.seed"), "run.seed"),
    ):
        converted = _frequency if path.endswith("every_steps") else _same
        for name in names:
            yield Entry(name, path, convert=converted)
    for name in ("rollout_batch_size", "rollout.batch_size"):
        yield together(name, "batch.steps_per_generation", "prompts that are generated at once")
    for name in ("train_batch_size", "train.batch_size"):
        yield together(name, "batch.prompts_per_step", "completions of an optimizer step")
    for name in ("num_episodes", "train.num_episodes"):
        yield Entry(name, "run.epochs", convert=float)
    for name in ("lora_rank", "ds.lora.rank"):
        yield Entry(name, "adapter.r", convert=_rank)


def _same(value: Any) -> Any:
    return value


def _first(value: Any) -> Any:
    return listed(value)[0] if value else UNSET


def _rank(value: Any) -> Any:
    return value if value else UNSET


def _dropped(value: Any) -> Any:
    return "drop" if value else "error"


def _cut(value: Any) -> Any:
    return max(0, value) if isinstance(value, int) else value


def _warmup(value: Any) -> Any:
    return UNSET if isinstance(value, int) and value < 0 else value


def _frequency(value: Any) -> Any:
    return max(0, value) if isinstance(value, int) else value


def _scaled(value: Any) -> Any:
    return {True: "group", False: "none"}.get(value, value)


# Of what is generated at once, and of an optimizer step.
_GENERATED = ("data.train_batch_size", "rollout_batch_size", "rollout.batch_size")
_STEP = (f"{_ACTOR}ppo_mini_batch_size", "train_batch_size", "train.batch_size")
_VERL_STEP = 256  # verl's ppo_mini_batch_size
VERL = Dialect("verl", list(_verl()))
OPENRLHF = Dialect("OpenRLHF", list(_openrlhf()), prefix="--")
_MARKS: Mapping[str, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref",),
    "OpenRLHF": ("prompt_data", "data.prompt_dataset", "rollout_batch_size", "rollout.batch_size"),
}


def put_generation(translation: Translation) -> None:
    """What is generated at once as whole optimizer steps; a step of neither written is all of it.

    verl counts prompts in both, and has 256 in a step where it does not say; OpenRLHF counts completions in a step.
    """
    verl = translation.dialect is VERL
    whole = next((name for name in _GENERATED if name in translation.dialect.entries and translation.has(name)), None)
    part = next((name for name in _STEP if name in translation.dialect.entries and translation.has(name)), None)
    group = translation.document.data.get("sampling", {}).get("num_generations", 1)
    prompts = None if whole is None else translation.whole(whole, 1)
    written = None if part is None else translation.whole(part, 1)
    step = written if verl or written is None else written // group
    if part is not None and written is not None and not verl and (written % group or not step):
        translation.problem(part, f"{written} completions are no whole groups of {group}")
        return
    if prompts is None or (part is not None and step is None):
        return
    step = min(prompts, _VERL_STEP if verl else prompts) if step is None else step
    if prompts % step:
        fitting = " or ".join(map(str, nearest_multiples(prompts, of=step)))
        translation.problem(
            str(whole), f"{prompts} prompts are no multiple of the {step} of an optimizer step; {fitting} are"
        )
        return
    translation.put("batch.prompts_per_step", step, part or str(whole))
    if prompts > step:
        translation.put("batch.steps_per_generation", prompts // step, str(whole))


def other_system(names: Mapping[str, Any]) -> str | None:
    """Whose names these are, flat and dotted: verl's, OpenRLHF's, or nobody's that is known here."""
    for system, marks in _MARKS.items():
        if any(name == mark or name.startswith(f"{mark}.") for name in names for mark in marks):
            return system
    return None
