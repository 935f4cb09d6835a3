"""The algorithm, the batches and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from lachesis.config.section import (
    CustomPart,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

# CISPO bounds the ratio itself; PPO's 0.2 would make the weight constant. 5 is usual.
CISPO_EPSILON_HIGH = 5.0


PresetName = Literal[
    "dapo", "dr_grpo", "gspo", "cispo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "rloo", "maxrl", "opo",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "decoupled_ppo",
]  # fmt: skip
LossTypeName = Literal[
    "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gmpo", "reinforce", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov",
]  # fmt: skip


ScaleRewards = Literal["group", "batch", "none", "advantages", "mean", "tokens", "signal"]
Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]


def placeholders(text: str) -> set[str]:
    """Return the names in braces in a text; raise ValueError if a brace is not closed."""
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


class TeacherConfig(Section):
    """A teacher that scores the policy's own samples (on-policy distillation), in addition to the rewards."""

    model_config = ConfigDict(allow_inf_nan=False)

    kind: Literal["model", "url", "rollouts", "self"] = Field(
        default="model",
        description="A frozen `model` beside the policy, a server (`url`), logprobs from the rollout API "
        "(`distill_token_ids`, `distill_logprobs`), or the policy itself with a longer prompt (`prompts`).",
    )
    prompts: list[str] = Field(
        default_factory=list[str],
        description="With kind self: the text that the teacher gets in place of the last message (or prompt). "
        "`{prompt}` is the original text, `{solution}` a successful completion of the group (`success`), any other "
        "`{name}` a column. The first entry whose names all have values is used; if none has, there is no teacher.",
    )
    success: float = Field(
        default=1.0, description="With kind self: minimum reward of a completion to be used as `{solution}`."
    )
    weights_of: Literal["policy", "reference"] = Field(
        default="policy",
        description="With kind self: weights of the current policy, or of `algorithm.kl_reference` (base or ema).",
    )
    model: str | None = Field(
        default=None,
        description="Directory or hub id of the teacher. With kind url: its name on a server with several models.",
    )
    url: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="With kind url: address of an OpenAI-compatible server that gives `prompt_logprobs`, as vLLM's and "
        "`lachesis serve` do. Put an API key into the environment variable `LACHESIS_TEACHER_KEY`.",
    )
    revision: str | None = Field(default=None, description="As `model.revision`, for the teacher.")
    weight: NonNegativeFloat = Field(default=1.0, description="Weight of the divergence from the teacher.")
    reward_weight: NonNegativeFloat = Field(
        default=1.0, description="Weight of the loss from rewards; 0 learns only from the teacher."
    )
    weights: dict[str, NonNegativeFloat] = Field(
        default_factory=dict[str, NonNegativeFloat], description="Overrides `weight`, by environment."
    )
    reward_weights: dict[str, NonNegativeFloat] = Field(
        default_factory=dict[str, NonNegativeFloat], description="Overrides `reward_weight`, by environment."
    )
    column: str = Field(
        default="env_id",
        description="Column that names the environment of a problem in these two keys; the API's is `env_id`.",
    )
    beta: Fraction = Field(
        default=1.0,
        description="1 is the reverse KL, 0 the forward KL, a value between them the generalized Jensen-Shannon "
        "divergence (GKD).",
    )
    clip: PositiveFloat | None = Field(
        default=None, description="Maximum that one token of the vocabulary may add to the divergence (OPSD: 0.05)."
    )
    estimate: Literal["exact", "sampled"] = Field(
        default="exact",
        description="Divergence from the teacher's whole distribution, or from the sampled token (reverse KL).",
    )
    top_k: PositiveInt | None = Field(
        default=None,
        description="Compare over the teacher's K likeliest tokens, and the rest as one; unset: over all known ones.",
    )


