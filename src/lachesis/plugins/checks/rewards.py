"""Trial of reward functions on right and wrong answers, which finds functions that cannot teach anything."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lachesis.common.errors import DataError
from lachesis.common.types import UNKNOWN_VERSIONS, Finding, Group, Prompt, Sample
from lachesis.rollouts.datasets.formats import GOLD_COLUMNS
from lachesis.rollouts.datasets.rows import is_blank
from lachesis.rollouts.rewards.attempts import TextCompletions
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VARIANTS = ("gold", "empty", "truncated", "shuffled", "repeated")
_REPEATS = 8
# A function that takes longer than this for a completion slows down a run with hundreds of completions a step.
_SLOW_S = 0.1
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class RewardCheck:
    """Result: ``scores[function][variant]`` is the mean over the rows, ``None`` if the function abstained or failed."""

    scores: Mapping[str, Mapping[str, float | None]]
    findings: list[Finding]


def check_rewards(
    rewards: Sequence[NamedReward],
    problems: Sequence[Prompt],
    *,
    weights: Sequence[float] | None = None,
    rows: int = 16,
    gold_column: str | None = None,
    gold_format: str = "{gold}",
    tokenizer: PreTrainedTokenizerBase | None = None,
    timeout_s: float = 60.0,
    num_workers: int | None = 0,
    text_completions: TextCompletions = "messages",
) -> RewardCheck:
    """Score the right answer of some problems, and wrong ones derived from it, with each function.

    The wrong ones are: nothing, the first half, another problem's answer, and the answer eight times over.

    Args:
        rewards: the functions.
        problems: to take answers from.
        weights: of the functions.
        rows: number of problems.
        gold_column: column with the right answer; one of :data:`GOLD_COLUMNS` if unset.
        gold_format: form of an answer, as in ``<answer>{gold}</answer>``.
        tokenizer: for functions that need ``completion_ids``.
        text_completions: as :class:`Rewarder`.

    Raises:
        DataError: no column has right answers.
        RewardError: a function needs a missing column.
        ConfigError: as :class:`Rewarder`.
    """
    column = _gold_column(problems, gold_column)
    chosen = [problem for problem in problems if not is_blank(problem.columns.get(column))][:rows]
    gold = [gold_format.replace("{gold}", str(problem.columns[column])) for problem in chosen]
    variants = _variants(gold)
    scores: dict[str, dict[str, float | None]] = {}
    findings: list[Finding] = []
    for reward in rewards:
        rewarder = Rewarder(
            [reward],
            timeout_s=timeout_s,
            on_error="drop_group",
            num_workers=num_workers,
            text_completions=text_completions,
        )
        try:
            trial = _try(rewarder, chosen, variants, tokenizer)
        finally:
            rewarder.close()
        scores[reward.name] = trial.means
        findings += _judge(reward.name, trial)
    findings += _judge_together(scores, dict(zip(scores, weights or [1.0] * len(scores), strict=True)))
    return RewardCheck(scores, findings)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Results of one function: mean rewards, first error of each variant, seconds a completion, and repeatability."""

    means: dict[str, float | None]
    values: dict[str, list[float | None]]
    errors: dict[str, str]
    seconds: float
    repeatable: bool


def _gold_column(problems: Sequence[Prompt], wanted: str | None) -> str:
    for column in [wanted] if wanted else GOLD_COLUMNS:
        if any(not is_blank(problem.columns.get(column)) for problem in problems):
            return column
    names = sorted({name for problem in problems for name in problem.columns})
    raise DataError(
        f"no right answers in {wanted or 'any of ' + ', '.join(GOLD_COLUMNS)}; the columns are {', '.join(names)}",
        remedy="name the column with the right answers (--gold)",
    )


