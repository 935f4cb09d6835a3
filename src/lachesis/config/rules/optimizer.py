"""Rules about the optimizer and the size of its updates."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.common.types import Finding
from lachesis.config.rules.base import Rule, note, problem, warning
from lachesis.config.schema import LachesisConfig, OptimizerConfig

DEFAULT_LEARNING_RATE = 1e-6
DEFAULT_LORA_LEARNING_RATE = 1e-5

# Above these, a policy without KL term has been seen to become unstable, small models included.
_LARGE_LEARNING_RATE = {"none": 1e-4, "lora": 1e-3}
_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11}
_ORDINARY_WEIGHT = 0.02  # the usual standard deviation of initialization, and near it after pretraining


def learning_rate(config: LachesisConfig) -> float:
    """The peak learning rate: the configured one, or 1e-6, or 1e-5 with LoRA."""
    if config.optimizer.learning_rate is not None:
        return config.optimizer.learning_rate
    return DEFAULT_LORA_LEARNING_RATE if config.adapter.kind == "lora" else DEFAULT_LEARNING_RATE


def _schedule(config: LachesisConfig) -> Iterator[Finding]:
    optimizer, steps = config.optimizer, config.run.steps
    if steps is not None and optimizer.warmup_steps > steps:
        yield problem(
            "schedule",
            f"optimizer.warmup_steps {optimizer.warmup_steps} is more than run.steps {steps}, so the "
            "learning rate would never reach its peak; lower it",
        )
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        yield problem(
            "schedule",
            f"optimizer.warmup_steps {optimizer.warmup_steps} and warmup_ratio {optimizer.warmup_ratio:g} both say how "
            "long to warm up; give one of them",
        )
    if optimizer.min_lr_ratio > 0 and optimizer.schedule == "constant":
        yield warning(
            "schedule",
            f"optimizer.min_lr_ratio {optimizer.min_lr_ratio:g} does nothing with schedule constant; "
            "use linear or cosine",
        )


def _optimizer_fields(config: LachesisConfig) -> Iterator[Finding]:
    optimizer = config.optimizer
    if optimizer.kind != "adafactor" and 1.0 in optimizer.betas:
        yield problem("optimizer", "optimizer.betas must be below 1: a moment with decay 1 never moves")
    if optimizer.kind == "adafactor":
        ignored = [
            f"optimizer.{name}"
            for name in ("betas", "eps")
            if getattr(optimizer, name) != OptimizerConfig.model_fields[name].default
        ]
        if ignored:
            yield warning("optimizer", f"{' and '.join(ignored)} do nothing with optimizer.kind adafactor")
    elif optimizer.scale_parameter:
        yield warning("optimizer", f"optimizer.scale_parameter does nothing with optimizer.kind {optimizer.kind}")
    if optimizer.kind == "adamw_cpu" and config.model.device == "cpu":
        yield note("optimizer", "optimizer.kind adamw_cpu is adamw where the model is on the CPU")


def _large_learning_rate(config: LachesisConfig) -> Iterator[Finding]:
    rate, limit = learning_rate(config), _LARGE_LEARNING_RATE[config.adapter.kind]
    if config.algorithm.beta == 0 and rate > limit:
        yield warning(
            "learning_rate",
            f"optimizer.learning_rate {rate:g} is above {limit:g} and algorithm.beta is 0, so nothing holds "
            "the policy near the base model; lower the rate or set beta (0.01 to 0.04 is common)",
        )


def _vanishing_updates(config: LachesisConfig) -> Iterator[Finding]:
    """An update is lost below half the spacing of a weight's neighbours.

    With p significand bits the neighbours of w are between 2^-p·|w| and 2^(1-p)·|w| apart (IEEE 754), and
    an AdamW step is about the learning rate. So every weight above ``learning_rate · 2^(p+1)`` stands still.
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
        "vanishing_updates",
        f"optimizer.weight_update is plain: {condition}a {assumed} weight w takes no step below about "
        f"2^-{bits + 1}·|w|, so at learning rate {rate:g} every weight beyond {frozen_above:.1e} stands "
        f"still (ordinary weights are near {_ORDINARY_WEIGHT:g}); use fp32_master or stochastic_rounding",
    )


def _weight_update(config: LachesisConfig) -> Iterator[Finding]:
    update, dtype = config.optimizer.weight_update, config.model.dtype
    if config.adapter.kind == "none" and update == "stochastic_rounding" and dtype == "float16":
        yield problem(
            "weight_update",
            "optimizer.weight_update stochastic_rounding is for bfloat16 and model.dtype is float16; "
            "use fp32_master, or bfloat16",
        )
    if update in ("stochastic_rounding", "fp32_master") and dtype == "float32":
        yield note("weight_update", f"optimizer.weight_update {update} does nothing: model.dtype is float32 already")


OPTIMIZER_RULES: tuple[Rule, ...] = (
    _schedule,
    _optimizer_fields,
    _large_learning_rate,
    _vanishing_updates,
    _weight_update,
)
