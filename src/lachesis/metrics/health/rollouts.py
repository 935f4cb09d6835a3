"""Health rules on rollouts and machinery: are completions whole, fresh and exact, and is time well spent?"""

from __future__ import annotations

from statistics import median

from lachesis.metrics.health.types import Alarm, Observation, rule
from lachesis.metrics.names import format_number, format_share


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
        f"{format_number(seen.limits.staleness)}): generation does not keep up, or runs far ahead; give "
        "it more hardware, or lower batch.prompts_per_step or pipeline.prefetch_depth (with environments "
        "--env.max_batches_offpolicy)",
        staleness,
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
    """The proof of sync came close to its tolerance."""
    if (error := seen.above("canary_error", seen.limits.canary_error)) is None:
        return None
    return Alarm(
        "problem",
        f"the engine's logprobs of the canary prompt are {format_number(error)} nats off the trainer's "
        f"(limit: {format_number(seen.limits.canary_error)}): the engine may hold other weights; restart "
        "it, and check that no other run uses it",
        error,
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
            "batch.max_tokens_per_microbatch, or turn off model.gradient_checkpointing if memory allows",
        )
    return None