def _variants(gold: Sequence[str]) -> dict[str, list[str]]:
    return {
        "gold": list(gold),
        "empty": [""] * len(gold),
        "truncated": [text[: len(text) // 2] for text in gold],
        "shuffled": [_another(gold, index) for index in range(len(gold))],
        "repeated": ["\n".join([text] * _REPEATS) for text in gold],
    }


def _another(gold: Sequence[str], index: int) -> str:
    """Return the next different answer; empty if all are the same."""
    following = [*gold[index + 1 :], *gold[:index]]
    return next((text for text in following if text != gold[index]), "")


def _try(
    rewarder: Rewarder,
    problems: Sequence[Prompt],
    variants: Mapping[str, Sequence[str]],
    tokenizer: PreTrainedTokenizerBase | None,
) -> _Trial:
    values: dict[str, list[float | None]] = {}
    errors: dict[str, str] = {}
    started = time.monotonic()
    for name, texts in variants.items():
        scored = rewarder.score(_groups(problems, texts, tokenizer))
        values[name] = _values(problems, scored)
        if scored.errors:
            errors[name] = f"{scored.errors[0]} ({scored.dropped} of {len(problems)} rows)"
    seconds = (time.monotonic() - started) / (len(problems) * len(variants))
    again = {}
    if not errors:
        for name in ("gold", "shuffled"):
            again[name] = _values(problems, rewarder.score(_groups(problems, variants[name], tokenizer)))
    return _Trial(
        means={name: _mean(rewards) for name, rewards in values.items()},
        values=values,
        errors=errors,
        seconds=seconds,
        repeatable=all(values[name] == rewards for name, rewards in again.items()),
    )


def _groups(problems: Sequence[Prompt], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[Group]:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if tokenizer else ()  # type: ignore[arg-type]

    def sample(problem: Prompt, text: str) -> Sample:
        return Sample(problem.token_ids, ids(text), (), finish_reason="stop", versions=UNKNOWN_VERSIONS, text=text)

    return [Group(problem, (sample(problem, text),)) for problem, text in zip(problems, texts, strict=True)]


def _values(problems: Sequence[Prompt], scored: Scored) -> list[float | None]:
    by_id = {group.prompt.id: group.rewards[0] for group in scored.groups}
    return [by_id.get(problem.id) for problem in problems]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _judge(name: str, trial: _Trial) -> list[Finding]:
    who = f"reward function {name!r}"
    findings = [Finding("problem", "fails", f"on {variant} answers: {text}") for variant, text in trial.errors.items()]
    if trial.seconds > _SLOW_S:
        findings.append(
            Finding(
                "warning",
                "slow",
                f"{who} takes {trial.seconds:.2g} s for a completion, so {256 * trial.seconds:.0f} s for 256: make it "
                "faster, or raise rewards.num_workers",
            )
        )
    if not trial.repeatable:
        findings.append(Finding("warning", "random", f"{who} scores the same answers differently a second time"))
    return findings + _judge_scores(who, trial)


def _judge_scores(who: str, trial: _Trial) -> list[Finding]:
    known = [value for values in trial.values.values() for value in values if value is not None]
    gold, empty = trial.means["gold"], trial.means["empty"]
    if not known:
        return [] if trial.errors else [Finding("problem", "abstains", f"{who} abstains on every answer")]
    if max(known) - min(known) < _CLOSE and len(known) > 1:
        return [Finding("problem", "constant", f"{who} gives {known[0]:g} to every answer, right or wrong")]
    if gold is None:
        return [Finding("warning", "abstains", f"{who} abstains on the right answers")]
    findings = []
    if empty is not None and empty >= gold - _CLOSE:
        text = f"{who} gives {empty:.3g} to an empty answer and {gold:.3g} to the right one"
        findings.append(Finding("problem", "gameable", f"{text}: an empty answer pays"))
    repeated, truncated = trial.means["repeated"], trial.means["truncated"]
    if repeated is not None and repeated > gold + _CLOSE:
        text = f"{who} gives {repeated:.3g} to the right answer {_REPEATS} times over, and {gold:.3g} to it once"
        findings.append(Finding("warning", "gameable", f"{text}: repetition pays"))
    if truncated is not None and truncated > gold + _CLOSE:
        text = f"{who} gives {truncated:.3g} to half of the right answer, and {gold:.3g} to all of it"
        findings.append(Finding("warning", "gameable", text))
    return findings


def _judge_together(scores: Mapping[str, Mapping[str, float | None]], weights: Mapping[str, float]) -> list[Finding]:
    """Return findings over all functions: rewards for form need another function that judges the content."""

    def total(variant: str) -> float | None:
        """Return the weighted sum; None if every function abstained or failed, which has its own finding."""
        known = {name: mean for name, means in scores.items() if (mean := means[variant]) is not None}
        return sum(weights[name] * mean for name, mean in known.items()) if known else None

    blind = [
        name
        for name, means in scores.items()
        if means["gold"] is not None and means["shuffled"] is not None and means["shuffled"] >= means["gold"] - _CLOSE
    ]
    findings = [
        Finding(
            "note", "form only", f"reward function {name!r} scores another problem's answer as high as the right one"
        )
        for name in blind
    ]
    right = total("gold")
    for variant, what in (("empty", "an empty answer"), ("shuffled", "the answer to another problem")):
        wrong = total(variant)
        if right is not None and wrong is not None and wrong >= right - _CLOSE:
            text = f"all rewards together, with their weights, give {what} {wrong:.3g} and the right one"
            findings.append(Finding("problem", "gameable", f"{text} {right:.3g}: no reward teaches the right answer"))
    return findings