class SftConfig(Section):
    """Supervised fine-tuning on answers before training on rewards, if `run.stages` has `sft`."""

    steps: PositiveInt = Field(
        default=100, description="Optimizer steps of the warm start, before those of `run.steps`."
    )
    path: str | None = Field(default=None, description="As `data.path`, with answers; `data.path` itself if unset.")
    column: str = Field(default="answer", description="Column with the answer that the model learns to give.")
    batch_size: PositiveInt = Field(default=32, description="Number of answers in one optimizer step.")
    learning_rate: PositiveFloat = Field(default=1e-5, description="Constant learning rate; 1e-4 is usual with LoRA.")


# The loss takes this record directly: a new loss option is a field here and its use in lachesis.train.losses.
class AlgorithmConfig(Section):
    """The loss and the advantages. Names and meanings are TRL's."""

    model_config = ConfigDict(allow_inf_nan=False)

    preset: PresetName | None = Field(
        default=None,
        description="Name of an algorithm, which sets the keys that `lachesis plan` prints; explicit keys win.",
    )
    loss_type: LossTypeName = Field(default="grpo", description="Loss function and its normalization.")
    normalization: Literal["sequence_mean", "sequence_sum", "token_mean", "constant_length"] | None = Field(
        default=None,
        description="Mean over sequences of the mean, the sum, or the sum / `sampling.max_completion_length` of their "
        "tokens, or mean over all tokens; the default of `loss_type` if unset.",
    )
    loss: CustomPart | None = Field(
        default=None,
        description="Import path or `FILE.py:FUNCTION` of your own loss, in place of `loss_type`.",
    )
    advantage: CustomPart | None = Field(
        default=None,
        description="`FILE.py:FUNCTION` or import path of your own advantages, for `scale_rewards`, `baseline` and "
        "`aggregation`.",
    )
    num_iterations: PositiveInt = Field(
        default=1, description="Optimizer steps on each batch, all against the logprobs from before the first."
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_product"] = Field(
        default="token",
        description="Ratio per token, or per sequence: the geometric mean (GSPO) or the product (RLOO) of its tokens'.",
    )
    epsilon: NonNegativeFloat = Field(
        default=0.2,
        description="Ratios are clipped below at 1 - epsilon (GMPO: log ratios at -epsilon); DPPO's bound if A < 0.",
    )
    epsilon_high: NonNegativeFloat | None = Field(
        default=None, description="Ratios are clipped above at 1 + this; DPPO's bound if A > 0; `epsilon` if unset."
    )
    delta: PositiveFloat | None = Field(
        default=None, description="Upper bound of the ratio if A < 0, where PPO does not clip it; none if unset."
    )
    beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL divergence from the reference; with 0 no reference is loaded."
    )
    kl_reference: Literal["base", "ema", "sampler"] = Field(
        default="base",
        description="Reference of the KL: the model before training, a moving average of the policy, or the sampling "
        "policy.",
    )
    ref_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.6, description="With `ema`: alpha in reference = alpha x policy + (1 - alpha) x reference."
    )
    ref_sync_steps: PositiveInt = Field(default=512, description="With `ema`: update the reference every N steps.")
    kl_placement: Literal["loss", "reward", "reward_to_go"] = Field(
        default="loss",
        description="Where the KL term goes: into the loss, a completion's reward (`reward`, as verl's "
        "`use_kl_in_reward` and TRL's RLOO), or each token's advantage, summed to the end (`reward_to_go`, as "
        "OpenRLHF).",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="Estimator of the KL of a token; k3 in the loss and k1 in the reward if unset."
    )
    kl_target: PositiveFloat | None = Field(
        default=None,
        description="KL per token, in nats, at which adapting `beta` aims; `beta` is constant if unset.",
    )
    kl_horizon: PositiveInt = Field(
        default=10_000, description="With `kl_target`: completions over which `beta` changes by at most about a fifth."
    )
    use_bias_correction_kl: bool = Field(default=True, description="Multiply the KL term by the importance ratio.")
    teacher: TeacherConfig | None = Field(default=None, description="A model to learn from, besides the rewards.")
    teachers: dict[str, TeacherConfig] = Field(
        default_factory=dict[str, TeacherConfig],
        description="In place of `teacher`, a teacher for each of several `sources`, by the source's name; a source "
        "that is not named learns from its rewards alone.",
    )
    scale_rewards: ScaleRewards = Field(
        default="group",
        description="What advantages are divided by: the standard deviation of the group or the batch, nothing, the "
        "group's mean (MaxRL), or the share of completions in groups with unequal rewards (`signal`, GPG). "
        "`advantages` whitens them over the batch (TRL's RLOO), `tokens` over all tokens (REINFORCE++).",
    )
    reward_clip: tuple[float, float] | None = Field(
        default=None,
        description="Bounds of the weighted sum of a completion's rewards, before a KL term in it; none if unset.",
    )
    baseline: Baseline = Field(
        default="group_mean",
        description="Baseline of a reward: its group's mean, the others' mean (RLOO), a mean by length (OPO), or none.",
    )
    aggregation: Aggregation = Field(
        default="sum_then_normalize", description="Sum rewards, then normalize; or normalize each, then sum (GDPO)."
    )
    mask_truncated: bool = Field(
        default=False, description="Leave completions that hit the length limit out of the loss, but not of baselines."
    )
    sampler_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="none",
        description="Weight the loss by the ratio of trainer to sampler probability, per token or sequence; outside "
        "the bounds the weight becomes the bound (truncate) or 0 (mask). Unset: `token_truncate` with 8-bit "
        "engines or "
        "`pipeline.async_prefetch`.",
    )
    sampler_correction_max: PositiveFloat | None = Field(default=3.0, description="Upper bound of that weight.")
    sampler_correction_min: PositiveFloat | None = Field(
        default=None, description="Lower bound of that weight; none if unset."
    )
    off_policy_mask_threshold: float | None = Field(
        default=None,
        description="Leave out sequences with negative advantage if the KL between sampler and policy exceeds this (in "
        "nats, OPSM).",
    )
    entropy_coef: float = Field(default=0.0, description="Weight of an entropy bonus.")
    router_aux_loss_coef: NonNegativeFloat | Literal["model"] | None = Field(
        default=None,
        description="Weight of the routers' load-balancing loss of a mixture of experts; `model` takes the weight in "
        "the model's configuration. Unset: that weight if its `output_router_logits` is true, else none.",
    )
    router_replay: bool = Field(
        default=False,
        description="Route each token in training to the experts that the engine sampled it with (R3).",
    )
    top_entropy_quantile: Fraction = Field(
        default=1.0, description="Train on this share of the tokens only, those of highest entropy."
    )
    sapo_temperature_pos: PositiveFloat = Field(default=1.0, description="With `sapo`: temperature where A > 0.")
    sapo_temperature_neg: PositiveFloat = Field(default=1.05, description="With `sapo`: temperature where A <= 0.")
    cov_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=2e-4, description="With `clip_cov` and `kl_cov`: share of a step's tokens to select."
    )
    cov_low: float = Field(default=1.0, description="With `clip_cov`: select only tokens of higher covariance.")
    cov_high: float = Field(default=5.0, description="With `clip_cov`: select only tokens of lower covariance.")
    cov_kl_coef: NonNegativeFloat = Field(default=1.0, description="With `kl_cov`: weight of |log r| of selected ones.")
    skip_zero_advantage: bool = Field(
        default=True,
        description="Leave sequences with advantage 0 out of the forward pass; normalization still counts them.",
    )

    @property
    def upper_epsilon(self) -> float:
        """Return the upper clip bound: ``epsilon_high`` or, if unset, ``epsilon`` (CISPO: 5)."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_EPSILON_HIGH if self.loss_type == "cispo" else self.epsilon

    @property
    def loss_beta(self) -> float:
        """Return the weight of the KL term in the loss: 0 if the term is in the reward."""
        return self.beta if self.kl_placement == "loss" else 0.0

    @property
    def holds_reference(self) -> bool:
        """Return True if the KL term or the policy's own teacher needs the reference."""
        own = (one for one in self.all_teachers.values() if one.kind == "self")
        return self.beta > 0 or any(one.weights_of == "reference" for one in own)

    @property
    def all_teachers(self) -> Mapping[str, TeacherConfig]:
        """Return the teachers by the names of their sources; that of all is under an empty name."""
        return self.teachers if self.teacher is None else {"": self.teacher}

    @property
    def tightest_clip(self) -> float:
        """Return the smaller of the two clip bounds."""
        return min(self.epsilon, self.upper_epsilon)

    @property
    def ignores_zero_advantage(self) -> bool:
        """Return True if a sequence with advantage 0 has no gradient and does not affect the gradient of others.

        A KL term, an entropy bonus or a teacher gives it a gradient; the entropy quantile and the means of covariances
        are over all tokens.
        """
        alone = not self.loss_beta and not self.entropy_coef and self.top_entropy_quantile == 1
        return alone and not self.all_teachers and self.loss_type not in ("clip_cov", "kl_cov")


