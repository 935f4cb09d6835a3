"""The algorithm, the batches and the optimizer."""

from __future__ import annotations

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

# CISPO bounds the ratio itself, and PPO's 0.2 in its place would make the weight a constant; 5 is usual.
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
    """Return the names in braces of a text; raise ValueError if a brace is not closed."""
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


class TeacherConfig(Section):
    """A teacher that the policy's own samples are shown to (on-policy distillation), beside the rewards."""

    model_config = ConfigDict(allow_inf_nan=False)

    kind: Literal["model", "url", "rollouts", "self"] = Field(
        default="model",
        description="A frozen model beside the policy, a server (`url`), logprobs from the rollout API "
        "(`distill_token_ids`, `distill_logprobs`), or the policy itself with a longer prompt (`prompts`).",
    )
    prompts: list[str] = Field(
        default_factory=list[str],
        description="With kind self: the teacher's text in place of the last message (or the prompt). `{prompt}` is "
        "that text, `{solution}` a completion of the group with a reward of `success`, another `{name}` a column. The "
        "first entry whose names all have values is used; without one the completion has no teacher.",
    )
    success: float = Field(
        default=1.0, description="With kind self: least reward of a completion that another one's teacher is shown."
    )
    weights_of: Literal["policy", "reference"] = Field(
        default="policy",
        description="With kind self: the current weights, or those of `algorithm.kl_reference` (base or ema).",
    )
    model: str | None = Field(
        default=None,
        description="Directory or hub id of the teacher. With kind url: its name at the server, if that has several.",
    )
    url: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="With kind url: address of an OpenAI-compatible server that gives `prompt_logprobs`, as vLLM's and "
        "`lachesis serve` do. A key goes into the variable `LACHESIS_TEACHER_KEY`.",
    )
    revision: str | None = Field(default=None, description="As `model.revision`, of the teacher.")
    weight: NonNegativeFloat = Field(default=1.0, description="Weight of the divergence from the teacher.")
    reward_weight: NonNegativeFloat = Field(
        default=1.0, description="Weight of the loss from rewards; 0 learns from the teacher alone."
    )
    weights: dict[str, NonNegativeFloat] = Field(
        default_factory=dict[str, NonNegativeFloat], description="In place of `weight`, by environment."
    )
    reward_weights: dict[str, NonNegativeFloat] = Field(
        default_factory=dict[str, NonNegativeFloat], description="In place of `reward_weight`, by environment."
    )
    column: str = Field(
        default="env_id",
        description="Column of a problem that names its environment in these two; `env_id` is the rollout API's.",
    )
    beta: Fraction = Field(
        default=1.0,
        description="1 is the reverse KL, 0 the forward KL, between them the generalized Jensen-Shannon divergence "
        "(GKD).",
    )
    clip: PositiveFloat | None = Field(
        default=None, description="Most that one token of the vocabulary may add to the divergence (OPSD: 0.05)."
    )
    estimate: Literal["exact", "sampled"] = Field(
        default="exact",
        description="Over the teacher's distribution of each token, or (reverse KL) from the sampled token alone.",
    )
    top_k: PositiveInt | None = Field(
        default=None,
        description="Compare over the teacher's K likeliest tokens and one for the rest; unset: over all known ones.",
    )


class SftConfig(Section):
    """Supervised fine-tuning on answers before the rewards, where `run.stages` has `sft`."""

    steps: PositiveInt = Field(
        default=100, description="Optimizer steps of the warm start, before those of `run.steps`."
    )
    path: str | None = Field(default=None, description="As `data.path`, with answers; the problems if unset.")
    column: str = Field(default="answer", description="Column with the answer, which the model learns to give.")
    batch_size: PositiveInt = Field(default=32, description="Answers in one optimizer step.")
    learning_rate: PositiveFloat = Field(default=1e-5, description="The rate, constant; 1e-4 is usual with LoRA.")


