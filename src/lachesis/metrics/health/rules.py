"""Health rules: checks that the policy improves, and not too fast, on complete, fresh and exact samples.

Small pure functions that look at one step, and what came before it, and say in plain words what to change. A rule
judges by the run's own course: rewards are on the scale that the run has shown, a value that differs between models
(entropy, the norm of the gradient, lengths) is compared with that of the start, and a difference between groups counts
only beyond chance. Bounds for every run are those that the field documents for GRPO: ratio 0.8 to 1.2, KL up to 0.1,
clipped tokens below 0.3. Causes come before their effects.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, variance
from typing import TypeAlias

from lachesis.common.types import LEVELS, Level
from lachesis.metrics.health.types import Alarm, GroupDigest, Observation
from lachesis.metrics.names import format_number, format_share, reward_functions

Rule: TypeAlias = Callable[[Observation], Alarm | None]
RULES: dict[str, Rule] = {}
MESSAGES: Mapping[str, str] = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))

# Groups that have to agree before a finding about all of them: four in a row are too often equal by chance.
ENOUGH_GROUPS = 12
# Completions, or steps, needed if all have the same reward: if a task is solved once in 40 times, all of 192 fail once
# in 130.
ENOUGH_COMPLETIONS, ENOUGH_STEPS = 192, 8
# Standard errors beyond which a difference is not chance, if every step has one test, and if it has two.
SURE, LIKELY = 4.0, 2.0
# Marks that templates of common model families put around turns.
TURN_MARKS = re.compile(r"<\|[A-Za-z_]{2,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>|<<SYS>>|<｜[^<>｜]{1,24}｜>")


def rule(function: Rule) -> Rule:
    """Register a rule with the health monitor, under the function's name."""
    RULES[function.__name__] = function
    return function


def alarm(level: Level, name: str, severity: float = 1.0, /, **words: object) -> Alarm:
    """Return an alarm with the message of this name in ``messages.toml``; floats are written as people read them."""
    shown = {key: format_number(word) if isinstance(word, float) else word for key, word in words.items()}
    return Alarm(level, MESSAGES[name].format(**shown), severity)


def urgency(rule: str, level: Level) -> tuple[int, int]:
    """Return a key that sorts the worst findings first, and then causes before effects; custom rules come last."""
    name = rule.partition("/")[0]  # a source may follow
    return -LEVELS.index(level), list(RULES).index(name) if name in RULES else len(RULES)


# --- prompts and rewards -------------------------------------------------------------------------------------


@rule
def foreign_template(seen: Observation) -> Alarm | None:
    """Nearly all prompts have marks of turns that the model does not know: the chat template is another model's."""
    known = seen.limits.template_marks
    if known is None or len(seen.groups) < 2:
        return None
    foreign = [sorted(set(TURN_MARKS.findall(group.prompt.text)) - known) for group in seen.groups]
    share = sum(bool(marks) for marks in foreign) / len(foreign)
    if share < 0.9:
        return None
    marks = ", ".join(next(filter(None, foreign))[:3])
    return alarm("problem", "foreign_template", share, marks=marks)


@rule
def answer_in_prompt(seen: Observation) -> Alarm | None:
    """Nearly all prompts contain the answer of their row, and not those of others."""
    groups = [group for group in seen.latest(8) if group.answer_told is not None and group.others_told is not None]
    if len(groups) < 8:
        return None
    told = fmean(bool(group.answer_told) for group in groups)
    others = fmean(group.others_told or 0.0 for group in groups)
    if told < 0.9 or others > 0.5:
        return None
    return alarm("warning", "answer_in_prompt", told, told=format_share(told), others=format_share(others))


@rule
def reward_pays_length(seen: Observation) -> Alarm | None:
    """Rewards follow the length within groups, and completions have grown."""
    if len(seen.batches) < 3:
        return None
    # Once all completions have the limit's length there is nothing to compare, though the reward still pays for length.
    differ = [group for batch in seen.batches for group in batch if len(set(group.lengths)) > 1 and not group.flat]
    start, now = _mean_lengths(seen.batches[0]), _mean_lengths(seen.batches[-1])
    together = correlation_within(differ[-ENOUGH_GROUPS:])
    if not start or not now or together < 0.7:
        return None
    before, after = fmean(start), fmean(now)
    if after < 1.2 * before or z_score(start, now) < LIKELY:
        return None
    return alarm("warning", "reward_pays_length", together, before=before, after=after, together=f"{together:.2f}")


