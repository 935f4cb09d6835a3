"""What the health rules remember of groups, so that they can judge more than one step."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lachesis.common.types import Group
from lachesis.metrics.health.types import GroupDigest

# Columns in which data sets have what is right.
ANSWERS = ("answer", "solution", "ground_truth", "target", "label")


def digest(groups: Sequence[Group]) -> tuple[GroupDigest, ...]:
    """Return what is remembered of the groups that were generated for a step."""
    generated = [group.generated for group in groups]
    answers = [_answer(group) for group in generated]
    return tuple(_digest(group, answer, answers) for group, answer in zip(generated, answers, strict=True))


def _digest(group: Group, answer: str | None, answers: Sequence[str | None]) -> GroupDigest:
    samples = [sample for sample in group.samples if sample.reward is not None]
    others = {other for other in answers if other is not None and other != answer}
    return GroupDigest(
        prompt=hash(group.prompt.token_ids or group.prompt.text),
        rewards=tuple(sample.reward for sample in samples if sample.reward is not None),
        lengths=tuple(len(sample.completion_ids) for sample in samples),
        texts=tuple(hash(sample.completion_ids) for sample in samples),
        truncated=sum(sample.finish_reason == "length" for sample in samples),
        empty=sum(not sample.text.strip() for sample in samples),
        answer=None if answer is None else hash(answer),
        answer_told=None if answer is None else _contains(group.prompt.text, answer),
        others_told=sum(_contains(group.prompt.text, other) for other in others) / len(others) if others else None,
    )


def _answer(group: Group) -> str | None:
    """The answer of a row if it is short enough to be one: what is right, not how it is found."""
    for name in ANSWERS:
        value = group.prompt.columns.get(name)
        if isinstance(value, str | int) and 0 < len(text := str(value).strip()) <= 100:
            return text
    return None


def _contains(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None
