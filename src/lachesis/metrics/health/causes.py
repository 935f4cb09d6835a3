"""Why a batch has nothing to teach: causes told apart by looking at its groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.common.types import Group, Level, Sample
from lachesis.metrics.health.types import Alarm
from lachesis.metrics.names import format_number, format_share


def has_zero_variance(group: Group) -> bool:
    """At least two completions, and the same reward for all. Completions without a reward do not count."""
    rewards = [reward for reward in group.rewards if reward is not None]
    return len(rewards) > 1 and max(rewards) == min(rewards)


def all_same_text(groups: Sequence[Group]) -> str | None:
    """The one completion of all prompts, quoted and shortened; None where there are two or one prompt "
    "only."""
    if len({group.prompt.token_ids for group in groups}) < 2:
        return None
    found = {sample.completion_ids for group in groups for sample in group.samples}
    if len(found) != 1:
        return None
    text = next(sample.text for group in groups for sample in group.samples)
    return repr(text if len(text) <= 40 else text[:39] + "…")


def explain_zero_variance(groups: Sequence[Group]) -> Alarm | None:
    """An alarm where (nearly) all groups have zero variance, with the cause and what to change.

    Above 80 % of the groups it is a note, at 100 % a problem, unless every completion is right.
    """
    flat = [group for group in groups if has_zero_variance(group)]
    share = len(flat) / len(groups) if groups else 0.0
    if share < 0.8 or len(groups) < 2:
        return None
    if share < 1.0:
        return Alarm("note", _mostly(flat, len(groups)), share)
    level, reason = _cause(flat)
    return Alarm(level, f"all {len(groups)} groups have zero variance {reason}", share)


def _cause(groups: Sequence[Group]) -> tuple[Level, str]:
    """Level, and the rest of the sentence. The first cause that explains all groups counts."""
    samples = [sample for group in groups for sample in group.samples]
    longest = max(len(sample.completion_ids) for sample in samples)
    levels = sorted({reward for sample in samples if (reward := sample.reward) is not None})
    if all(sample.finish_reason == "length" for sample in samples):
        return "problem", (f"because every completion hit {longest} tokens: raise sampling.max_completion_length")
    if all(not sample.text.strip() for sample in samples):
        return "problem", (
            "because every completion is empty: check how prompts end (model.chat_template, data.prompt_column)"
        )
    if len(levels) == 1 and levels[0] >= 1.0:
        return "note", (
            f"because every completion got reward {format_number(levels[0])}: these problems are solved; "
            "choose harder ones or stop"
        )
    if all(_one_completion(group.samples) for group in groups):
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


def _one_completion(samples: Sequence[Sample]) -> bool:
    return len({sample.completion_ids for sample in samples}) == 1