# --- engines and groups ---------------------------------------------------------------------------------------


@rule
def canary_off(seen: Observation) -> Alarm | None:
    """The engine holds the trainer's bytes and computes something else."""
    if (ratio := seen.above("canary_ratio", seen.limits.canary_ratio)) is None:
        return None
    return alarm("problem", "canary_off", ratio, ratio=ratio)


@rule
def logprobs_differ(seen: Observation) -> Alarm | None:
    """The engine's logprobs of samples from the current weights differ from the trainer's; stale ones are not judged.

    Rounding in 16 bits may take a step of few tokens above the limit, so the mean of three steps must be above it, or
    one step above four times the limit.
    """
    limit = seen.limits.logprob_diff
    if (mean := seen.above("logprob_diff_mean", limit)) is None:
        return None
    if mean <= 4.0 * limit and not _lasts(seen, "logprob_diff_mean", limit):
        return None
    largest = seen.values.get("logprob_diff_max")
    detail = f", at most {format_number(largest)}" if largest is not None else ""
    level: Level = "problem" if mean > 4.0 * limit else "warning"
    return alarm(level, "logprobs_differ", mean, mean=mean, detail=detail, limit=limit)


def _lasts(seen: Observation, name: str, limit: float) -> bool:
    """Return True if the mean of the last three steps is above the limit, too."""
    recent = seen.recent(name, 3)
    return len(recent) == 3 and fmean(recent) > limit


@rule
def samples_stale(seen: Observation) -> Alarm | None:
    """Samples are older than the limit in weight versions."""
    if (staleness := seen.above("staleness", seen.limits.staleness)) is None:
        return None
    limits = seen.limits
    cause = "sent_rarely" if limits.sync_every > 1 else "of_environments" if limits.environments else "of_generation"
    words = {"age": staleness, "limit": limits.staleness, "every": limits.sync_every}
    return alarm("warning", f"samples_stale.{cause}", staleness, **words)


@rule
def groups_dropped(seen: Observation) -> Alarm | None:
    """Groups were dropped because their reward failed."""
    errors, dropped = seen.values.get("reward_errors", 0.0), seen.values.get("dropped_groups", 0.0)
    if errors <= 0 and dropped <= 0:
        return None
    if errors > 0:
        return alarm("warning", "groups_dropped.failed", errors, errors=f"{errors:.0f}", dropped=f"{dropped:.0f}")
    return alarm("note", "groups_dropped", dropped, dropped=f"{dropped:.0f}")


# --- learning -------------------------------------------------------------------------------------------------


@rule
def not_finite(seen: Observation) -> Alarm | None:
    """Loss or gradient norm are NaN or infinite."""
    broken = [name for name in ("loss", "grad_norm") if not math.isfinite(seen.values.get(name, 0.0))]
    if not broken:
        return None
    skipped = seen.values.get("skipped_steps", 0.0) > 0
    consequence = ", so that step was skipped" if skipped else ""
    words = {"broken": " and ".join(broken), "step": seen.step, "consequence": consequence}
    return alarm("warning" if skipped else "problem", "not_finite", **words)


@rule
def loss_explodes(seen: Observation) -> Alarm | None:
    """The loss is more than 20 times its usual size, and above 5 advantages."""
    size, usual = _jump(seen, "loss")
    if size <= max(5.0 * _largest_advantage(seen), 20.0 * usual):
        return None
    return alarm("problem", "loss_explodes", size, size=size, usual=usual)


def _jump(seen: Observation, name: str) -> tuple[float, float]:
    """Return the size of a value, 0 if it is not finite, and the median of 20 steps before, infinite below 5."""
    size = abs(seen.values.get(name, 0.0))
    usual = [abs(value) for value in seen.recent(name, 21)[:-1] if value and math.isfinite(value)]
    return size if math.isfinite(size) else 0.0, median(usual) if len(usual) >= 5 else math.inf


def _largest_advantage(seen: Observation) -> float:
    """Return the rough size of an advantage: 1 if rewards are scaled, else the spread of rewards if that is larger."""
    low, high = seen.reward_range()
    return max(1.0, high - low) if seen.limits.unscaled else 1.0


