"""What to minimize: the options of the loss, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lachesis.common.errors import ConfigError

LossName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
RatioLevel = Literal["token", "sequence"]
SamplerMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Names, meanings and defaults are those of TRL 1.16, but for the default ``loss_type``.

    Attributes:
        epsilon, epsilon_high: ratios are clipped to [1 - epsilon, 1 + epsilon_high]; ``None`` is ``epsilon``.
            For ``cispo`` epsilon_high is the bound of the ratio itself (5.0 is usual).
        delta: caps the ratio that is not clipped.
        beta, use_bias_correction_kl: weight of the KL term, and whether the ratio multiplies it.
        max_completion_length: the constant that ``dr_grpo`` divides by.
        off_policy_mask_threshold: sequences with A < 0 that drifted further (nats a token) are left out.
        top_entropy_quantile: share of the tokens, those of highest entropy, that the policy term keeps.
        entropy_coef: weight of the entropy bonus, the mean entropy of the tokens that are kept.
        vllm_importance_sampling_*: correction for the sampler, where its logprobs are given.

    Raises:
        ConfigError: an unknown name, a number out of range, or options that contradict each other.
    """

    loss_type: LossName = "grpo"
    importance_sampling_level: RatioLevel = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    max_completion_length: int | None = None
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: SamplerMode = "sequence_mask"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        for name, allowed in _NAMES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} does not exist",
                    remedy=f"choose one of {', '.join(allowed)}",
                )
        for name in _NUMBERS_FROM_ZERO:
            self._require_number(name, low=0.0)
        for name in _NUMBERS_ABOVE_ZERO:
            self._require_number(name, low=0.0, inclusive=False)
        for name in ("entropy_coef", "off_policy_mask_threshold"):
            self._require_number(name)
        self._require_number("top_entropy_quantile", low=0.0, high=1.0)
        self._require_consistency()

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or ``epsilon`` where it is unset."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def ignores_zero_advantage(self) -> bool:
        """Whether a row whose advantage is 0 has no gradient and bears on no other row's.

        A KL term or an entropy bonus moves it all the same, and the entropy quantile is one of all tokens.
        """
        return not self.beta and not self.entropy_coef and self.top_entropy_quantile == 1

    def _require_number(
        self, name: str, *, low: float = -math.inf, high: float = math.inf, inclusive: bool = True
    ) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (value == low and not inclusive):
            lower = "" if math.isinf(low) else f" {'from' if inclusive else 'above'} {low:g}"
            upper = "" if math.isinf(high) else f" to {high:g}"
            raise ConfigError(f"{name}={value!r} is out of range", remedy=f"give a finite number{lower}{upper}")

    def _require_consistency(self) -> None:
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ConfigError(
                "loss_type='dr_grpo' divides by max_completion_length, which is not set",
                remedy="set it to the most tokens that a completion may have",
            )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"vllm_importance_sampling_clip_min={low:g} is not below ..._clip_max={high:g}",
                remedy="lower the minimum or raise the maximum",
            )
        truncates = self.vllm_importance_sampling_mode.endswith("truncate")
        if self.vllm_importance_sampling_correction and truncates and low is None and high is None:
            raise ConfigError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} has no bound to "
                "truncate at: vllm_importance_sampling_clip_min and _clip_max are both unset",
                remedy="set vllm_importance_sampling_clip_max (3.0 is usual)",
            )


_NAMES = {
    "loss_type": get_args(LossName),
    "importance_sampling_level": get_args(RatioLevel),
    "vllm_importance_sampling_mode": get_args(SamplerMode),
}
_NUMBERS_FROM_ZERO = (
    "epsilon",
    "epsilon_high",
    "beta",
    "vespo_k_pos",
    "vespo_k_neg",
    "vllm_importance_sampling_clip_min",
)
_NUMBERS_ABOVE_ZERO = (
    "delta",
    "max_completion_length",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_lambda_pos",
    "vespo_lambda_neg",
    "vllm_importance_sampling_clip_max",
)
_OPTIONAL = (
    "epsilon_high",
    "delta",
    "max_completion_length",
    "off_policy_mask_threshold",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)
