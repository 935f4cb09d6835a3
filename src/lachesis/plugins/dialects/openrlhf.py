"""OpenRLHF's flags, of 0.8 (`--eps_clip`) and 0.10 (`--actor.eps_clip`): translated exactly, or refused by name.

Defaults of OpenRLHF's that differ from ours are written out: https://github.com/OpenRLHF/OpenRLHF,
openrlhf/cli/train_ppo_ray.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lachesis.common.json_values import is_list
from lachesis.config.document import Document, describe
from lachesis.plugins.dialects.convert import module_names, nonzero
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


OPENRLHF = Dialect("OpenRLHF", list(_entries()), open_sections=_WORDS.open, prefix="--")


class _Reader:
    """Values of a file under either name of an option."""

    def __init__(self, translation: Translation) -> None:
        self.translation = translation

    def name(self, new: str) -> str:
        """Return the name that the file has, the new one if it has neither."""
        names = next((names for names, _ in _TABLES["together"] if names[0] == new), (new,))
        return next((name for name in names if self.translation.has(name)), new)

    def value(self, new: str, default: Any = None) -> Any:
        return self.translation.value(self.name(new), default)

    def put(self, path: str, new: str, default: Any = None) -> None:
        """Set a key of ours to the file's value, or to ``default`` if that is not None."""
        value = self.value(new, default)
        if value is not None:
            self.translation.put(path, value, self.name(new))

    def problem(self, new: str, message: str) -> None:
        self.translation.problem(self.name(new), message)


def translate(document: Document) -> Translation:
    """Translate OpenRLHF's document to a canonical one."""
    translation = Translation(document, OPENRLHF)
    translation.run()
    reader = _Reader(translation)
    reader.put("model.path", "actor.model_name_or_path")
    reader.put("data.path", "data.prompt_dataset")
    reader.put("data.prompt_column", "data.input_key", "input")
    reader.put("data.eval_path", "eval.dataset")
    split, most = reader.value("data.prompt_split", "train"), reader.value("data.max_samples", _ALL_SAMPLES)
    if most != _ALL_SAMPLES:
        name = reader.name("data.max_samples")
        reader.translation.put("data.split", f"{split}[:{reader.translation.whole(name, 1)}]", name)
    else:
        reader.put("data.split", "data.prompt_split")
    reader.put("run.epochs", "train.num_episodes", 1)
    _put_lengths(reader)
    _put_loss(reader)
    _put_kl(reader)
    _put_optimizer(reader)
    _put_correction(reader)
    _put_rest(reader)
    _put_batch(reader)
    translation.finish()
    return translation


def _put_batch(reader: _Reader) -> None:
    """Set the prompts of a generation and of an optimizer step, which is counted in completions there."""
    part, group = reader.name("train.batch_size"), reader.translation.document.data["sampling"]["num_generations"]
    prompts = reader.translation.whole(reader.name("rollout.batch_size"), 1024)
    completions = reader.translation.whole(part, 128)
    if completions is None or not isinstance(group, int):
        return
    if completions % group:
        reader.translation.problem(part, f"{completions} completions are not whole groups of {group}")
        return
    put_generation(
        reader.translation, prompts, completions // group, written=reader.name("rollout.batch_size"), part=part
    )


def _put_correction(reader: _Reader) -> None:
    """Set the weight of the trainer's probability over vLLM's, within OpenRLHF's two bounds."""
    name = "algo.advantage.is_correction_enable"
    kind = reader.value("algo.advantage.is_correction_type", "tis")
    bounds = reader.value("algo.advantage.is_correction_threshold", [0.5, 5.0])
    reader.translation.put("algorithm.sampler_correction", "none", reader.name(name))
    if not reader.value(name):
        return
    if kind not in _WORDS.corrections:
        reader.problem("algo.advantage.is_correction_type", f"{kind} has no counterpart; Lachesis has tis and icepop")
    elif reader.value("actor.policy_loss_type", "ppo") != "ppo":
        reader.problem(name, "it changes the ratio of gspo itself there, which has no counterpart; take it out")
    elif not is_list(bounds) or len(bounds) != 2:
        reader.problem("algo.advantage.is_correction_threshold", f"expected two numbers, got {describe(bounds)}")
    else:
        where = reader.name("algo.advantage.is_correction_threshold")
        reader.translation.put("algorithm.sampler_correction", _WORDS.corrections[kind], reader.name(name))
        reader.translation.put("algorithm.sampler_correction_min", bounds[0], where)
        reader.translation.put("algorithm.sampler_correction_max", bounds[1], where)


def _put_lengths(reader: _Reader) -> None:
    """0.10 bounds prompt and completion together, 0.8 each (1,024 tokens where it does not say)."""
    old = any(reader.translation.has(name) for name in ("pretrain", "prompt_data", "generate_max_len"))
    reader.put("data.max_prompt_length", "data.prompt_max_len", 1024 if old else None)
    written = reader.value("rollout.max_new_tokens", 1024 if old else None)
    if written is not None:
        reader.translation.put("sampling.max_completion_length", written, reader.name("rollout.max_new_tokens"))
        return
    whole, name = reader.value("data.max_len", 2048), reader.name("data.max_len")
    reader.translation.put("sampling.max_completion_length", whole, name)
    reader.translation.warning(
        name, f"there prompt and completion have {whole} tokens together; here a completion may have as many alone"
    )


