"""Descriptions of metrics: title, unit, healthy range and one plain sentence for each name the loop emits.

The report, the health rules, the console and the documentation use them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lachesis.common.types import EvalResult

# Beginning of the name of the mean reward of one environment of the rollout API; its name there follows, or its number
# where the API tells no names.
BY_ENVIRONMENT = "reward_of_environment/"
# Beginnings of the seconds of one engine, whose host and port follow, and of one rank, whose number follows.
GENERATION_OF, TRAINING_OF = "generation_time/", "train_time/"
# Hits in the prefix caches of all engines, and the beginning of those of one of several.
PREFIX_HITS = "prefix_cache_hit_rate"
PREFIX_HITS_OF = f"{PREFIX_HITS}/"
# Of transfers: how long each of several engines received, and how long, and how much, each of several ranks sent.
RECEIVING_OF, SENDING_OF, SENT_BY = "receive_time/", "send_time/", "sent_gb/"
# Beginnings of what is measured of one GPU; its number on its machine follows, as nvidia-smi has it.
GPU_UTILIZATION, GPU_MEMORY_IN_USE = "gpu_utilization/", "gpu_memory_in_use_gb/"

Unit = Literal["", "share", "tokens", "tokens/s", "s", "GB", "nats", "sequences", "groups", "versions"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of one metric.

    ``healthy`` is ``(low, high)``, either of them ``None`` if that side has no bound; ``None`` as a whole if no range
    is known. A range that is documented for particular models and rewards only is not ``judged``: no value is then
    called unusual. A ``share`` is a fraction between 0 and 1 and shown in percent.
    """

    name: str
    title: str
    unit: Unit
    explanation: str
    healthy: tuple[float | None, float | None] | None = None
    judged: bool = True

    def is_usual(self, value: float) -> bool:
        """Return True if a value lies in the healthy range, or there is none."""
        low, high = self.healthy or (None, None)
        return (low is None or value >= low) and (high is None or value <= high)


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("loss", "Loss", "", "The policy loss. It hovers around 0 and says little; a jump says much."),
        Metric(
            "grad_norm", "Gradient norm", "", "Length of the gradient before clipping. 0 is right only where "
            "every advantage is 0; above 10, and far above what it was, training is unstable.", (0.001, 1.0),
            judged=False,
        ),
        Metric("learning_rate", "Learning rate", "", "The optimizer's rate in this step."),
        Metric(
            "mean_ratio", "Probability ratio", "", "Mean of new over old token probability. 1 where the "
            "weights are those that sampled.", (0.8, 1.2),
        ),
        Metric(
            "mean_kl", "KL to the sampler", "nats", "How far the policy has moved from the one that sampled. "
            "Usually 0.01 to 0.1, near 0 where every batch is used once; above 0.5 is bad.", (0.0, 0.1),
        ),
        Metric(
            "clipped_fraction", "Clipped tokens", "share", "Share of tokens whose ratio was clipped. Above a "
            "half the learning rate is too high.", (0.0, 0.3),
        ),
        Metric("clip_fraction_low", "Clipped below", "share", "Share of tokens clipped at 1 - epsilon."),
        Metric("clip_fraction_high", "Clipped above", "share", "Share of tokens clipped at 1 + epsilon."),
        Metric(
            "entropy", "Entropy", "nats", "How undecided the policy is. Below 0.01 it says one thing "
            "only (mode collapse).", (0.05, 0.5), judged=False,
        ),
        Metric("kl_reference", "KL to the base model", "nats", "How far the policy is from its start."),
        Metric(
            "distill_kl", "Divergence from the teacher", "nats", "How far the policy is from algorithm.teacher on its "
            "own samples, a token: the divergence that is learned from, over what is known of the teacher.",
        ),
        Metric("sft_loss", "Loss on answers", "nats", "Minus the logprob of a token, in a supervised start."),
        Metric(
            "reward", "Reward", "", "Mean total reward of all completions of the step. Of rewards from 0 to 1 it "
            "should be above 0.15 by step 20.", (0.15, None), judged=False,
        ),
        Metric(
            "reward_std", "Spread in a group", "", "Mean deviation of the rewards of a group. Where it is 0 "
            "there is nothing to learn from.", (1e-6, None),
        ),
        Metric(
            "zero_std_fraction", "Zero-variance groups", "share", "Share of groups whose completions all "
            "got the same reward; they teach nothing.", (0.0, 0.8),
        ),
        Metric("completion_length/mean", "Completion length", "tokens", "Mean length of the completions."),
        Metric("completion_length/max", "Longest completion", "tokens", "Length of the longest completion."),
        Metric(
            "truncated_fraction", "Truncated", "share", "Share of completions cut off at the length limit.",
            (0.0, 0.25),
        ),
        Metric("tokens_generated", "Tokens generated", "tokens", "Completion tokens sampled for the step."),
        Metric("tokens_trained", "Tokens trained", "tokens", "Completion tokens that the loss is normalized by."),
        Metric(
            "tokens_forward", "Tokens forward", "tokens", "Tokens that went through the model: what sequences of a "
            "group begin with in common once in a micro-batch, none of sequences without advantage.",
        ),
        Metric(
            "tokens_distinct", "Tokens distinct", "tokens", "Of these sequences, tokens that differ within their group "
            "or have others before them: the least that can go through the model.",
        ),
        Metric(
            "tokens_flat", "Tokens flat", "tokens", "Tokens of these sequences one by one, as if nothing were shared.",
        ),
        Metric("micro_batches", "Micro-batches", "", "Forward and backward passes of the step."),
        Metric("generation_tokens_per_s", "Generation speed", "tokens/s", "Completion tokens a second."),
        Metric("train_tokens_per_s", "Training speed", "tokens/s", "Tokens forward and backward a second."),
        Metric("step_time", "Step", "s", "The whole optimizer step, from waiting for data to the next one."),
        Metric("data_fetch_time", "Waiting for data", "s", "The trainer waiting for its batch."),
        Metric("generation_time", "Generation", "s", "Sampling completions, also while the trainer is at work."),
        Metric("reward_time", "Rewards", "s", "Running the reward functions."),
        Metric(
            "hidden_reward_time", "Rewards hidden", "s", "Of that, while other groups were still being generated "
            "(pipeline.streaming).",
        ),
        Metric("train_time", "Training", "s", "Forward and backward passes."),
        Metric("sync_time", "Weight sync", "s", "Optimizer step, and bringing the weights to the engine."),
        Metric("eval_time", "Evaluation", "s", "Evaluating on the held-out problems."),
        Metric("checkpoint_time", "Checkpoint", "s", "Training held up to save a checkpoint."),
        Metric(
            "checkpoint_write_time", "Checkpoint, written", "s", "From the copy of an asynchronous checkpoint to its "
            "being whole, while training went on; with the step after it.",
        ),
        Metric("gpu_memory_gb", "GPU memory", "GB", "Memory in tensors, at most, during the step."),
        Metric("gpu_memory_reserved_gb", "GPU memory reserved", "GB", "Memory held by the allocator."),
        Metric(
            "skipped_zero_advantage", "Skipped sequences", "sequences", "Sequences left out of the forward "
            "pass because their advantage is 0.",
        ),
        Metric(
            "skipped_steps", "Skipped steps", "", "1 where the gradient was not finite and the weights stayed as they "
            "were (optimizer.max_skipped_steps).", (0.0, 0.0),
        ),
        Metric("dropped_groups", "Dropped groups", "groups", "Groups given up, such as for a failed reward."),
        Metric("groups", "Groups", "groups", "Prompts in the batch."),
        Metric(
            "groups_without_logprobs", "Groups without logprobs", "groups", "Groups whose environment sent no "
            "behaviour logprobs: they are taken for on-policy.", (0.0, 0.0),
        ),
        Metric(
            "batches_known", "Batches known", "", "Batches that the rollout API handed out again and a checkpoint "
            "had already; they were passed over.",
        ),
        Metric("turns", "Turns", "", "Turns that the model took in rollouts with tools or of agents."),
        Metric(
            "tool_calls", "Tool calls", "", "Calls of tools that were answered, those with an error too; of each tool "
            "`tool_calls/NAME`, under `unknown` where there is no such tool.",
        ),
        Metric(
            "tool_errors", "Failed tool calls", "", "Calls that the model was told an error of; of each tool "
            "`tool_errors/NAME`.",
        ),
        Metric(
            "rollout_failures", "Rollouts failed", "", "Rollouts of an environment or agent that crashed, took too "
            "long or lost their sandbox or a tool's server, and completions that a reward function could not judge: "
            "all are left out of their groups; `rollout_failures/CAUSE` counts one kind.",
            (0.0, 0.0),
        ),
        Metric("refilled_rollouts", "Rollouts anew", "", "Rollouts played in the place of failed ones."),
        Metric("reward_errors", "Reward errors", "", "Reward calls that failed.", (0.0, 0.0)),
        Metric("weight_version", "Weight version", "", "How many updates the engine has received."),
        Metric(
            "staleness", "Staleness", "versions", "Updates the oldest sample is behind the policy, of those whose "
            "version is known.", (0.0, 4.0),
        ),
        Metric(
            "idle_slots", "Idle slots", "groups", "Groups that could have been generated and were not, on average over "
            "the step (pipeline.async_prefetch).",
        ),
        Metric(
            "groups_waiting", "Groups waiting", "groups", "Finished groups of later steps, at the end of this one "
            "(pipeline.async_prefetch).",
        ),
        Metric(
            "kept_groups", "Groups kept", "groups", "Groups that were finished before the run was resumed, and joined "
            "the line as they were (pipeline.keep_partial).",
        ),
        Metric(
            "kept_rollouts", "Rollouts kept", "", "Rollouts that were finished before the run was resumed, and joined "
            "their groups, which were not (pipeline.keep_partial).",
        ),
        Metric(
            "kept_let_go", "Kept rollouts let go", "", "Rollouts that were finished before the run was resumed, and "
            "are too old to be trained on in time, or of weights newer than the checkpoint's, which were lost.",
        ),
        Metric(
            PREFIX_HITS, "Prefix cache hits", "share", "Share of the prompts' tokens, counted for each completion, "
            "that engines had in their prefix caches and did not compute. Missing where engines do not say it.",
        ),
        Metric(
            "draft_acceptance", "Right guesses", "share", "Share of the tokens that speculative decoding guessed that "
            "were accepted (engine.speculative). Missing where it guessed none.",
        ),
        Metric(
            "draft_share", "Guessed tokens", "share", "Share of the generated tokens that had been guessed "
            "(engine.speculative).",
        ),
        Metric(
            "draft_length", "Tokens a guess", "tokens", "Mean accepted length: tokens that a sequence gets from a pass "
            "that verifies guesses, those that are right and one more (engine.speculative).",
        ),
        Metric("transfer_time", "Transfer", "s", "From the end of the optimizer step to the engine serving it."),
        Metric("sleep_time", "Falling asleep", "s", "The engine giving its GPU memory back before training."),
        Metric("wake_time", "Waking up", "s", "The engine taking it again; part of the transfer."),
        Metric("proof_time", "Proof of sync", "s", "Comparing canary and digests of trainer and engine."),
        Metric("canary_error", "Canary error", "nats", "Largest difference of engine and trainer on the canary."),
        Metric("canary_ratio", "Canary error over allowed", "", "The canary's error as a multiple of what is allowed."),
        Metric(
            "logprob_diff_mean", "Logprob difference", "nats", "Mean absolute difference between the trainer's and "
            "the engine's logprobs of tokens that the weights of now have sampled; stale ones do not count.",
            (0.0, 0.05),
        ),
        Metric("logprob_diff_max", "Largest logprob difference", "nats", "The largest such difference."),
        Metric(
            "expert_load_max", "Fullest expert", "", "Of a mixture of experts: tokens of the fullest one of any layer "
            "over the mean of its layer, of all ranks together. 1 is even.",
        ),
        Metric(
            "expert_load_entropy", "Evenness of experts", "share", "Of a mixture of experts: entropy of the share of "
            "tokens that each expert gets over that of even shares, mean of all layers.",
        ),
        Metric(
            "router_aux_loss", "Router loss", "", "The routers' auxiliary loss before its coefficient, where the "
            "model's configuration asks for it (output_router_logits). Where experts are alike, those of a token.",
        ),
        Metric(
            "router_replay_difference", "Other experts", "share", "With algorithm.router_replay: share of tokens and "
            "layers where the trainer's router would have chosen other experts than the engine used.",
        ),
        Metric("evaluation/accuracy", "Held-out accuracy", "share", "Share of held-out problems solved."),
        Metric("evaluation/pass_at_k", "Held-out pass@k", "share", "Share of problems with at least one success."),
        Metric("evaluation/mean_reward", "Held-out reward", "", "Mean reward on the held-out problems."),
        Metric("evaluation/mean_length", "Held-out length", "tokens", "Mean length in evaluation."),
        Metric("evaluation/seconds", "Evaluation", "s", "How long the evaluation took."),
    )
}  # fmt: skip