# The loss takes this record itself: an option of it is a field here and its use in lachesis.train.losses.
class AlgorithmConfig(Section):
    """The loss and the advantages. Names and meanings are TRL's."""

    model_config = ConfigDict(allow_inf_nan=False)

    preset: PresetName | None = Field(
        default=None,
        description="An algorithm by name, for the keys that `lachesis plan` prints; keys that are written win.",
    )
    loss_type: LossTypeName = Field(default="grpo", description="Loss and normalization.")
    normalization: Literal["sequence_mean", "sequence_sum", "token_mean", "constant_length"] | None = Field(
        default=None,
        description="Mean over sequences of their tokens' mean, sum or sum / `sampling.max_completion_length`, or mean "
        "over all tokens; that of `loss_type` if unset.",
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
        description="Ratio per token, or per sequence: its tokens' geometric mean (GSPO), or their product (RLOO).",
    )
    epsilon: NonNegativeFloat = Field(
        default=0.2,
        description="Ratios are clipped below at 1 - epsilon (GMPO: their logs at -epsilon); DPPO's bound where A < 0.",
    )
    epsilon_high: NonNegativeFloat | None = Field(
        default=None, description="The upper bound likewise, and DPPO's where A > 0; epsilon if unset."
    )
    delta: PositiveFloat | None = Field(
        default=None, description="Upper bound of the ratio where it is not clipped; unbounded if unset."
    )
    beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL divergence to the reference; 0 holds no reference."
    )
    kl_reference: Literal["base", "ema", "sampler"] = Field(
        default="base",
        description="Reference of the KL: the model before training, a moving average of the policy, or the sampling "
        "policy.",
    )
    ref_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.6, description="With `ema`: the reference becomes alpha times policy plus 1 - alpha times itself."
    )
    ref_sync_steps: PositiveInt = Field(default=512, description="With `ema`: so every N steps.")
    kl_placement: Literal["loss", "reward", "reward_to_go"] = Field(
        default="loss",
        description="Where the KL term goes: into the loss, a completion's reward (`reward`, as verl's "
        "`use_kl_in_reward` and TRL's RLOO), or each token's advantage, summed to the end (`reward_to_go`, as "
        "OpenRLHF).",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="Estimate of the KL of a token; k3 in the loss and k1 in the reward if unset."
    )
    kl_target: PositiveFloat | None = Field(
        default=None,
        description="KL per token, in nats, that `beta` is adapted to; constant `beta` if unset.",
    )
    kl_horizon: PositiveInt = Field(
        default=10_000, description="With `kl_target`: completions over which `beta` changes by about a fifth at most."
    )
    use_bias_correction_kl: bool = Field(default=True, description="Multiply the KL term by the importance ratio.")
    teacher: TeacherConfig | None = Field(default=None, description="A model to learn from, beside the rewards.")
    scale_rewards: ScaleRewards = Field(
        default="group",
        description="What advantages are divided by: the deviation of the group or the batch, nothing, the group's "
        "mean (MaxRL), or the share in groups that differ (`signal`, GPG). `advantages` whitens them over the batch "
        "(TRL's RLOO), `tokens` over all tokens (REINFORCE++).",
    )
    reward_clip: tuple[float, float] | None = Field(
        default=None,
        description="Bounds of the weighted sum of a completion's rewards, before a KL term in it; none if unset.",
    )
    baseline: Baseline = Field(
        default="group_mean",
        description="Baseline of a reward: its group's mean, the others' (RLOO), one by length (OPO), or nothing.",
    )
    aggregation: Aggregation = Field(
        default="sum_then_normalize", description="Sum several rewards first, or normalize each first (GDPO)."
    )
    mask_truncated: bool = Field(
        default=False, description="Leave completions that hit the length limit out of the loss, not out of baselines."
    )
    sampler_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="none",
        description="Weight the loss by the trainer's probability over the sampler's, per token or sequence; beyond "
        "the bounds it becomes the bound (truncate) or 0 (mask). Unset: `token_truncate` with 8-bit engines or "
        "`pipeline.async_prefetch`.",
    )
    sampler_correction_max: PositiveFloat | None = Field(default=3.0, description="Upper bound of that weight.")
    sampler_correction_min: PositiveFloat | None = Field(
        default=None, description="Lower bound of that weight; none if unset."
    )
    off_policy_mask_threshold: float | None = Field(
        default=None,
        description="Leave out sequences with negative advantage whose sampler is further than this from the policy "
        "(nats, OPSM).",
    )
    entropy_coef: float = Field(default=0.0, description="Weight of an entropy bonus.")
    router_aux_loss_coef: NonNegativeFloat | Literal["model"] | None = Field(
        default=None,
        description="Weight of the routers' load-balancing loss of a mixture of experts; `model` takes the weight in "
        "the model's configuration. Unset: that weight if its `output_router_logits` is true, else none.",
    )
    router_replay: bool = Field(
        default=False,
        description="Train each token through the experts that the engine sampled it with (R3).",
    )
    top_entropy_quantile: Fraction = Field(
        default=1.0, description="Train on this share of the tokens only, those of highest entropy."
    )
    sapo_temperature_pos: PositiveFloat = Field(default=1.0, description="With `sapo`: temperature where A > 0.")
    sapo_temperature_neg: PositiveFloat = Field(default=1.05, description="With `sapo`: temperature where A <= 0.")
    cov_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=2e-4, description="With `clip_cov` and `kl_cov`: share of the step's tokens that is chosen."
    )
    cov_low: float = Field(default=1.0, description="With `clip_cov`: tokens of higher covariance may be chosen.")
    cov_high: float = Field(default=5.0, description="With `clip_cov`: tokens of lower covariance may be chosen.")
    cov_kl_coef: NonNegativeFloat = Field(default=1.0, description="With `kl_cov`: weight of the chosen's |log r|.")
    skip_zero_advantage: bool = Field(
        default=True,
        description="Leave sequences with advantage 0 out of the forward pass; normalization still counts them.",
    )

    @property
    def upper_epsilon(self) -> float:
        """Return the upper bound: ``epsilon_high`` or, if that is unset, ``epsilon`` (CISPO: 5)."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_EPSILON_HIGH if self.loss_type == "cispo" else self.epsilon

    @property
    def loss_beta(self) -> float:
        """Return the weight of the KL term in the loss: 0 where it is in the reward."""
        return self.beta if self.kl_placement == "loss" else 0.0

    @property
    def holds_reference(self) -> bool:
        """Return True if the KL term or the policy's own teacher needs the reference."""
        taught = self.teacher
        return self.beta > 0 or (taught is not None and taught.kind == "self" and taught.weights_of == "reference")

    @property
    def tightest_clip(self) -> float:
        """Return the smaller of the two bounds."""
        return min(self.epsilon, self.upper_epsilon)

    @property
    def ignores_zero_advantage(self) -> bool:
        """Return True if a row with advantage 0 has no gradient and does not affect any other row's.

        A KL term, an entropy bonus or a teacher gives it a gradient, and the entropy quantile is taken over all tokens.
        """
        alone = not self.loss_beta and not self.entropy_coef and self.top_entropy_quantile == 1
        return alone and self.teacher is None


