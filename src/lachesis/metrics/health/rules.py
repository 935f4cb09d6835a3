"""Health rules: is the policy moving in the right direction and not too fast, are completions whole, fresh and exact?

Small pure functions that look at one step and say, in plain words, what to change. Ranges are those that the
field documents for GRPO: ratio 0.8 to 1.2, KL 0.01 to 0.1, clipped tokens below 0.3, reward above 0.15 by
step 20, entropy 0.05 to 0.5, gradient norm 0.001 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import TypeAlias

from lachesis.common.types import Group, Level
from lachesis.metrics.health.types import Alarm, HealthLimits, Observation
from lachesis.metrics.names import format_number, format_share, reward_functions

Rule: TypeAlias = Callable[[Observation], Alarm | None]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Have the health monitor ask this rule, under the function's name."""
    RULES[function.__name__] = function
    return function


# --- learning -------------------------------------------------------------------------------------------------


@rule
def not_finite(seen: Observation) -> Alarm | None:
    """Loss or gradient norm are NaN or infinite."""
    broken = [name for name in ("loss", "grad_norm") if not math.isfinite(seen.values.get(name, 0.0))]
    if not broken:
        return None
    skipped = seen.values.get("skipped_steps", 0.0) > 0
    consequence = ", so that step was skipped" if skipped else ""
    return Alarm(
        "warning" if skipped else "problem",
        f"{' and '.join(broken)} at step {seen.step} is not a number{consequence}: look for extreme rewards or "
        "logprobs, lower optimizer.learning_rate, clip with optimizer.max_grad_norm, and use float32 or bfloat16 "
        "(model.dtype), not float16",
    )


@rule
def loss_explodes(seen: Observation) -> Alarm | None:
    """The loss is more than 20 times its usual size."""
    size = abs(seen.values.get("loss", 0.0))
    usual = [abs(loss) for loss in seen.recent("loss", 21)[:-1] if math.isfinite(loss)]
    if not math.isfinite(size) or len(usual) < 5 or size <= max(5.0, 20.0 * median(usual)):
        return None
    return Alarm(
        "problem",
        f"the loss jumped to {format_number(size)}, from {format_number(median(usual))} in the steps "
        "before: lower optimizer.learning_rate, or raise optimizer.warmup_steps",
        size,
    )


@rule
def ratio_off(seen: Observation) -> Alarm | None:
    """The mean probability ratio is outside 0.8 to 1.2: trainer and sampler disagree."""
    ratio = seen.values.get("mean_ratio")
    if ratio is None or 0.8 <= ratio <= 1.2:
        return None
    return Alarm(
        "problem" if not 0.5 <= ratio <= 2.0 else "warning",
        f"mean_ratio is {format_number(ratio)} (healthy: 0.8 to 1.2): the policy is far from the one that "
        "sampled; lower optimizer.learning_rate, and check that sampling cuts nothing (sampling.top_p, "
        "sampling.top_k, sampling.min_p)",
        abs(math.log(ratio)) if ratio > 0 else math.inf,
    )


@rule
def kl_high(seen: Observation) -> Alarm | None:
    """The policy has moved more than 0.1 nats (a problem: 0.5) from the one that sampled."""
    if (kl := seen.above("mean_kl", 0.1)) is None:
        return None
    return Alarm(
        "problem" if kl > 0.5 else "warning",
        f"mean_kl is {format_number(kl)} (healthy: 0.01 to 0.1, bad: above 0.5): the policy moves too fast; "
        "lower optimizer.learning_rate or set algorithm.beta",
        kl,
    )


@rule
def clipped_much(seen: Observation) -> Alarm | None:
    """More than 30 % (a problem: 50 %) of the ratios are clipped."""
    if (share := seen.above("clipped_fraction", 0.3)) is None:
        return None
    return Alarm(
        "problem" if share > 0.5 else "warning",
        f"{format_share(share)} of the tokens are clipped (healthy: below 30 %): the learning rate is too "
        "high; lower optimizer.learning_rate",
        share,
    )