def _put_loss(reader: _Reader) -> None:
    translation = reader.translation
    estimator = reader.value("algo.advantage.estimator", "gae")
    baseline, scale = _WORDS.estimators.get(estimator, ("group_mean", "group"))
    if estimator not in _WORDS.estimators:
        needs = "trains a critic, which Lachesis does not have" if estimator == "gae" else "has no counterpart"
        reader.problem("algo.advantage.estimator", f"{estimator} {needs}; write one of {', '.join(_WORDS.estimators)}")
    if reader.value("algo.advantage.no_std_norm"):
        if scale == "tokens":
            reader.problem("algo.advantage.no_std_norm", f"with {estimator} it has no counterpart; take it out")
        scale = "none"
    translation.put("algorithm.baseline", baseline, reader.name("algo.advantage.estimator"))
    translation.put("algorithm.scale_rewards", scale, reader.name("algo.advantage.estimator"))
    # The mean over all tokens of a step.
    translation.put("algorithm.loss_type", "dapo", reader.name("actor.policy_loss_type"))
    kind = reader.value("actor.policy_loss_type", "ppo")
    if kind == "gspo":
        translation.put("algorithm.importance_sampling_level", "sequence", reader.name("actor.policy_loss_type"))
        translation.put("algorithm.loss_type", "grpo", reader.name("actor.policy_loss_type"))
    elif kind != "ppo":
        reader.problem("actor.policy_loss_type", f"{kind} has no counterpart; Lachesis has ppo and gspo")
    clip = reader.value("actor.eps_clip", 0.2)
    bounds = reader.value("actor.eps_clip_low_high", [clip, clip])
    if not is_list(bounds) or len(bounds) != 2:
        reader.problem("actor.eps_clip_low_high", f"expected two numbers, got {describe(bounds)}")
        return
    translation.put("algorithm.epsilon", bounds[0], reader.name("actor.eps_clip_low_high"))
    translation.put("algorithm.epsilon_high", bounds[1], reader.name("actor.eps_clip_low_high"))


def _put_kl(reader: _Reader) -> None:
    """Translate the KL term: off the reward of each token there, summed over those to come, if not in the loss."""
    if reader.value("algo.kl.init_coef", 0.01) in (0, 0.0):
        return
    reader.put("algorithm.beta", "algo.kl.init_coef", 0.01)
    reader.put("algorithm.kl_estimator", "algo.kl.estimator", "k1")
    name = reader.name("algo.kl.use_loss")
    if reader.value("algo.kl.use_loss"):
        reader.translation.put("algorithm.use_bias_correction_kl", False, name)
    else:
        reader.translation.put("algorithm.kl_placement", "reward_to_go", name)
    if reader.value("algo.kl.target") is not None:
        reader.put("algorithm.kl_target", "algo.kl.target")
        reader.put("algorithm.kl_horizon", "algo.kl.horizon", 10_000)


def _put_optimizer(reader: _Reader) -> None:
    kind = reader.value("actor.lr_scheduler", "cosine_with_min_lr")
    if kind not in _WORDS.schedules:
        reader.problem("actor.lr_scheduler", f"{kind} has no counterpart; Lachesis has {', '.join(_WORDS.schedules)}")
        return
    reader.translation.put("optimizer.schedule", _WORDS.schedules[kind], reader.name("actor.lr_scheduler"))
    if kind != "cosine_with_min_lr":
        reader.translation.put("optimizer.min_lr_ratio", 0.0, reader.name("actor.lr_scheduler"))
    if kind == "constant":
        reader.translation.put("optimizer.warmup_ratio", 0.0, reader.name("actor.lr_scheduler"))
    norm = nonzero(reader.value("actor.max_norm", 1.0))
    reader.translation.put("optimizer.max_grad_norm", norm, reader.name("actor.max_norm"))


def _put_rest(reader: _Reader) -> None:
    translation = reader.translation
    if rank := reader.value("ds.lora.rank", 0):
        translation.put("adapter.kind", "lora", reader.name("ds.lora.rank"))
        translation.put("adapter.r", rank, reader.name("ds.lora.rank"))
        reader.put("adapter.alpha", "ds.lora.alpha", 16)
        targets = reader.value("ds.lora.target_modules", "all-linear")
        translation.put("adapter.targets", module_names(targets), reader.name("ds.lora.target_modules"))
    for new, path in (("ckpt.save_steps", "checkpoint.every_steps"), ("eval.steps", "evaluation.every_steps")):
        frequency = reader.value(new)
        if isinstance(frequency, int):
            translation.put(path, max(0, frequency), reader.name(new))
    if reader.value("algo.dynamic_filtering_enable"):
        bounds = reader.value("algo.dynamic_filtering_range", [0, 1])
        if list(bounds) not in ([0, 1], [0.0, 1.0]):
            reader.problem("algo.dynamic_filtering_range", f"Lachesis replaces groups of equal rewards, not {bounds}")
        translation.put("pipeline.refill_zero_signal", 100, reader.name("algo.dynamic_filtering_enable"))
    if reader.value("vllm.num_engines"):
        translation.put("engine.kind", "vllm", reader.name("vllm.num_engines"))
        translation.put("bridge.kind", "broadcast", reader.name("vllm.num_engines"))
        reader.put("engine.gpu_memory_utilization", "vllm.gpu_memory_utilization")
        reader.put("engine.tensor_parallel_size", "vllm.tensor_parallel_size")