def describe(name: str) -> Metric:
    """Return the description of a metric.

    ``rewards/NAME/mean|std``, ``staleness/N``, ``reward_of_environment/NAME``, ``generation_time/HOST:PORT``,
    ``prefix_cache_hit_rate/HOST:PORT``, ``train_time/RANK``, ``receive_time/HOST:PORT``, ``send_time/RANK``,
    ``sent_gb/RANK``, ``gpu_utilization/N``, ``gpu_memory_in_use_gb/N`` and unknown names get one of the name.
    """
    known = METRICS.get(name)
    if known is not None:
        return known
    distance = name.removeprefix("staleness/")
    if name.startswith("staleness/") and distance.isdecimal():
        what = f"Share of the completions whose first token is {distance} updates behind the policy."
        return Metric(name, f"Staleness {distance}", "share", what)
    if name.startswith(BY_ENVIRONMENT):
        environment = name.removeprefix(BY_ENVIRONMENT)
        title = f"Environment {environment}" if environment.isdecimal() else environment
        return Metric(name, title, "", f"Mean reward of what environment {environment} sent.")
    if name.startswith(GENERATION_OF):
        engine = name.removeprefix(GENERATION_OF)
        return Metric(name, engine, "s", f"Time in which the engine {engine} had requests under way.")
    if name.startswith(PREFIX_HITS_OF):
        engine = name.removeprefix(PREFIX_HITS_OF)
        what = f"Share of the tokens of prompts that the engine {engine} had in its prefix cache."
        return Metric(name, engine, "share", what)
    if name.startswith(TRAINING_OF):
        rank = name.removeprefix(TRAINING_OF)
        what = f"Forward and backward passes of rank {rank}, with its waits for other ranks amid them."
        return Metric(name, f"rank {rank}", "s", what)
    if name.startswith(RECEIVING_OF):
        engine = name.removeprefix(RECEIVING_OF)
        return Metric(name, engine, "s", f"Time in which the engine {engine} received new weights and loaded them.")
    if name.startswith(SENDING_OF):
        rank = name.removeprefix(SENDING_OF)
        return Metric(
            name, f"rank {rank}", "s", f"Time in which rank {rank} gathered weights for senders, and sent its own."
        )
    if name.startswith(SENT_BY):
        rank = name.removeprefix(SENT_BY)
        return Metric(name, f"rank {rank}", "GB", f"Weights that rank {rank} sent to the engines.")
    if name.startswith(GPU_UTILIZATION):
        what = "Share of the time in which this GPU computed anything, by NVML; its number is nvidia-smi's."
        return Metric(name, f"GPU {name.removeprefix(GPU_UTILIZATION)}", "share", what)
    if name.startswith(GPU_MEMORY_IN_USE):
        what = "Memory of this GPU that all its processes take together, at most, by NVML."
        return Metric(name, f"GPU {name.removeprefix(GPU_MEMORY_IN_USE)}", "GB", what)
    function, _, statistic = name.removeprefix("rewards/").rpartition("/")
    if name.startswith("rewards/") and function and statistic == "mean":
        return Metric(name, f"Reward {function}", "", f"Mean reward of the function {function}.", (0.15, None))
    if name.startswith("rewards/") and function and statistic == "std":
        return Metric(name, f"Deviation of {function}", "", f"Deviation of the rewards of {function}.")
    return Metric(name, name.replace("_", " ").replace("/", " "), "", "")