@rule
def reward_stays_low(seen: Observation) -> Alarm | None:
    """The mean reward is still below 0.15 after step 20 and does not rise."""
    rewards = seen.recent("reward", seen.step)
    if seen.step < 20 or len(rewards) < 10:
        return None
    now, start = fmean(rewards[-10:]), fmean(rewards[:5])
    if now > 0.15 or now - start > 0.05:
        return None
    parts = [f"{name} {format_number(seen.values[f'rewards/{name}/mean'])}" for name in reward_functions(seen.values)]
    detail = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return Alarm(
        "warning",
        f"the mean reward is {format_number(now)} after {seen.step} steps{detail} (expected: above 0.15 by "
        "step 20): call the functions of rewards.functions on answers you know to be right; if they score "
        "well, the problems are too hard for this model",
    )


@rule
def zero_variance(seen: Observation) -> Alarm | None:
    """No group has rewards that differ, told apart by cause: truncation, equal answers, a constant reward."""
    if not seen.groups:
        if seen.values.get("zero_std_fraction", 0.0) < 1.0:
            return None
        return Alarm(
            "problem",
            "all groups have zero variance: every completion of a prompt got the same reward, so there is "
            "nothing to learn; raise sampling.temperature, or choose problems that are solved sometimes",
        )
    flat = [group for group in seen.groups if _has_zero_variance(group)]
    total = len(seen.groups)
    share = len(flat) / total
    if share < 0.8 or total < 2:
        return None
    if share < 1.0:  # some groups teach
        return Alarm("note", _mostly(flat, total), share)
    level, reason = _cause(flat)
    return Alarm(level, f"all {total} groups have zero variance {reason}", share)


def _has_zero_variance(group: Group) -> bool:
    """At least two completions, and the same reward for all. Completions without a reward do not count."""
    rewards = [reward for reward in group.rewards if reward is not None]
    return len(rewards) > 1 and max(rewards) == min(rewards)


def _cause(groups: Sequence[Group]) -> tuple[Level, str]:
    """Level, and the rest of the sentence. The first cause that explains all groups counts."""
    samples = [sample for group in groups for sample in group.samples]
    longest = max(len(sample.completion_ids) for sample in samples)
    levels = sorted({reward for sample in samples if (reward := sample.reward) is not None})
    if all(sample.finish_reason == "length" for sample in samples):
        return "problem", f"because every completion hit {longest} tokens: raise sampling.max_completion_length"
    if all(not sample.text.strip() for sample in samples):
        return "problem", (
            "because every completion is empty: check how prompts end (model.chat_template, data.prompt_column)"
        )
    if len(levels) == 1 and levels[0] >= 1.0:
        return "note", (
            f"because every completion got reward {format_number(levels[0])}: these problems are solved; "
            "choose harder ones or stop"
        )
    if all(len({sample.completion_ids for sample in group.samples}) == 1 for group in groups):
        return "problem", (
            "because the completions of each prompt are identical: raise sampling.temperature, and check "
            "that sampling.top_p, sampling.top_k and sampling.min_p do not cut all but one token"
        )
    if len(levels) == 1:
        return "problem", (
            f"because every completion got reward {format_number(levels[0])}: call the functions of "
            "rewards.functions on answers you know to be right; if they score well, the problems are too "
            "hard"
        )
    return "problem", (
        "though rewards differ between prompts: they depend on the prompt, not on the answer; see whether "
        "the functions of rewards.functions read the completion"
    )


def _mostly(flat: Sequence[Group], total: int) -> str:
    """How many groups teach nothing, and whether they are too easy or too hard."""
    rewards = [max(reward for reward in group.rewards if reward is not None) for group in flat]
    right = sum(reward >= 1.0 for reward in rewards)
    wrong = sum(reward <= 0.0 for reward in rewards)
    advice = "choose harder problems" if right >= wrong else "choose easier problems"
    return (
        f"{len(flat)} of {total} groups have zero variance and teach nothing ({format_share(right / total)} "
        f"all right, {format_share(wrong / total)} all wrong): {advice}, or raise sampling.num_generations"
    )


@rule
def one_text_for_all(seen: Observation) -> Alarm | None:
    """All completions of a batch are the same text."""
    samples = [sample for group in seen.groups for sample in group.samples]
    if len({group.prompt.token_ids for group in seen.groups}) < 2 or len({s.completion_ids for s in samples}) != 1:
        return None
    text = samples[0].text
    shown = repr(text if len(text) <= 40 else text[:39] + "…")
    return Alarm(
        "problem",
        f"every completion of {len(seen.groups)} prompts is the same text ({shown}): the policy has "
        "collapsed; go back to an earlier checkpoint, then lower optimizer.learning_rate or set "
        "algorithm.beta",
    )


