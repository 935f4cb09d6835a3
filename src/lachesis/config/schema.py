"""The canonical configuration tree. Every key has a type, a default and one sentence that says what it does.

Unknown keys are errors; a configuration never changes after it was read. Checks that span sections are in
:mod:`lachesis.config.rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: strict about keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field(default="run", description="Name of the run; its directory is DIR/NAME.")
    dir: str = Field(default="runs", description="Directory that holds run directories.")
    seed: NonNegativeInt = Field(default=0, description="Seed of everything random: data order, sampling, dropout.")
    steps: PositiveInt = Field(description="Number of optimizer steps.")
    setup: str | None = Field(
        default=None,
        description="Import path or file path `FILE.py:FUNCTION` of a function called once before the model "
        "is loaded, with the model path; for examples that build their own model.",
    )


class ModelConfig(Section):
    """The model to train."""

    path: str = Field(description="Local directory or hub id of a causal language model.")
    tokenizer: str | None = Field(default=None, description="Tokenizer directory or hub id; the model's own if unset.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Dtype of the weights; `auto` takes the checkpoint's on GPU and float32 on CPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the trainer's model lives.")
    trust_remote_code: bool = Field(
        default=False, description="Run code that comes with the model. Off unless you ask."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, about a third slower."
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="Compile decoder layers with torch.compile; `auto` does on GPU."
    )
    packing: Literal["auto", "packed", "padded"] = Field(
        default="auto",
        description="`packed` trains on one stream without padding and with each prompt once a group; `padded` "
        "is for architectures whose attention cannot be replaced; `auto` chooses.",
    )
    pad_token: str | None = Field(
        default=None, description="Pad token to use where the tokenizer has none; it must be in the vocabulary."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja chat template (text or file) that replaces the tokenizer's own."
    )


class NoAdapter(Section):
    """Full fine-tuning."""

    kind: Literal["none"] = "none"


class LoraAdapter(Section):
    """LoRA through peft; saved as a standard adapter."""

    kind: Literal["lora"] = "lora"
    r: PositiveInt = Field(default=16, description="Rank of the update matrices.")
    alpha: PositiveFloat = Field(default=32, description="Scaling: the update is multiplied by alpha / r.")
    dropout: Fraction = Field(default=0.0, description="Dropout on the adapter's input while training.")
    targets: str | list[str] = Field(
        default="all-linear", description="Module names to adapt, or `all-linear` for every linear layer but the head."
    )


AdapterConfig = Annotated[NoAdapter | LoraAdapter, Field(discriminator="kind")]


class DataConfig(Section):
    """Where prompts come from."""

    path: str = Field(description="JSONL file with a problem a line.")
    prompt_column: str = Field(default="prompt", description="Column with the prompt: a string, or a list of messages.")
    eval_path: str | None = Field(default=None, description="JSONL file with the held-out problems.")
    eval_size: NonNegativeInt = Field(
        default=0, description="Without `eval_path`: number of problems split off the end after shuffling."
    )
    shuffle: bool = Field(default=True, description="Shuffle the problems, anew each epoch.")
    max_prompt_length: PositiveInt | None = Field(
        default=None, description="Longest prompt in tokens; unset takes what the model's context leaves."
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error", description="What to do with prompts that are too long: stop, or drop and count them."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables for the chat template."
    )


class LocalSource(Section):
    """Prompts from a dataset, completions from the engine, rewards from Python functions."""

    kind: Literal["local"] = "local"


class RewardsConfig(Section):
    """How completions are scored."""

    functions: list[str] = Field(
        min_length=1, description="Import paths `module.function`, or `FILE.py:FUNCTION`, relative to the config."
    )
    weights: list[float] | None = Field(default=None, description="A weight per function; all 1 if unset.")
    on_error: Literal["fail", "drop_group"] = Field(
        default="fail",
        description="What a reward that raises, hangs or returns NaN does: stop the run, or drop that group and "
        "count it. It never becomes 0.",
    )
    timeout_s: PositiveFloat = Field(default=60.0, description="Deadline of one call of one reward function.")


class SamplingConfig(Section):
    """How completions are sampled in training."""

    num_generations: Annotated[int, Field(ge=2)] = Field(default=8, description="Completions per prompt (group size).")
    max_completion_length: PositiveInt = Field(default=256, description="Longest completion in tokens.")
    temperature: PositiveFloat = Field(default=1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus sampling; 1 cuts nothing.")
    top_k: NonNegativeInt = Field(default=0, description="Sample among the k likeliest tokens; 0 cuts nothing.")
    min_p: Fraction = Field(default=0.0, description="Drop tokens below min_p times the likeliest; 0 cuts nothing.")
    repetition_penalty: PositiveFloat = Field(default=1.0, description="Penalty for tokens already seen; 1 is none.")
    stop_token_ids: list[int] = Field(default_factory=list, description="Further tokens that end a completion.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion.")


class EmbeddedEngineConfig(Section):
    """Generation in the trainer's process with transformers, on the trainer's own weights."""

    kind: Literal["embedded"] = "embedded"
    max_batch_size: PositiveInt = Field(default=512, description="Most sequences decoded at the same time.")


EngineConfig = EmbeddedEngineConfig


class InProcessBridge(Section):
    """The engine generates with the trainer's own parameters: nothing is transferred, all is proved."""

    kind: Literal["in_process"] = "in_process"
    proof: bool = Field(default=True, description="Prove after each update that the engine has the trainer's weights.")


