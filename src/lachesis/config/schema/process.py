"""The course of a run: deadlines, evaluation, checkpoints, logs and devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lachesis.config.section import (
    CustomPart,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from lachesis.plugins.benchmarks.section import BenchmarkConfig, BenchmarkName, needed_package
from lachesis.plugins.export.section import HubConfig
from lachesis.plugins.sinks.section import TrackioConfig, WandbConfig


class DeadlinesConfig(Section):
    """The time limits of waits, in seconds; if results arrive in parts, counted from the latest part."""

    generation_s: PositiveFloat = Field(default=1800.0, description="Generating the completions of one batch.")
    batch_s: PositiveFloat = Field(default=3600.0, description="The trainer waiting for its next batch.")
    sync_s: PositiveFloat = Field(default=300.0, description="Transferring new weights to the engine, and the proof.")
    engine_start_s: PositiveFloat = Field(
        default=900.0, description="Start of a server by the run: loading weights, compiling, capturing CUDA graphs."
    )
    teacher_s: PositiveFloat = Field(
        default=600.0, description="Computing the logprobs of one batch on the server of `algorithm.teacher`."
    )
    progress_s: PositiveFloat = Field(
        default=120.0,
        description="With several engines: an engine that is busy but generates nothing for this long is suspect, and "
        "dead after twice as long.",
    )
    ranks_s: PositiveFloat = Field(
        default=600.0, description="With several devices: one waiting for another, or for a sign of life of the leader."
    )


class EvaluationConfig(Section):
    """Evaluation on held-out problems."""

    every_steps: NonNegativeInt = Field(default=0, description="Evaluate every N steps; 0: only at start and end.")
    every_epochs: PositiveFloat | None = Field(default=None, description="As `every_steps`, in epochs of the dataset.")
    max_problems: PositiveInt | None = Field(default=None, description="Use only the first N held-out problems.")
    samples_per_problem: PositiveInt = Field(
        default=1, description="Completions per problem: k in avg@k and pass@k; more than one need a temperature."
    )
    temperature: NonNegativeFloat = Field(default=0.0, description="Sampling temperature; 0 is greedy.")
    benchmarks: list[BenchmarkName | BenchmarkConfig] = Field(
        default_factory=list[BenchmarkName | BenchmarkConfig],
        description="Benchmarks to evaluate at the same steps, from the hub or from a `path`.",
    )
    success_reward: float = Field(default=1.0, description="Minimum total reward of a successful completion.")
    patience: PositiveInt | None = Field(
        default=None,
        description="Stop early after this many evaluations in a row without a new best mean reward.",
    )

    @property
    def lacks(self) -> str | None:
        """Sentence about the package that a benchmark needs and that is not installed."""
        return needed_package([one if isinstance(one, str) else one.name for one in self.benchmarks])


class CheckpointConfig(Section):
    """Checkpoints to resume from, and the trained model."""

    every_steps: NonNegativeInt | None = Field(
        default=None,
        description="Save a resumable checkpoint every N steps; 0: only on stop. If unset, `max_share` decides.",
    )
    every_epochs: PositiveFloat | None = Field(
        default=None, description="As `every_steps`, in epochs of the dataset; `every_steps` takes precedence."
    )
    max_share: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="Without `every_steps` and `every_epochs`: save so often that saving takes at most this share of "
        "the time; 0 saves only on stop. Unset: 0.02 if trainer and engine share one copy of the weights, else 0.",
    )
    keep_last: PositiveInt = Field(default=2, description="Resumable checkpoints to keep; older ones are deleted.")
    asynchronous: bool = Field(
        default=False,
        description="Pause training only to copy the state to host memory; write the copy in the background.",
    )
    format: Literal["auto", "whole"] = Field(
        default="auto",
        description="`auto`: each rank of a sharded model writes its part to a shared `run.dir`; `whole`: rank 0 "
        "gathers and writes everything.",
    )
    save_final: bool = Field(default=True, description="Save the trained model (or adapter) under final/ at the end.")
    keep_best: bool = Field(
        default=False,
        description="Save the model (or adapter) under best/ at each new best mean reward of an evaluation.",
    )
    hub: HubConfig | None = Field(
        default=None,
        description="Upload the final model to the Hugging Face hub. Log in with `HF_TOKEN` or `hf auth login`.",
    )


class LoggingConfig(Section):
    """The logs, metrics and reports of a run."""

    every_steps: PositiveInt = Field(default=1, description="Print a console line every N steps.")
    completions: NonNegativeInt | Literal["all"] = Field(
        default=0,
        description="Number of completions to show, with prompt and rewards, at each of these steps: in the console, "
        "W&B and Trackio.",
    )
    tape: bool = Field(default=True, description="Write each step's rollouts to rollouts/.")
    report_groups: NonNegativeInt = Field(default=2, description="Groups per step kept with token texts, for reports.")
    report_every_steps: PositiveInt = Field(
        default=50, description="Rewrite report.html every N steps (and at the end)."
    )
    tensorboard: bool = Field(default=False, description="Write TensorBoard events to tensorboard/.")
    wandb: WandbConfig | None = Field(default=None, description="Log to Weights & Biases.")
    trackio: TrackioConfig | None = Field(default=None, description="Log to Trackio.")
    sinks: list[CustomPart] = Field(
        default_factory=list[CustomPart],
        description="Import paths or `FILE.py:NAME` of your own sinks, which are called for each step.",
    )
    health_rules: list[CustomPart] = Field(
        default_factory=list[CustomPart],
        description="Import paths or `FILE.py:FUNCTION` of your own health rules, in addition to the built-in ones.",
    )


class DistributedConfig(Section):
    """Training on several devices, started as ``torchrun --nproc-per-node N -m lachesis train CONFIG.yaml``."""

    strategy: Literal["shard", "replicate"] = Field(
        default="shard",
        description="Shard weights, gradients and optimizer state over devices (FSDP2), or replicate them (DDP).",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Release a layer's gathered weights between forward and backward: less memory, one more gather.",
    )
    cpu_offload: bool = Field(
        default=False, description="Keep sharded weights, gradients and optimizer state in CPU memory."
    )
    shard_size: PositiveInt | None = Field(
        default=None,
        description="Shard over groups of N devices, which are replicas of each other (HSDP); over all if unset.",
    )
    replicate_size: PositiveInt | None = Field(
        default=None,
        description="Number of such groups, as an alternative to `shard_size`.",
    )
    context_parallel_size: PositiveInt = Field(
        default=1,
        description="Number of devices that share the tokens of a micro-batch (Ulysses), for sequences that are too "
        "long for one.",
    )
    expert_parallel_size: PositiveInt = Field(
        default=1,
        description="Number of devices that share the experts of each mixture-of-experts layer; tokens are sent to "
        "their experts. They are taken from the devices that share tokens or a sharded model.",
    )