@rule
def entropy_off(seen: Observation) -> Alarm | None:
    """Entropy is below 0.01 (one answer for everything, unless the task is solved) or above 2.

    Five steps below 0.05 or above 0.5 are a note.
    """
    entropy = seen.values.get("entropy")
    if entropy is None:
        return None
    if 0.01 <= entropy <= 2.0:
        return _entropy_unusual(seen, entropy)
    if entropy > 2.0:
        return Alarm(
            "note",
            f"entropy is {format_number(entropy)} (usual: 0.05 to 0.5): completions are close to random "
            "text; lower sampling.temperature if they read like it",
            entropy,
        )
    rewards = seen.recent("reward", 50)
    solved = bool(rewards) and rewards[-1] >= 0.9 and rewards[-1] >= 0.9 * max(rewards)
    if solved:
        return Alarm(
            "note",
            f"entropy is {format_number(entropy)} while the reward is {format_number(rewards[-1])}: the "
            "policy is sure of its answers and learns little more; stop here or choose harder problems",
        )
    return Alarm(
        "problem",
        f"entropy is {format_number(entropy)} (mode collapse below 0.01): the policy gives one answer only; "
        "raise sampling.temperature or algorithm.epsilon_high, or lower optimizer.learning_rate",
        1.0 / max(entropy, 1e-9),
    )


def _entropy_unusual(seen: Observation, entropy: float) -> Alarm | None:
    if seen.stays("entropy", above=0.5, upto=2.0):
        return Alarm(
            "note",
            f"entropy is {format_number(entropy)} and was above 0.5 in five steps (usual: 0.05 to 0.5): completions "
            "vary much; lower sampling.temperature if they read like random text",
            entropy,
        )
    if seen.stays("entropy", above=0.0, upto=math.nextafter(0.05, 0.0)):
        return Alarm(
            "note",
            f"entropy is {format_number(entropy)} and was below 0.05 in five steps (usual: 0.05 to 0.5): the "
            "completions of a prompt are nearly alike; raise sampling.temperature or algorithm.epsilon_high if the "
            "task is not solved yet",
            1.0 / entropy,
        )
    return None


@rule
def gradient_large(seen: Observation) -> Alarm | None:
    """The gradient norm is above 10 (a problem: 100), or stays above 1 for five steps (a note)."""
    norm = seen.values.get("grad_norm")
    if norm is None or not math.isfinite(norm):
        return None
    if norm <= 10.0:
        return _gradient_clipped(norm) if seen.stays("grad_norm", above=1.0, upto=math.inf) else None
    return Alarm(
        "problem" if norm > 100.0 else "warning",
        f"grad_norm is {format_number(norm)} (healthy: 0.001 to 1, unstable: above 10): lower "
        "optimizer.learning_rate, raise batch.prompts_per_step, or set optimizer.max_grad_norm",
        norm,
    )


def _gradient_clipped(norm: float) -> Alarm:
    return Alarm(
        "note",
        f"grad_norm is {format_number(norm)} and was above 1 in five steps (healthy: 0.001 to 1, unstable: above 10): "
        "optimizer.max_grad_norm, where it is lower, sets the size of each step; if the reward does not rise, raise "
        "batch.prompts_per_step or lower optimizer.learning_rate",
        norm,
    )


@rule
def gradient_vanished(seen: Observation) -> Alarm | None:
    """The gradient is 0 although rewards differ, or stays below 0.001 for ten steps."""
    norms = seen.recent("grad_norm", 10)
    if not norms or seen.values.get("zero_std_fraction") == 1.0:
        return None  # a gradient of 0 is right where all advantages are 0, which zero_variance reports
    if norms[-1] == 0.0 and "zero_std_fraction" in seen.values:
        return Alarm(
            "problem",
            "grad_norm is 0 although some groups have advantages: nothing reaches the weights; check that "
            "completions are not masked out, and that adapter.targets names layers of the model",
        )
    if len(norms) == 10 and max(norms) < 0.001:
        return Alarm(
            "note",
            f"grad_norm stayed below 0.001 for 10 steps (now {format_number(norms[-1])}): little is "
            "learned; look at the share of groups without spread",
        )
    return None


