"""Rules about the loss, the reference and the adapter."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.common.types import Finding
from lachesis.config.rules.base import Rule, changed, note, problem, warning
from lachesis.config.schema import LachesisConfig


def _algorithm(config: LachesisConfig) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.importance_sampling_level == "sequence" and algorithm.loss_type != "grpo":
        yield warning(
            "algorithm",
            f"algorithm.importance_sampling_level sequence with loss_type {algorithm.loss_type} weights "
            "sequences by their length; GSPO is defined with loss_type grpo",
        )
    if algorithm.aggregation == "normalize_then_sum" and algorithm.scale_rewards != "group":
        yield warning(
            "algorithm",
            f"algorithm.scale_rewards {algorithm.scale_rewards} does nothing with aggregation "
            "normalize_then_sum, which always divides by the group's and then the batch's deviation",
        )
    if algorithm.epsilon >= 1:
        yield warning(
            "algorithm",
            f"algorithm.epsilon {algorithm.epsilon:g} never clips below: a ratio is never less than 0",
        )
    if algorithm.epsilon_high is not None and algorithm.epsilon_high < algorithm.epsilon:
        yield note(
            "algorithm",
            f"algorithm.epsilon_high {algorithm.epsilon_high:g} is below epsilon {algorithm.epsilon:g}; "
            "clip-higher wants it above",
        )


# What a loss type that does not clip as PPO does has no use for.
_WITHOUT_CLIP = {
    "cispo": ("epsilon", "delta"),
    "sapo": ("epsilon", "epsilon_high", "delta"),
    "vespo": ("epsilon", "epsilon_high", "delta"),
}


def _loss(config: LachesisConfig) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.loss is not None and changed(config, "algorithm", "loss_type"):
        yield warning("loss", f"algorithm.loss_type {algorithm.loss_type} does nothing: algorithm.loss takes its place")
    bound = algorithm.epsilon_high
    if algorithm.loss_type == "cispo" and bound is not None and bound < 1:
        yield warning(
            "loss",
            f"algorithm.epsilon_high {bound:g}: with loss_type cispo it is the bound of the ratio itself, so every "
            f"weight is at most {bound:g}; 5 is usual, and taken if it is unset",
        )
    for kind in ("sapo", "vespo"):
        names = [name for name in type(algorithm).model_fields if name.startswith(f"{kind}_")]
        if algorithm.loss_type != kind and (keys := changed(config, "algorithm", *names)):
            yield note("loss", f"{', '.join(keys)} do nothing with loss_type {algorithm.loss_type}")
    unused = changed(config, "algorithm", *_WITHOUT_CLIP.get(algorithm.loss_type, ()))
    if unused and algorithm.loss is None:
        yield warning(
            "loss",
            f"{', '.join(unused)} do{'es' if len(unused) == 1 else ''} nothing with loss_type {algorithm.loss_type}, "
            "which does not clip the ratio so; remove it, or take another loss_type",
        )
    if algorithm.top_entropy_quantile == 0:
        yield problem("loss", "algorithm.top_entropy_quantile 0 trains on no token; 1 is all")
    if algorithm.delta is not None and algorithm.delta <= 1 + algorithm.epsilon:
        yield warning(
            "loss",
            f"algorithm.delta {algorithm.delta:g} is not above 1 + epsilon {1 + algorithm.epsilon:g}, so it cuts where "
            "the clip would not have yet",
        )


def _reference(config: LachesisConfig) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.kl_reference == "ema" and algorithm.beta == 0:
        yield problem("reference", "algorithm.kl_reference is ema and beta 0, so no reference is used; set beta")
    if algorithm.kl_reference == "sampler" and algorithm.beta == 0:
        yield warning("reference", "algorithm.kl_reference sampler does nothing while algorithm.beta is 0; set beta")
    if algorithm.kl_reference != "ema":
        for key in changed(config, "algorithm", "ref_mixup_alpha", "ref_sync_steps"):
            yield note("reference", f"{key} does nothing with kl_reference {algorithm.kl_reference}")


def _sampler_correction(config: LachesisConfig) -> Iterator[Finding]:
    algorithm = config.algorithm
    low, high = algorithm.sampler_correction_min, algorithm.sampler_correction_max
    if algorithm.sampler_correction == "none":
        for key in changed(config, "algorithm", "sampler_correction_min", "sampler_correction_max"):
            yield note("sampler_correction", f"{key} does nothing with sampler_correction none")
        return
    if algorithm.loss_type == "vespo" and algorithm.sampler_correction.startswith("sequence"):
        per_token = algorithm.sampler_correction.replace("sequence", "token")
        yield problem(
            "sampler_correction",
            f"algorithm.loss_type vespo multiplies corrections of tokens, and sampler_correction "
            f"{algorithm.sampler_correction} has one for the whole sequence; set it to {per_token}",
        )
    if low is None and high is None:
        yield problem(
            "sampler_correction",
            f"algorithm.sampler_correction {algorithm.sampler_correction} has no bound; set sampler_correction_max",
        )
    if low is not None and high is not None and low >= high:
        yield problem(
            "sampler_correction",
            f"algorithm.sampler_correction_min {low:g} is not below sampler_correction_max {high:g}; lower it",
        )


def _iterations(config: LachesisConfig) -> Iterator[Finding]:
    iterations, steps = config.algorithm.num_iterations, config.run.steps
    if steps is not None and steps % iterations:
        yield note(
            "iterations",
            f"run.steps {steps} is no multiple of algorithm.num_iterations {iterations}: the last batch is trained on "
            f"{steps % iterations} times; {steps // iterations * iterations or iterations} or "
            f"{-(-steps // iterations) * iterations} steps are",
        )


def _adapter(config: LachesisConfig) -> Iterator[Finding]:
    if config.adapter.kind == "lora" and config.adapter.dropout > 0:
        yield warning(
            "adapter",
            f"adapter.dropout {config.adapter.dropout:g} is on while training and off while sampling, so "
            "ratios are noisy before the policy has moved; 0 is usual with RL",
        )


def _model(config: LachesisConfig) -> Iterator[Finding]:
    model = config.model
    if model.residual_dtype == "float32" and model.dtype == "float32":
        yield note("model", "model.residual_dtype float32 does nothing with model.dtype float32: it is float32 anyway")
    if model.matmul_dtype != "auto":
        yield from _float8(config)
    if model.quantization == "none":
        return
    if config.adapter.kind == "none":
        yield problem(
            "quantization",
            f"model.quantization {model.quantization} holds weights that cannot be trained, and adapter.kind is none; "
            "set adapter.kind: lora, or remove model.quantization",
        )
    if config.engine.kind != "embedded":
        corrected = config.algorithm.sampler_correction != "none"
        yield warning(
            "quantization",
            f"model.quantization {model.quantization}: engine.kind {config.engine.kind} holds the base weights as they "
            "were, so samples come from a policy that is not quite the trained one, and the proof of sync allows its "
            "canary a larger difference" + ("" if corrected else "; set algorithm.sampler_correction: token_truncate"),
        )


def _float8(config: LachesisConfig) -> Iterator[Finding]:
    key = f"model.matmul_dtype {config.model.matmul_dtype}"
    if config.model.quantization != "none":
        yield problem(
            "float8",
            f"{key}: with model.quantization {config.model.quantization} the linear layers have products of their own; "
            "remove one of the two",
        )
    if config.model.device == "cpu":
        yield warning("float8", f"{key} is emulated with model.device cpu: it rounds as a GPU does, and is slower")
    if config.model.compile == "off":
        yield note("float8", f"{key} gains little with model.compile off: roundings then take passes of their own")
    if config.algorithm.sampler_correction == "none":
        yield warning(
            "float8",
            f"{key} is for training alone: the engine samples in model.dtype, so from a policy that is not quite the "
            "trained one; set algorithm.sampler_correction: token_truncate",
        )


ALGORITHM_RULES: tuple[Rule, ...] = (_algorithm, _loss, _reference, _sampler_correction, _iterations, _adapter, _model)
