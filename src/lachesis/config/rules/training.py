"""Rules about training: optimizer, loss, reference, adapter, memory, deadlines and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.config.rules.base import Rule, Said, note, problem, warning
from lachesis.config.schema import LachesisConfig
from lachesis.config.schema.training import placeholders

DEFAULT_LEARNING_RATE = 1e-6
DEFAULT_LORA_LEARNING_RATE = 1e-5

_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11}
_ORDINARY_WEIGHT = 0.02  # the usual standard deviation of initialization; weights stay near it in pretraining


def learning_rate(config: LachesisConfig) -> float:
    """Return the peak learning rate: the configured one, or 1e-6, or 1e-5 with LoRA."""
    if config.optimizer.learning_rate is not None:
        return config.optimizer.learning_rate
    return DEFAULT_LORA_LEARNING_RATE if config.adapter.kind == "lora" else DEFAULT_LEARNING_RATE


def _vanishing_updates(config: LachesisConfig) -> Iterator[Said]:
    """Warn of updates lost to rounding: those below half the spacing between a weight and its neighbours.

    With p significand bits the neighbours of w are between 2^-p·|w| and 2^(1-p)·|w| apart (IEEE 754), and an AdamW step
    is about the learning rate. So weights above ``learning_rate · 2^(p+1)`` never change.
    """
    dtype, on_cpu = config.model.dtype, config.model.device == "cpu"
    # peft keeps the adapters of 16-bit models in float32, so only full fine-tuning updates 16-bit weights.
    if config.optimizer.weight_update != "plain" or config.adapter.kind != "none":
        return
    if dtype == "float32" or (dtype == "auto" and on_cpu):
        return
    assumed = "bfloat16" if dtype == "auto" else dtype
    bits, rate = _SIGNIFICAND_BITS[assumed], learning_rate(config)
    frozen_above = rate * 2 ** (bits + 1)
    if frozen_above > _ORDINARY_WEIGHT:
        return
    condition = f"if the checkpoint is {assumed}, " if dtype == "auto" else ""
    yield warning(
        f"optimizer.weight_update is plain: {condition}a {assumed} weight w loses updates below about "
        f"2^-{bits + 1}·|w|, so at learning rate {rate:g} no weight beyond {frozen_above:.1e} ever changes (typical "
        f"weights are near {_ORDINARY_WEIGHT:g}); use fp32_master or stochastic_rounding"
    )


def _preset(config: LachesisConfig) -> Iterator[Said]:
    if config.algorithm.preset is not None:
        from lachesis.config.presets import preset_in_words

        yield note(preset_in_words(config))


def _teacher(config: LachesisConfig) -> Iterator[Said]:
    """Check the texts that a teacher which is the policy itself is shown."""
    teacher, key = config.algorithm.teacher, "algorithm.teacher.prompts"
    for text in teacher.prompts if teacher is not None and teacher.kind == "self" else ():
        try:
            names = placeholders(text)
        except ValueError as error:
            yield problem(f"{key} {text!r}: {error}; double literal braces")
            continue
        if not names - {"prompt"}:
            yield problem(f"{key} {text!r} adds nothing for the teacher: name a column, or {{solution}}")


TRAINING_RULES: tuple[Rule, ...] = (_vanishing_updates, _preset, _teacher)