BridgeConfig = InProcessBridge


class AlgorithmConfig(Section):
    """The loss and the advantages. Names and meanings are TRL's."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = Field(default="grpo", description="Loss and normalization.")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Ratio per token, or one per sequence (its geometric mean, as in GSPO)."
    )
    epsilon: NonNegativeFloat = Field(default=0.2, description="Ratios are clipped below at 1 - epsilon.")
    epsilon_high: NonNegativeFloat | None = Field(
        default=None, description="Ratios are clipped above at 1 + epsilon_high; epsilon if unset."
    )
    beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL divergence to the base model; 0 holds none."
    )
    use_bias_correction_kl: bool = Field(default=True, description="Multiply the KL term by the importance ratio.")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="What advantages are divided by: the group's deviation, the batch's, or nothing."
    )
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize", description="Sum several rewards first, or normalize each first (GDPO)."
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="Leave sequences whose advantage is 0 out of the forward pass (their gradient is 0 without "
        "KL term); normalization still counts them.",
    )


class BatchConfig(Section):
    """How much goes into one optimizer step, and into one forward pass."""

    prompts_per_step: PositiveInt = Field(default=32, description="Prompts (groups) in one optimizer step.")
    max_tokens_per_microbatch: PositiveInt = Field(
        default=8192, description="Most tokens in one forward pass; a longer sequence goes alone."
    )
    micro_batch_size: PositiveInt | None = Field(default=None, description="Most sequences in one forward pass.")


class OptimizerConfig(Section):
    """The optimizer, its schedule and the precision of updates."""

    kind: Literal["adamw", "adamw_8bit", "adamw_cpu", "adafactor"] = Field(
        default="adamw", description="AdamW, AdamW with 8-bit states, AdamW with states on the CPU, or Adafactor."
    )
    learning_rate: PositiveFloat | None = Field(
        default=None, description="Peak rate; 1e-6, or 1e-5 with LoRA, if unset."
    )
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="AdamW's moment decays.")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's denominator offset.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay.")
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradient norm is clipped to this; unset: never."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Course of the learning rate after warm-up."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps of linear warm-up.")
    min_lr_ratio: Fraction = Field(default=0.0, description="Where `linear` and `cosine` end, as a share of the peak.")
    weight_update: Literal["auto", "fp32_master", "stochastic_rounding", "plain"] = Field(
        default="auto",
        description="How 16-bit weights take updates smaller than their spacing; `auto` keeps fp32 masters for "
        "them, and does nothing for float32 weights.",
    )


class DeadlinesConfig(Section):
    """The longest each named wait may take, in seconds."""

    generation_s: PositiveFloat = Field(default=1800.0, description="Generating the completions of one batch.")
    batch_s: PositiveFloat = Field(default=3600.0, description="The trainer waiting for its next batch.")
    sync_s: PositiveFloat = Field(default=300.0, description="Bringing new weights to the engine and proving them.")


class EvaluationConfig(Section):
    """Evaluation on the held-out problems."""

    every_steps: NonNegativeInt = Field(default=0, description="Evaluate every N steps; 0: only before and after.")
    max_problems: PositiveInt | None = Field(default=None, description="Use only the first N held-out problems.")
    temperature: NonNegativeFloat = Field(default=0.0, description="0 is greedy.")
    success_reward: float = Field(default=1.0, description="A completion with at least this total reward is a success.")


class CheckpointConfig(Section):
    """Saving, and going on."""

    every_steps: NonNegativeInt = Field(
        default=0, description="Save a resumable checkpoint every N steps; 0: only on stop."
    )
    keep_last: PositiveInt = Field(default=2, description="Older resumable checkpoints are deleted.")
    save_final: bool = Field(default=True, description="Save the trained model (or adapter) under final/ at the end.")


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(description="Project name.")
    group: str | None = Field(default=None, description="Group name.")
    name: str | None = Field(default=None, description="Run name; the run's own if unset.")
    mode: Literal["online", "offline", "disabled"] = Field(default="online", description="As wandb's own WANDB_MODE.")


class LoggingConfig(Section):
    """What is written while the run goes on."""

    every_steps: PositiveInt = Field(
        default=1, description="Plain console lines every N steps (where there is no terminal)."
    )
    tape: bool = Field(default=True, description="Write each step's rollouts to rollouts/.")
    report_groups: NonNegativeInt = Field(default=2, description="Groups a step kept with token texts, for the report.")
    report_every_steps: PositiveInt = Field(
        default=50, description="Rewrite report.html every N steps (and at the end)."
    )
    tensorboard: bool = Field(default=False, description="Write TensorBoard events to tensorboard/.")
    wandb: WandbConfig | None = Field(default=None, description="Log to Weights & Biases.")


class LachesisConfig(Section):
    """The whole configuration."""

    run: RunConfig
    model: ModelConfig
    adapter: AdapterConfig = Field(default_factory=NoAdapter)
    data: DataConfig
    source: LocalSource = Field(default_factory=LocalSource)
    rewards: RewardsConfig
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EmbeddedEngineConfig)
    bridge: BridgeConfig = Field(default_factory=InProcessBridge)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
