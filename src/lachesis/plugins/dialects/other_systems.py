"""verl's and OpenRLHF's configurations, for `lachesis translate`.

Their files are not run as they stand, for their rewards have another signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.config.steps import nearest_multiples
from lachesis.plugins.dialects import openrlhf, verl
from lachesis.plugins.dialects.table import Translation
from lachesis.plugins.dialects.verl import VERL

_MARKS: Mapping[str, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref",),
    "OpenRLHF": ("prompt_data", "data.prompt_dataset", "rollout_batch_size", "rollout.batch_size"),
}
_VERL_GENERATED, _VERL_STEP = 1024, 256
_OPENRLHF_GENERATED, _OPENRLHF_STEP = 1024, 128


def other_system(names: Mapping[str, Any]) -> str | None:
    """Return whose names these are, flat and dotted: "verl", "OpenRLHF", or None for anybody else's."""
    for system, marks in _MARKS.items():
        if any(name == mark or name.startswith(f"{mark}.") for name in names for mark in marks):
            return system
    return None


# ms-swift's arguments that mean the same here, by their names there.
_SWIFT: Mapping[str, str] = {
    "model": "model.path", "dataset": "data.path", "system": "data.system_prompt",
    "num_generations": "sampling.num_generations", "max_completion_length": "sampling.max_completion_length",
    "temperature": "sampling.temperature", "top_p": "sampling.top_p",
    "beta": "algorithm.beta", "epsilon": "algorithm.epsilon", "epsilon_high": "algorithm.epsilon_high",
    "num_iterations": "algorithm.num_iterations", "importance_sampling_level": "algorithm.importance_sampling_level",
    "learning_rate": "optimizer.learning_rate", "warmup_ratio": "optimizer.warmup_ratio", "max_steps": "run.steps",
    "num_train_epochs": "run.epochs", "lora_rank": "adapter.r", "lora_alpha": "adapter.alpha", "seed": "run.seed",
}  # fmt: skip


def require_not_swift(data: Mapping[str, Any]) -> None:
    """Raise ConfigError for ms-swift's arguments, with those of them that mean the same here in our keys."""
    if not {"rlhf_type", "train_type", "tuner_type"} & data.keys():
        return
    same = [f"{ours}: {data[name]}" for name, ours in _SWIFT.items() if isinstance(data.get(name), str | int | float)]
    raise ConfigError(
        "this is a configuration of ms-swift, which is not translated: its rewards and data have another form",
        remedy=f"write a configuration of Lachesis' keys; the same here are {', '.join(same) or 'none of them'}",
    )


def finish(translation: Translation) -> None:
    """Translate what takes several names together: batches, loss, KL, lengths, adapter and engine."""
    if translation.dialect is VERL:
        verl.finish(translation)
        prompts = translation.whole(verl.GENERATED, _VERL_GENERATED)
        step = translation.whole(verl.STEP, min(_VERL_STEP, prompts or _VERL_STEP))
        _put_batch(translation, prompts, step, written=verl.GENERATED, part=verl.STEP)
        return
    openrlhf.finish(translation)
    written = _written(translation, openrlhf.GENERATED)
    part = _written(translation, openrlhf.STEP)
    group = translation.document.data["sampling"]["num_generations"]
    prompts = translation.whole(written, _OPENRLHF_GENERATED)
    completions = translation.whole(part, _OPENRLHF_STEP)
    if completions is None or not isinstance(group, int):
        return
    if completions % group:
        translation.problem(part, f"{completions} completions are not whole groups of {group}")
        return
    _put_batch(translation, prompts, completions // group, written=written, part=part)


def _written(translation: Translation, names: tuple[str, ...]) -> str:
    return next((name for name in names if translation.has(name)), names[0])


def _put_batch(translation: Translation, prompts: int | None, step: int | None, *, written: str, part: str) -> None:
    """Set the prompts of one generation as whole optimizer steps, both in prompts."""
    if prompts is None or step is None:
        return
    if prompts % step:
        fitting = " or ".join(map(str, nearest_multiples(prompts, of=step)))
        translation.problem(
            written, f"{prompts} prompts are not a multiple of the {step} of an optimizer step; {fitting} are"
        )
        return
    translation.put("batch.prompts_per_step", step, part)
    if prompts > step:
        translation.put("batch.steps_per_generation", prompts // step, written)
