"""Checks across sections, before anything is loaded. They never change a value.

A rule yields findings: a ``problem`` is a combination that cannot work or does nothing that was asked for, a
``warning`` one that works otherwise than most would expect, a ``note`` a fact worth knowing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lachesis.config.capabilities import BRIDGES, BridgeCapabilities, bridge_capabilities
from lachesis.config.problems import config_error
from lachesis.config.schema import CheckpointConfig, LachesisConfig, OptimizerConfig
from lachesis.types import Finding

DEFAULT_LEARNING_RATE = 1e-6
DEFAULT_LORA_LEARNING_RATE = 1e-5

# Above these, a policy without KL term has been seen to become unstable, small models included.
_LARGE_LEARNING_RATE = {"none": 1e-4, "lora": 1e-3}
_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11}
_ORDINARY_WEIGHT = 0.02  # the usual standard deviation of initialization, and near it after pretraining
_FUNCTION_SPEC = re.compile(r"^(?:.+\.py:[A-Za-z_]\w*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)$")

Rule = Callable[[LachesisConfig], Iterator[Finding]]


def learning_rate(config: LachesisConfig) -> float:
    """The peak learning rate: the configured one, or 1e-6, or 1e-5 with LoRA."""
    if config.optimizer.learning_rate is not None:
        return config.optimizer.learning_rate
    return DEFAULT_LORA_LEARNING_RATE if config.adapter.kind == "lora" else DEFAULT_LEARNING_RATE


def check(config: LachesisConfig, *, bridges: Mapping[str, BridgeCapabilities] = BRIDGES) -> list[Finding]:
    """The warnings and notes of all rules.

    Raises:
        ConfigError: the configuration cannot work; the message lists every problem.
    """
    findings = [finding for rule in RULES for finding in rule(config)]
    findings += _bridge(config, bridge_capabilities(config.bridge.kind, bridges=bridges))
    problems = [finding.message for finding in findings if finding.level == "problem"]
    if problems:
        raise config_error("the configuration cannot work", problems)
    return findings


def _problem(rule: str, message: str) -> Finding:
    return Finding(level="problem", rule=rule, message=message)


def _warning(rule: str, message: str) -> Finding:
    return Finding(level="warning", rule=rule, message=message)


def _note(rule: str, message: str) -> Finding:
    return Finding(level="note", rule=rule, message=message)


def _run_name(config: LachesisConfig) -> Iterator[Finding]:
    name = config.run.name
    if not name.strip() or name in (".", "..") or "/" in name or "\\" in name:
        yield _problem("run_name", f"run.name {name!r} must be a directory name without separators")


def _function_specs(config: LachesisConfig) -> Iterator[Finding]:
    named = [(f"rewards.functions[{i}]", spec) for i, spec in enumerate(config.rewards.functions)]
    if config.run.setup is not None:
        named.append(("run.setup", config.run.setup))
    for key, spec in named:
        if not _FUNCTION_SPEC.match(spec):
            yield _problem(
                "function_spec", f"{key}: {spec!r} is neither FILE.py:FUNCTION nor module.function; write one"
            )


def _chat_template(config: LachesisConfig) -> Iterator[Finding]:
    template = config.model.chat_template
    if template is not None and "{" not in template and not Path(template).is_file():
        yield _problem(
            "chat_template",
            f"model.chat_template: {template!r} is no file, and without a {{ it is no Jinja template",
        )


def _reward_weights(config: LachesisConfig) -> Iterator[Finding]:
    functions, weights = config.rewards.functions, config.rewards.weights
    if weights is None:
        return
    if len(weights) != len(functions):
        yield _problem(
            "reward_weights",
            f"rewards.weights has {len(weights)} values for {len(functions)} rewards.functions; "
            "give one each, or leave weights out",
        )
    elif not any(weights):
        yield _problem("reward_weights", "rewards.weights are all 0, so nothing would be learned")


def _held_out(config: LachesisConfig) -> Iterator[Finding]:
    data, evaluation = config.data, config.evaluation
    if data.eval_path is not None and data.eval_size > 0:
        yield _problem(
            "held_out",
            "data.eval_path and data.eval_size both say where held-out problems come from; keep one",
        )
    if data.eval_path is not None and data.eval_path == data.path:
        yield _warning("held_out", "data.eval_path is data.path, so accuracy is measured on the training problems")
    if evaluation.every_steps > 0 and data.eval_path is None and data.eval_size == 0:
        yield _problem(
            "held_out",
            f"evaluation.every_steps is {evaluation.every_steps} and there are no held-out problems; "
            "set data.eval_path or data.eval_size",
        )
    if evaluation.every_steps > config.run.steps:
        yield _note(
            "held_out",
            f"evaluation.every_steps {evaluation.every_steps} is more than run.steps {config.run.steps}: "
            "there is an evaluation before and after the run only",
        )


def _schedule(config: LachesisConfig) -> Iterator[Finding]:
    optimizer, steps = config.optimizer, config.run.steps
    if optimizer.warmup_steps > steps:
        yield _problem(
            "schedule",
            f"optimizer.warmup_steps {optimizer.warmup_steps} is more than run.steps {steps}, so the "
            "learning rate would never reach its peak; lower it",
        )
    if optimizer.min_lr_ratio > 0 and optimizer.schedule == "constant":
        yield _warning(
            "schedule",
            f"optimizer.min_lr_ratio {optimizer.min_lr_ratio:g} does nothing with schedule constant; "
            "use linear or cosine",
        )


def _optimizer_fields(config: LachesisConfig) -> Iterator[Finding]:
    optimizer = config.optimizer
    if optimizer.kind != "adafactor" and 1.0 in optimizer.betas:
        yield _problem("optimizer", "optimizer.betas must be below 1: a moment with decay 1 never moves")
    if optimizer.kind == "adafactor":
        ignored = [
            f"optimizer.{name}"
            for name in ("betas", "eps")
            if getattr(optimizer, name) != OptimizerConfig.model_fields[name].default
        ]
        if ignored:
            yield _warning("optimizer", f"{' and '.join(ignored)} do nothing with optimizer.kind adafactor")
    if optimizer.kind == "adamw_cpu" and config.model.device == "cpu":
        yield _note("optimizer", "optimizer.kind adamw_cpu is adamw where the model is on the CPU")


def _large_learning_rate(config: LachesisConfig) -> Iterator[Finding]:
    rate, limit = learning_rate(config), _LARGE_LEARNING_RATE[config.adapter.kind]
    if config.algorithm.beta == 0 and rate > limit:
        yield _warning(
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
    yield _warning(
        "vanishing_updates",
        f"optimizer.weight_update is plain: {condition}a {assumed} weight w takes no step below about "
        f"2^-{bits + 1}·|w|, so at learning rate {rate:g} every weight beyond {frozen_above:.1e} stands "
        f"still (ordinary weights are near {_ORDINARY_WEIGHT:g}); use fp32_master or stochastic_rounding",
    )


def _weight_update(config: LachesisConfig) -> Iterator[Finding]:
    update, dtype = config.optimizer.weight_update, config.model.dtype
    if config.adapter.kind == "none" and update == "stochastic_rounding" and dtype == "float16":
        yield _problem(
            "weight_update",
            "optimizer.weight_update stochastic_rounding is for bfloat16 and model.dtype is float16; "
            "use fp32_master, or bfloat16",
        )
    if update in ("stochastic_rounding", "fp32_master") and dtype == "float32":
        yield _note("weight_update", f"optimizer.weight_update {update} does nothing: model.dtype is float32 already")


def _truncated_sampling(config: LachesisConfig) -> Iterator[Finding]:
    sampling = config.sampling
    cutting = [
        f"sampling.{name} {value:g}"
        for name, value, off in (
            ("top_p", sampling.top_p, 1.0),
            ("top_k", sampling.top_k, 0),
            ("min_p", sampling.min_p, 0.0),
            ("repetition_penalty", sampling.repetition_penalty, 1.0),
        )
        if value != off
    ]
    if cutting:
        yield _warning(
            "truncated_sampling",
            f"{', '.join(cutting)}: the engine's logprobs are of the distribution that was sampled from, the "
            "trainer's of the full one, so ratios are biased from the start and the clip cuts tokens that "
            "never moved; train with top_p 1, top_k 0, min_p 0 and repetition_penalty 1",
        )


def _group_size(config: LachesisConfig) -> Iterator[Finding]:
    if config.sampling.num_generations == 2 and config.algorithm.scale_rewards == "group":
        yield _note(
            "group_size",
            "with sampling.num_generations 2 and algorithm.scale_rewards group every advantage is about "
            "+0.71 or -0.71, however far the two rewards are apart (or 0 where they are equal)",
        )


def _microbatch(config: LachesisConfig) -> Iterator[Finding]:
    budget = config.batch.max_tokens_per_microbatch
    prompt = config.data.max_prompt_length or 0
    longest = prompt + config.sampling.max_completion_length
    if budget < longest:
        yield _note(
            "microbatch",
            f"batch.max_tokens_per_microbatch {budget} is less than one longest sequence ({longest} tokens): "
            "such a sequence goes alone and sets the peak memory",
        )


def _algorithm(config: LachesisConfig) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.importance_sampling_level == "sequence" and algorithm.loss_type != "grpo":
        yield _warning(
            "algorithm",
            f"algorithm.importance_sampling_level sequence with loss_type {algorithm.loss_type} weights "
            "sequences by their length; GSPO is defined with loss_type grpo",
        )
    if algorithm.aggregation == "normalize_then_sum" and algorithm.scale_rewards != "group":
        yield _warning(
            "algorithm",
            f"algorithm.scale_rewards {algorithm.scale_rewards} does nothing with aggregation "
            "normalize_then_sum, which always divides by the group's and then the batch's deviation",
        )
    if algorithm.epsilon >= 1:
        yield _warning(
            "algorithm",
            f"algorithm.epsilon {algorithm.epsilon:g} never clips below: a ratio is never less than 0",
        )
    if algorithm.epsilon_high is not None and algorithm.epsilon_high < algorithm.epsilon:
        yield _note(
            "algorithm",
            f"algorithm.epsilon_high {algorithm.epsilon_high:g} is below epsilon {algorithm.epsilon:g}; "
            "clip-higher wants it above",
        )


def _adapter(config: LachesisConfig) -> Iterator[Finding]:
    if config.adapter.kind == "lora" and config.adapter.dropout > 0:
        yield _warning(
            "adapter",
            f"adapter.dropout {config.adapter.dropout:g} is on while training and off while sampling, so "
            "ratios are noisy before the policy has moved; 0 is usual with RL",
        )


def _deadlines(config: LachesisConfig) -> Iterator[Finding]:
    deadlines = config.deadlines
    if deadlines.batch_s < deadlines.generation_s:
        yield _warning(
            "deadlines",
            f"deadlines.batch_s {deadlines.batch_s:g} is less than generation_s {deadlines.generation_s:g}, "
            "so the wait for a batch ends before generation may; raise it",
        )


def _checkpoint(config: LachesisConfig) -> Iterator[Finding]:
    checkpoint, steps = config.checkpoint, config.run.steps
    if not checkpoint.save_final and checkpoint.every_steps == 0:
        yield _warning(
            "checkpoint",
            "checkpoint.save_final is false and every_steps 0: a run that ends leaves no trained weights",
        )
    if checkpoint.every_steps > steps:
        yield _note(
            "checkpoint",
            f"checkpoint.every_steps {checkpoint.every_steps} is more than run.steps {steps}: no checkpoint "
            "is written unless the run is stopped",
        )
    if checkpoint.every_steps == 0 and checkpoint.keep_last != CheckpointConfig.model_fields["keep_last"].default:
        yield _note("checkpoint", "checkpoint.keep_last does nothing while checkpoint.every_steps is 0")


def _bridge(config: LachesisConfig, capabilities: BridgeCapabilities) -> Iterator[Finding]:
    kind = config.bridge.kind
    if capabilities.adapter_only and config.adapter.kind == "none":
        yield _problem(
            "bridge",
            f"bridge.kind {kind} transfers adapters only, and adapter.kind is none; "
            "set adapter.kind: lora or choose another bridge",
        )
    if not config.bridge.proof:
        yield _warning("bridge", "bridge.proof is false: an engine with stale weights would go unnoticed; turn it on")


RULES: tuple[Rule, ...] = (
    _run_name,
    _function_specs,
    _chat_template,
    _reward_weights,
    _held_out,
    _schedule,
    _optimizer_fields,
    _large_learning_rate,
    _vanishing_updates,
    _weight_update,
    _truncated_sampling,
    _group_size,
    _microbatch,
    _algorithm,
    _adapter,
    _deadlines,
    _checkpoint,
)