@rule
def nothing_clips(seen: Observation) -> Alarm | None:
    """The policy is far from the one that sampled, but no ratio is clipped."""
    kl = seen.above("mean_kl", 0.1)
    if kl is None or not seen.limits.clips or seen.values.get("clipped_fraction") != 0.0:
        return None
    return alarm("problem", "nothing_clips", kl, kl=kl)


@rule
def policy_lost(seen: Observation) -> Alarm | None:
    """The policy has lost nine tenths of its initial reward within 20 batches, and writes differently.

    After that, harder problems may be the reason.
    """
    if not 6 <= len(seen.batches) <= 20:
        return None
    first, last = seen.batches[0], [group for batch in seen.batches[-5:] for group in batch]
    start, now = _mean_rewards(first), _mean_rewards(last)
    low, high = seen.reward_range()
    if not start or not now or high == low:
        return None
    before, after = fmean(start), fmean(now)
    if before - low < 0.05 * (high - low) or after - low > (before - low) / 10 or z_score(start, now) > -LIKELY:
        return None
    lengths = _mean_lengths(first), _mean_lengths(last)
    entropies = seen.recent("entropy", len(seen.history) + 1)
    steady = len(entropies) < 2 or 0.5 <= entropies[-1] / max(entropies[0], 1e-9) <= 2.0
    if steady and abs(z_score(*lengths)) < LIKELY:
        return None
    words = {"before": before, "after": after, "start": fmean(lengths[0]), "now": fmean(lengths[1])}
    return alarm("problem", "policy_lost", before - after, batches=len(seen.batches), **words)


def _mean_rewards(groups: Sequence[GroupDigest]) -> list[float]:
    """Return the mean reward of each group."""
    return [fmean(group.rewards) for group in groups if group.rewards]


def _mean_lengths(groups: Sequence[GroupDigest]) -> list[float]:
    """Return the mean length of the completions of each group, in tokens."""
    return [fmean(group.lengths) for group in groups if group.lengths]


@rule
def ratio_off(seen: Observation) -> Alarm | None:
    """The mean probability ratio is outside 0.8 to 1.2: trainer and sampler disagree."""
    ratio = seen.values.get("mean_ratio")
    if ratio is None or 0.8 <= ratio <= 1.2 or not seen.limits.ratio_of_tokens:
        return None
    severity = abs(math.log(ratio)) if ratio > 0 else math.inf
    return alarm("problem" if not 0.5 <= ratio <= 2.0 else "warning", "ratio_off", severity, ratio=ratio)


@rule
def kl_high(seen: Observation) -> Alarm | None:
    """The policy has moved more than 0.1 nats (a problem: 0.5) from the one that sampled.

    One unlikely token may do that to a small step, so the mean of three steps must exceed it, or one step by half.
    """
    if (kl := seen.above("mean_kl", 0.1)) is None or not (kl > 0.15 or _lasts(seen, "mean_kl", 0.1)):
        return None
    return alarm("problem" if kl > 0.5 else "warning", "kl_high", kl, kl=kl)


@rule
def clipped_much(seen: Observation) -> Alarm | None:
    """More than 30 % (a problem: 50 %) of the ratios are clipped, with bounds of the usual width."""
    limit = seen.limits.clipped_fraction
    if limit is None or (share := seen.above("clipped_fraction", limit)) is None:
        return None
    return alarm("problem" if share > 0.5 else "warning", "clipped_much", share, share=format_share(share))