@rule
def reward_function_constant(seen: Observation) -> Alarm | None:
    """A reward function gave every completion of the last steps the same value."""
    steps = 20
    for name in reward_functions(seen.values):
        means = seen.recent(f"rewards/{name}/mean", steps)
        deviations = seen.recent(f"rewards/{name}/std", steps)
        if len(means) < steps or max(means) - min(means) > 1e-9 or max(deviations, default=1.0) > 1e-9:
            continue
        if means[-1] >= 1.0:
            return Alarm(
                "note",
                f"the reward function {name} gave {format_number(means[-1])} to every completion of the "
                f"last {steps} steps: it teaches nothing any more",
            )
        return Alarm(
            "warning",
            f"the reward function {name} gave {format_number(means[-1])} to every completion of the last "
            f"{steps} steps: call it on an answer you know to be right, or take it out of rewards.functions",
        )
    return None


@rule
def accuracy_fell(seen: Observation) -> Alarm | None:
    """Held-out accuracy is more than 10 points below its best; a fall to under 60 % of it is a collapse."""
    if len(seen.evaluations) < 2:
        return None
    best, last = max(seen.evaluations, key=lambda result: result.accuracy), seen.evaluations[-1]
    drop = best.accuracy - last.accuracy
    if last.step != seen.step or drop <= 0.1:
        return None
    collapsed = drop > 0.2 and last.accuracy < 0.6 * best.accuracy
    return Alarm(
        "problem" if collapsed else "warning",
        f"held-out accuracy fell from {format_share(best.accuracy)} (step {best.step}) to "
        f"{format_share(last.accuracy)}: {'the policy collapsed' if collapsed else 'training hurts it'}; "
        "set algorithm.beta or lower optimizer.learning_rate, and go on from a checkpoint before the fall",
        drop,
    )


@rule
def reward_fell(seen: Observation) -> Alarm | None:
    """The mean reward fell to half of its best."""
    rewards = seen.recent("reward", 50)
    if len(rewards) < 15:
        return None
    means = [fmean(rewards[end - 5 : end]) for end in range(5, len(rewards) + 1)]
    best, now = max(means), means[-1]
    if best < 0.2 or now > 0.5 * best:
        return None
    return Alarm(
        "problem",
        f"the reward fell from {format_number(best)} to {format_number(now)} within {len(rewards)} steps: "
        "set algorithm.beta or lower optimizer.learning_rate",
        best - now,
    )


# --- rollouts and machinery -----------------------------------------------------------------------------------


@rule
def truncated_often(seen: Observation) -> Alarm | None:
    """Many completions reach the length limit."""
    if (share := seen.above("truncated_fraction", 0.25)) is None:
        return None
    if share == 1.0 and seen.values.get("zero_std_fraction") == 1.0:
        return None  # zero_variance says so, and what it costs
    longest = seen.values.get("completion_length/max")
    limit = f" at {format_number(longest)} tokens" if longest is not None else ""
    return Alarm(
        "warning" if share > 0.5 else "note",
        f"{format_share(share)} of the completions are cut off{limit} before they end: raise "
        "sampling.max_completion_length, or reward shorter answers",
        share,
    )


@rule
def empty_completions(seen: Observation) -> Alarm | None:
    """Completions without a single token of text."""
    samples = [sample for group in seen.groups for sample in group.samples]
    share = sum(not sample.text.strip() for sample in samples) / len(samples) if samples else 0.0
    if share <= 0.5:
        return None
    return Alarm(
        "problem" if share == 1.0 else "warning",
        f"{format_share(share)} of the completions are empty: the model ends at once; check the prompt and "
        "its end (model.chat_template, data.prompt_column)",
        share,
    )


@rule
def samples_stale(seen: Observation) -> Alarm | None:
    """Samples are older than the limit in weight versions."""
    if (staleness := seen.above("staleness", seen.limits.staleness)) is None:
        return None
    return Alarm(
        "warning",
        f"samples are {format_number(staleness)} weight versions old (limit: "
        f"{format_number(seen.limits.staleness)}): {_why_stale(seen.limits)}",
        staleness,
    )


