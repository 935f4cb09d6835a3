"""Digests of groups, which let the health rules judge more than one step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import fmean

from lachesis.common.types import Group, Sample
from lachesis.metrics.health.types import GroupDigest

# Tokens of a completion whose logprobs are read: reading all of a long one would take long.
FIRST_TOKENS = 64
# Columns in which data sets usually have the right answer.
ANSWERS = ("answer", "solution", "ground_truth", "target", "label")


def digest(groups: Sequence[Group]) -> tuple[GroupDigest, ...]:
    """Return the digest of the groups that were generated for a step."""
    generated = [group.generated for group in groups]
    answers = [_answer(group) for group in generated]
    return tuple(_digest(group, answer, answers) for group, answer in zip(generated, answers, strict=True))


def _digest(group: Group, answer: str | None, answers: Sequence[str | None]) -> GroupDigest:
    samples = [sample for sample in group.samples if sample.reward is not None]
    others = {other for other in answers if other is not None and other != answer}
    return GroupDigest(
        source=group.prompt.source,
        prompt=hash(group.prompt.token_ids or group.prompt.text),
        rewards=tuple(sample.reward for sample in samples if sample.reward is not None),
        lengths=tuple(len(sample.completion_ids) for sample in samples),
        texts=tuple(hash(sample.completion_ids) for sample in samples),
        truncated=sum(sample.finish_reason == "length" for sample in samples),
        empty=sum(not sample.text.strip() for sample in samples),
        nats=_nats(samples),
        answer=None if answer is None else hash(answer),
        answer_told=None if answer is None else _contains(group.prompt.text, answer),
        others_told=sum(_contains(group.prompt.text, other) for other in others) / len(others) if others else None,
    )


def _nats(samples: Sequence[Sample]) -> float | None:
    """Return the mean of minus the logprobs of each completion's first tokens, if they are known."""
    known = [logprob for sample in samples for logprob in sample.logprobs[:FIRST_TOKENS] if not math.isnan(logprob)]
    return -fmean(known) if known else None


def _answer(group: Group) -> str | None:
    """Return the answer of a row if it is short enough to be a plain answer without its derivation."""
    for name in ANSWERS:
        value = group.prompt.columns.get(name)
        if isinstance(value, str | int) and 0 < len(text := str(value).strip()) <= 100:
            return text
    return None


def _contains(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None