@rule
def reward_stays_low(seen: Observation) -> Alarm | None:
    """After 20 steps the mean reward is low on its scale, and has not risen.

    Low is below 0.15 for rewards from 0 to 1, as the field documents, and in proportion for any other range.
    """
    rewards = seen.recent("reward", seen.step)
    if seen.step < 20 or len(rewards) < 20:
        return None
    low, high = seen.reward_range()
    if not seen.batches and not all(0.0 <= reward <= 1.0 for reward in rewards):
        return None  # their scale is not known
    now, start = fmean(rewards[-10:]), fmean(rewards[:5])
    if high == low or now - low > 0.15 * (high - low):
        return None
    if now - start > 0.05 * (high - low) or z_score(rewards[: len(rewards) // 2], rewards[-10:]) > LIKELY:
        return None
    parts = [f"{name} {format_number(seen.values[f'rewards/{name}/mean'])}" for name in reward_functions(seen.values)]
    detail = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    words = {"now": now, "start": start, "low": low, "high": high}
    return alarm("warning", "reward_stays_low", step=seen.step, detail=detail, **words)


@rule
def empty_completions(seen: Observation) -> Alarm | None:
    """Completions without a single token of text."""
    samples = [sample for group in seen.groups for sample in group.samples]
    share = sum(not sample.text.strip() for sample in samples) / len(samples) if samples else 0.0
    if share <= 0.5:
        return None
    return alarm("problem" if share == 1.0 else "warning", "empty_completions", share, share=format_share(share))


@rule
def entropy_off(seen: Observation) -> Alarm | None:
    """Two steps with entropy below 0.01 (mode collapse) or above 4, or three far above that of the start."""
    if len(sampled := [_nats(batch) for batch in seen.batches[-2:]]) == 2 and min(sampled) > 4.0:
        taught = seen.values.get("zero_std_fraction", 0.0) < 1.0
        level: Level = "warning" if taught else "problem"
        return alarm(level, "entropy_off.near_random", min(sampled), entropy=min(sampled))
    entropies, rewards = (seen.recent(name, len(seen.history) + 1) for name in ("entropy", "reward"))
    if len(entropies) < 2 or "entropy" not in seen.values:
        return None
    entropy, start = entropies[-1], median(entropies[:3])
    if max(entropies[-2:]) < 0.01:
        return _entropy_lost(seen, entropy)
    if min(entropies[-2:]) > 4.0:
        return alarm("warning", "entropy_off.near_random", entropy, entropy=entropy)
    rose = len(rewards) >= 6 and fmean(rewards[-3:]) > fmean(rewards[:3])
    if len(entropies) < 6 or min(entropies[-3:]) < max(1.5 * start, start + 0.5) or rose:
        return None
    return alarm("warning", "entropy_off.rose", entropy, start=start, entropy=entropy)


def _nats(batch: Sequence[GroupDigest]) -> float:
    """Return how unlikely the tokens of a batch were on average; 0 if unknown."""
    known = [group.nats for group in batch if group.nats is not None]
    return fmean(known) if known else 0.0


def _entropy_lost(seen: Observation, entropy: float) -> Alarm:
    low, high = seen.reward_range()
    reward = seen.values.get("reward")
    if reward is not None and high > low and reward >= low + 0.9 * (high - low):
        return alarm("note", "entropy_off.sure", entropy=entropy, reward=reward)
    return alarm("problem", "entropy_off.collapsed", 1.0 / max(entropy, 1e-9), entropy=entropy)


@rule
def zero_variance(seen: Observation) -> Alarm | None:
    """No group has rewards that differ; the cause is truncation, equal answers or a constant reward.

    Steps with few groups are judged together, once there are enough groups.
    """
    if not seen.batches:
        shares = seen.recent("zero_std_fraction", 3)
        if len(shares) < 3 or min(shares) < 1.0:
            return None
        return alarm("problem", "zero_variance")
    groups = seen.latest(ENOUGH_GROUPS, completions=ENOUGH_COMPLETIONS, batches=ENOUGH_STEPS)
    flat = [group for group in groups if group.flat]
    if not flat or (share := len(flat) / len(groups)) < 0.8:
        return None
    if not seen.limits.group_baseline and len({reward for group in groups for reward in group.rewards}) > 1:
        return None  # prompts are compared with each other
    if share < 1.0:  # some groups teach
        return _mostly(flat, total=len(groups), reward_range=seen.reward_range())
    level, cause, words = _cause(flat, seen)
    return alarm(level, f"zero_variance.{cause}", share, groups=len(groups), **words)


def _cause(groups: Sequence[GroupDigest], seen: Observation) -> tuple[Level, str, dict[str, object]]:
    """Return the level, the name and the words of the first cause that explains all groups."""
    longest = max(length for group in groups for length in group.lengths)
    levels = sorted({reward for group in groups for reward in group.rewards})
    cut_off = sum(group.truncated for group in groups) / sum(len(group.lengths) for group in groups)
    if cut_off >= 0.95:
        who = "every completion" if cut_off == 1.0 else f"{format_share(cut_off)} of the completions"
        return "problem", "truncated", {"who": who, "longest": longest}
    if all(group.empty == len(group.lengths) for group in groups):
        return "problem", "empty", {}
    low, high = seen.reward_range()
    if len(levels) == 1 and (levels[0] == high if low < high else levels[0] >= 1.0):  # the best so far, or all equal
        return "note", "solved", {"reward": levels[0]}
    identical = fmean(_commonest(group.texts) for group in groups)
    if identical >= 0.8:
        who = "the completions" if identical == 1.0 else f"{format_share(identical)} of the completions"
        return "problem", "identical", {"who": who}
    always = all(group.flat for batch in seen.batches for group in batch if len(group.rewards) > 1)
    if len(levels) == 1:
        words: dict[str, object] = {"reward": levels[0], "thought": _opened_thought(seen)}
        return "problem" if always else "warning", "one_reward", words
    return ("problem", "of_the_prompt", {}) if always else ("warning", "one_answer", {})


def _mostly(flat: Sequence[GroupDigest], *, total: int, reward_range: tuple[float, float]) -> Alarm:
    """Return a finding on groups that teach nothing because they are too easy or too hard."""
    low, high = reward_range
    right = sum(group.rewards[0] == high for group in flat)
    wrong = sum(group.rewards[0] == low for group in flat)
    shares = {"right": format_share(right / total), "wrong": format_share(wrong / total)}
    kind = "harder" if right >= wrong else "easier"
    return alarm("note", "zero_variance.mostly", len(flat) / total, flat=len(flat), total=total, kind=kind, **shares)


@rule
def one_text_for_all(seen: Observation) -> Alarm | None:
    """Completions of different prompts have become the same text: nine of ten, or more than their answers allow."""
    groups = seen.latest(ENOUGH_GROUPS)
    if len({group.prompt for group in groups}) < ENOUGH_GROUPS // 2:
        return None
    share = _commonest(text for group in groups for text in group.texts)
    began = _commonest(text for group in seen.batches[0] for text in group.texts)
    answers = [group.answer for group in groups if group.answer is not None]
    same_answer = _commonest(answers) if len(answers) == len(groups) else 0.0
    limit = max(0.3, min(0.9, 2.0 * same_answer), 1.05 * same_answer) if same_answer else 0.9
    if share < limit or (share < 1.0 and began > 0.5 * share):
        return None
    samples = [sample for group in seen.groups for sample in group.samples]
    text = Counter(sample.text for sample in samples).most_common(1)[0][0] if samples else ""
    shown = repr(text if len(text) <= 40 else text[:39] + "…")
    if share < 0.9:
        shares = {"share": format_share(share), "answers": format_share(same_answer)}
        return alarm("warning", "one_text_for_all.many", share, prompts=len(groups), shown=shown, **shares)
    nearly = "" if share == 1.0 else "nearly "
    return alarm("problem", "one_text_for_all", share, nearly=nearly, prompts=len(groups), shown=shown)


def _commonest(values: Iterable[int]) -> float:
    """Return the share of the most common value."""
    counted = Counter(values)
    return counted.most_common(1)[0][1] / counted.total() if counted else 0.0


@rule
def gradient_large(seen: Observation) -> Alarm | None:
    """The gradient norm is above 10 and five times what it usually is (a problem: above 100 and ten times)."""
    norm, usual = _jump(seen, "grad_norm")
    times = norm / usual
    if norm <= 10.0 * _largest_advantage(seen) or times <= 5.0:
        return None
    level: Level = "problem" if norm > 100.0 and times > 10.0 else "warning"
    return alarm(level, "gradient_large", norm, norm=norm, times=times)


@rule
def gradient_vanished(seen: Observation) -> Alarm | None:
    """The gradient is 0 although rewards differ."""
    clipped, flat = seen.values.get("clipped_fraction", 0.0), seen.values.get("zero_std_fraction")
    # It is right where all advantages are 0, which zero_variance reports.
    if seen.values.get("grad_norm") == 0.0 and flat is not None and clipped < 0.5 * (1.0 - flat):
        return alarm("problem", "gradient_vanished")
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
        words: dict[str, object] = {"name": name, "reward": means[-1], "steps": steps}
        if means[-1] >= 1.0:
            return alarm("note", "reward_function_constant.solved", **words)
        alone = len(reward_functions(seen.values)) == 1
        words |= {"penalty": "" if alone else "unless it is a penalty, ", "thought": _opened_thought(seen)}
        return alarm("warning" if alone else "note", "reward_function_constant", **words)
    return None


def _opened_thought(seen: Observation) -> str:
    """Return a hint for the user's reward function if the chat template opens the thoughts."""
    opened = seen.groups and all(group.prompt.text.rstrip().endswith("<think>") for group in seen.groups)
    return MESSAGES["opened_thought"] if opened else ""


@rule
def accuracy_fell(seen: Observation) -> Alarm | None:
    """Held-out accuracy is more than 10 points, beyond chance, below its best; below 60 % of it is a collapse."""
    if len(seen.evaluations) < 2:
        return None
    best, last = max(seen.evaluations, key=lambda result: result.accuracy), seen.evaluations[-1]
    drop = best.accuracy - last.accuracy
    errors = rate_fell(best.accuracy, last.accuracy, count_before=best.problems, count_after=last.problems)
    # The best of several is above its own mean, so three standard errors are required.
    if last.step != seen.step or drop <= 0.1 or errors < 3.0:
        return None
    collapsed = drop > 0.2 and last.accuracy < 0.6 * best.accuracy
    words = {"best": format_share(best.accuracy), "last": format_share(last.accuracy), "step": best.step}
    verdict = "the policy collapsed" if collapsed else "training hurts it"
    return alarm("problem" if collapsed else "warning", "accuracy_fell", drop, verdict=verdict, **words)


@rule
def reward_fell(seen: Observation) -> Alarm | None:
    """The mean reward fell halfway from its best to the lowest reward, and by more than chance."""
    rewards = seen.recent("reward", 50)
    if len(rewards) < 15:
        return None
    low, high = seen.reward_range() if seen.batches else (min(0.0, *rewards), max(1.0, *rewards))
    ends = range(5, len(rewards) + 1)
    best = max((rewards[end - 5 : end] for end in ends), key=fmean)
    now = rewards[-5:]
    reached, left = fmean(best) - low, fmean(now) - low
    if reached < 0.2 * (high - low) or left > 0.5 * reached or z_score(best, now) > -SURE:
        return None
    return alarm("problem", "reward_fell", reached - left, best=fmean(best), now=fmean(now), steps=len(rewards))


# --- completions and time ------------------------------------------------------------------------------------


@rule
def truncated_often(seen: Observation) -> Alarm | None:
    """Many completions reached the length limit, over three steps if one has few."""
    count = sum(len(group.rewards) for group in seen.batches[-1]) if seen.batches else 0
    steps = 1 if count >= ENOUGH_COMPLETIONS else 3
    shares = seen.recent("truncated_fraction", steps)
    if len(shares) < steps or min(shares) <= 0.25:
        return None
    share = fmean(shares)
    longest = seen.values.get("completion_length/max")
    limit = f" at {format_number(longest)} tokens" if longest is not None else ""
    return alarm("warning" if share > 0.5 else "note", "truncated_often", share, share=format_share(share), limit=limit)


def z_score(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the rise of the mean in standard errors (Welch's t); 0 unless both have two values.

    Values of one group count as one: completions of a prompt depend on each other.
    """
    if len(before) < 2 or len(after) < 2:
        return 0.0
    rise = fmean(after) - fmean(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return rise / error if error > 0 else math.copysign(math.inf, rise) if rise else 0.0


def rate_fell(before: float, after: float, *, count_before: int, count_after: int) -> float:
    """Return the fall of a share in standard errors of two binomial counts."""
    error = math.sqrt(before * (1 - before) / count_before + after * (1 - after) / count_after)
    return (before - after) / error if error > 0 else math.copysign(math.inf, before - after)


def correlation_within(groups: Iterable[GroupDigest]) -> float:
    """Return Pearson's correlation of reward and length, both less their mean in the group; 0 without spread."""
    pairs = [
        (reward - fmean(group.rewards), length - fmean(group.lengths))
        for group in groups
        if group.rewards
        for reward, length in zip(group.rewards, group.lengths, strict=True)
    ]
    spread = math.sqrt(sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs))
    return sum(x * y for x, y in pairs) / spread if spread > 0 else 0.0