@rule
def rollouts_let_go(seen: Observation) -> Alarm | None:
    """Rollouts that were finished before the run was resumed could not be used."""
    if not (count := int(seen.values.get("kept_let_go", 0.0))):
        return None
    return Alarm(
        "note",
        f"{count} rollouts that were finished before the run was resumed were let go: too old to be trained on in "
        "time, or of weights newer than the checkpoint's; with more checkpoints (checkpoint.every_steps) fewer are",
        float(count),
    )


def _why_stale(limits: HealthLimits) -> str:
    if limits.sync_every > 1:
        return (
            f"weights travel every {limits.sync_every} steps only; lower bridge.every_steps (--vllm-restart-interval)"
        )
    if limits.environments:
        return "environments run far ahead, or do not keep up; lower --env.max_batches_offpolicy, or give them more"
    return (
        "generation does not keep up, or runs far ahead; give it more hardware, or lower batch.prompts_per_step or "
        "pipeline.prefetch_depth"
    )


@rule
def logprobs_differ(seen: Observation) -> Alarm | None:
    """The engine's logprobs of samples from the weights of now differ from the trainer's; stale ones are not judged."""
    limit = seen.limits.logprob_diff
    if (mean := seen.above("logprob_diff_mean", limit)) is None:
        return None
    largest = seen.values.get("logprob_diff_max")
    detail = f", at most {format_number(largest)}" if largest is not None else ""
    return Alarm(
        "problem" if mean > 4.0 * limit else "warning",
        f"trainer and engine disagree by {format_number(mean)} nats a token{detail} (limit: "
        f"{format_number(limit)}) on samples of one weight version: both must use the same weights, the same "
        "sampling.temperature and a close model.dtype; an engine must return the logprobs of the distribution it "
        "sampled from (vLLM: logprobs_mode=processed_logprobs)",
        mean,
    )


@rule
def canary_off(seen: Observation) -> Alarm | None:
    """The engine holds the trainer's bytes and computes something else."""
    if (ratio := seen.above("canary_ratio", seen.limits.canary_ratio)) is None:
        return None
    return Alarm(
        "problem",
        f"the engine's logprobs of the canary differ from the trainer's {format_number(ratio)} times as much as two "
        "correct passes of this model do, although its weights are the trainer's: its kernels may be wrong for this "
        "model, or compute with a copy made before the update; compare logprob_diff_mean, and restart the engine",
        ratio,
    )


@rule
def groups_dropped(seen: Observation) -> Alarm | None:
    """Groups were dropped because their reward failed."""
    errors, dropped = seen.values.get("reward_errors", 0.0), seen.values.get("dropped_groups", 0.0)
    if errors <= 0 and dropped <= 0:
        return None
    if errors > 0:
        return Alarm(
            "warning",
            f"reward functions failed {errors:.0f} times in this step and {dropped:.0f} groups were "
            "dropped: see the log for the first error, and set rewards.on_error to fail to stop at it",
            errors,
        )
    return Alarm("note", f"{dropped:.0f} groups were dropped in this step: the batch is smaller", dropped)


@rule
def time_unbalanced(seen: Observation) -> Alarm | None:
    """Generation, training or rewards take most of a step."""
    times = {name: seen.recent(name, 10) for name in ("generation_time", "train_time", "reward_time", "step_time")}
    if any(len(times[name]) < 10 for name in ("generation_time", "train_time")):
        return None
    generation, training = median(times["generation_time"]), median(times["train_time"])
    if len(times["reward_time"]) == len(times["step_time"]) == 10:
        hidden = median(seen.recent("hidden_reward_time", 10) or [0.0])
        rewards, step = median(times["reward_time"]) - hidden, median(times["step_time"])
        if rewards > 0.5 * step > 0:
            return Alarm("note", f"reward functions take {format_share(rewards / step)} of a step: make them faster")
    if generation > 5.0 * training > 0:
        return Alarm(
            "note",
            f"generation takes {generation / training:.0f} times as long as training: shorten completions "
            "(sampling.max_completion_length), or give generation more hardware",
        )
    if training > 5.0 * generation > 0:
        return Alarm(
            "note",
            f"training takes {training / generation:.0f} times as long as generation: raise "
            "batch.max_tokens_per_microbatch, or set model.activations: keep if memory allows",
        )
    return None