class BatchConfig(Section):
    """The size of one optimizer step and of one forward pass."""

    prompts_per_step: PositiveInt = Field(default=32, description="Prompts (groups) in one optimizer step.")
    steps_per_generation: PositiveInt = Field(
        default=1,
        description="Optimizer steps per generation, which has this many times `prompts_per_step` prompts.",
    )
    max_tokens_per_microbatch: PositiveInt = Field(
        default=8192, description="Most tokens in one forward pass; a longer sequence goes alone."
    )
    micro_batch_size: PositiveInt | None = Field(default=None, description="Most sequences in one forward pass.")


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
        default=None, description="Peak rate; 1e-6, or 1e-5 with LoRA, if unset."
    )
    scale_parameter: bool = Field(
        default=False, description="With Adafactor: multiply each tensor's step by the root mean square of its weights."
    )
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="AdamW's moment decays.")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's denominator offset.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay.")
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradient norm is clipped to this; unset: never."
    )
    max_skipped_steps: NonNegativeInt = Field(
        default=3,
        description="Steps in a row that may be skipped for a non-finite gradient before the run ends.",
    )
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        default="constant", description="Course of the learning rate after warm-up."
    )
    stable_steps: NonNegativeInt | None = Field(
        default=None,
        description="With `warmup_stable_decay`: steps at the peak; if unset, the run without warm-up and decay.",
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="With `warmup_stable_decay`: steps of decay; a tenth of the run if unset.",
    )
    decay: Literal["cosine", "linear", "1-sqrt"] = Field(
        default="cosine", description="With `warmup_stable_decay`: how the rate falls."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps of linear warm-up.")
    warmup_ratio: Fraction = Field(
        default=0.0, description="The same as a share of the run's steps, rounded up, in place of `warmup_steps`."
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="Where a schedule that falls ends, as a share of the peak.")
    weight_update: Literal["auto", "fp32_master", "stochastic_rounding", "plain"] = Field(
        default="auto",
        description="How 16-bit weights take updates below their spacing; `auto` keeps fp32 masters.",
    )