def reward_functions(values: Mapping[str, float]) -> list[str]:
    """Return the names of reward functions that have a mean among the values of a step, in their order."""
    return [
        name[len("rewards/") : -len("/mean")]
        for name in values
        if name.startswith("rewards/") and name.endswith("/mean")
    ]


def evaluation_values(result: EvalResult) -> dict[str, float]:
    """Return an evaluation as metric values, for sinks that know only names and numbers."""
    return {
        "evaluation/accuracy": result.accuracy,
        "evaluation/mean_reward": result.mean_reward,
        **({} if result.pass_at_k is None else {"evaluation/pass_at_k": result.pass_at_k}),
        "evaluation/mean_length": result.mean_length,
        "evaluation/seconds": result.seconds,
    }


def format_number(value: float) -> str:
    """Format a number for people: three significant digits, thousands as 12.3k, tiny ones as 1e-06."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("-inf" if value < 0 else "inf")
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def format_share(value: float) -> str:
    """Format a share in percent: 7 %, 93 %, 99.6 %; more digits only if rounding would give 100 % or 0 %."""
    percent = 100.0 * value
    if not math.isfinite(percent):
        return format_number(percent)
    rounded = round(percent)
    near_edge = rounded in (0, 100) and percent != rounded
    return f"{percent:.1f} %" if near_edge else f"{rounded} %"


def format_seconds(seconds: float) -> str:
    """Format a duration for people: 0.4 s, 42 s, 3m 05s, 2h 10m, 1d 04h."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"