class BatchConfig(Section):
    """The size of one optimizer step and of one forward pass."""

    prompts_per_step: PositiveInt = Field(default=32, description="Number of prompts (groups) in one optimizer step.")
    steps_per_generation: PositiveInt = Field(
        default=1,
        description="Optimizer steps per generation; one generation has this many times `prompts_per_step` prompts.",
    )
    max_tokens_per_microbatch: PositiveInt = Field(
        default=8192, description="Maximum number of tokens in one forward pass; a longer sequence goes through alone."
    )
    micro_batch_size: PositiveInt | None = Field(default=None, description="Maximum sequences in one forward pass.")


class OptimizerConfig(Section):
    """The optimizer, its schedule and the precision of updates."""

    kind: Literal["adamw", "adamw_8bit", "adamw_cpu", "adafactor", "muon"] = Field(
        default="adamw",
        description="AdamW (also with 8-bit states, or on the CPU), Adafactor, or Muon with AdamW for vectors.",
    )
    function: CustomPart | None = Field(
        default=None,
        description="Import path or `FILE.py:NAME` of your own optimizer, such as `torch.optim.SGD`.",
    )
    learning_rate: PositiveFloat | None = Field(
        default=None, description="Peak learning rate; 1e-6, or 1e-5 with LoRA, if unset."
    )
    scale_parameter: bool = Field(
        default=False, description="With Adafactor: multiply each tensor's step by the root mean square of its weights."
    )
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="Decay rates of AdamW's two moments.")
    eps: PositiveFloat = Field(default=1e-8, description="Term added to AdamW's denominator.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay.")
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradient norm is clipped to this; unset: never."
    )
    max_skipped_steps: NonNegativeInt = Field(
        default=3,
        description="Number of consecutive steps that may be skipped for a non-finite gradient before the run fails.",
    )
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        default="constant", description="Learning-rate schedule after warm-up."
    )
    stable_steps: NonNegativeInt | None = Field(
        default=None,
        description="With `warmup_stable_decay`: steps at the peak; if unset, the run's steps minus warm-up and decay.",
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="With `warmup_stable_decay`: steps of decay; a tenth of the run if unset.",
    )
    decay: Literal["cosine", "linear", "1-sqrt"] = Field(
        default="cosine", description="With `warmup_stable_decay`: shape of the decay."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Number of linear warm-up steps.")
    warmup_ratio: Fraction = Field(
        default=0.0, description="Warm-up as a share of the run's steps, rounded up; an alternative to `warmup_steps`."
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="Final rate of a falling schedule, as a share of the peak.")
    weight_update: Literal["auto", "fp32_master", "stochastic_rounding", "plain"] = Field(
        default="auto",
        description="How 16-bit weights take updates smaller than their spacing; `auto` keeps fp32 master weights.",
    )
