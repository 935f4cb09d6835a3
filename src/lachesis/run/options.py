"""What parts need of the configuration, in their own records. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lachesis.bridges.proof import QUANTIZED_TOLERANCE
from lachesis.common.types import SamplingParams
from lachesis.config.schema import LachesisConfig
from lachesis.metrics.health.types import Limits
from lachesis.pipeline.scoring import AdvantageFunction
from lachesis.train.losses.advantage import group_advantages
from lachesis.train.losses.options import LossOptions

# CISPO bounds the ratio itself, and PPO's 0.2 in its place would make the weight a constant; 5 is usual.
CISPO_EPSILON_HIGH = 5.0
# Logprobs are about 0.1 nats apart, in the mean, where one side has NF4 weights or multiplies in float8; with int8
# weights the usual limit holds.
ROUNDED_LOGPROB_DIFF = 0.3


def steps(config: LachesisConfig) -> int:
    """The number of optimizer steps, which by now is known."""
    assert config.run.steps is not None, "config.steps.with_steps sets it"
    return config.run.steps


def loss_options(config: LachesisConfig) -> LossOptions:
    """The loss's options from the algorithm section.

    Raises:
        ConfigError: options that cannot be combined.
    """
    algorithm = config.algorithm
    corrects = algorithm.sampler_correction != "none"
    epsilon_high = algorithm.epsilon_high
    if algorithm.loss_type == "cispo" and epsilon_high is None:
        epsilon_high = CISPO_EPSILON_HIGH
    return LossOptions(
        loss_type=algorithm.loss_type,
        importance_sampling_level=algorithm.importance_sampling_level,
        epsilon=algorithm.epsilon,
        epsilon_high=epsilon_high,
        delta=algorithm.delta,
        beta=algorithm.beta,
        use_bias_correction_kl=algorithm.use_bias_correction_kl,
        max_completion_length=config.sampling.max_completion_length,
        off_policy_mask_threshold=algorithm.off_policy_mask_threshold,
        top_entropy_quantile=algorithm.top_entropy_quantile,
        entropy_coef=algorithm.entropy_coef,
        vllm_importance_sampling_correction=corrects,
        vllm_importance_sampling_mode=algorithm.sampler_correction if corrects else "sequence_mask",  # type: ignore[arg-type]
        vllm_importance_sampling_clip_min=algorithm.sampler_correction_min,
        vllm_importance_sampling_clip_max=algorithm.sampler_correction_max,
        sapo_temperature_pos=algorithm.sapo_temperature_pos,
        sapo_temperature_neg=algorithm.sapo_temperature_neg,
        vespo_k_pos=algorithm.vespo_k_pos,
        vespo_lambda_pos=algorithm.vespo_lambda_pos,
        vespo_k_neg=algorithm.vespo_k_neg,
        vespo_lambda_neg=algorithm.vespo_lambda_neg,
    )


def sampling_params(config: LachesisConfig) -> SamplingParams:
    """How training samples."""
    sampling = config.sampling
    return SamplingParams(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        guided_regex=sampling.guided_regex,
        extra=sampling.generation_kwargs,
    )


def advantage_function(config: LachesisConfig) -> AdvantageFunction:
    """From rewards [N][K] (None: not judged) and group numbers [N] to advantages [N]."""
    weights = config.rewards.weights

    def compute(rewards: Sequence[Sequence[float | None]], group: Sequence[int]) -> list[float]:
        known = [[float("nan") if value is None else value for value in row] for row in rewards]
        return group_advantages(
            torch.tensor(known, dtype=torch.float64),
            group=torch.tensor(group),
            weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
            scale_rewards=config.algorithm.scale_rewards,
            aggregation=config.algorithm.aggregation,
        ).tolist()

    return compute


def health_limits(config: LachesisConfig) -> Limits:
    """From where on a run says that samples are old, and that trainer and engine disagree.

    The first is later where the configuration wants older ones, the second where only one side rounds its products
    or its base weights.
    """
    kind, pipeline = config.model.quantization, config.pipeline
    wanted = max(Limits().staleness, config.algorithm.num_iterations - 1)
    limits = Limits(staleness=max(wanted, pipeline.max_staleness or 0) if pipeline.async_prefetch else wanted)
    if config.model.matmul_dtype != "auto":
        return replace(limits, logprob_diff=ROUNDED_LOGPROB_DIFF)
    if kind == "none" or config.engine.kind == "embedded":
        return limits
    wider = replace(limits, canary_error=QUANTIZED_TOLERANCE[kind] / 2)
    return wider if kind == "int8" else replace(wider, logprob_diff=ROUNDED_LOGPROB_DIFF)
