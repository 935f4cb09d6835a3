"""The scored group of the protocol, one record from environment to trainer, and the checks of its usability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from math import isfinite
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lachesis.common.types import LARGEST_NUMBER, LOWEST_LOGPROB

Item = TypeVar("Item")
# The first bad number of a list is enough: a list of millions of them would otherwise give as many errors.
FirstFault = Annotated[list[Item], Field(fail_fast=True)]
Ints = FirstFault[int]
Floats = FirstFault[float]

# Ids, lengths and counts: integers that the store can hold.
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

# Marks positions that are not trained on.
UNTRAINED = -100
# Placeholder of environments where the mask does not train; no sampled token has such a logprob.
NO_LOGPROB = 1.0

# No teacher gives a token a lower logprob.
LOWEST_TEACHER_LOGPROB = -1e4


class WireRecord(BaseModel):
    """Record of the protocol. Unknown keys are ignored, as in the original."""

    model_config = ConfigDict(allow_inf_nan=False, ser_json_inf_nan="constants")


class ScoredGroup(WireRecord):
    """Sequences of a problem with their scores; lists are of [sequence][position].

    ``masks`` are -100 where a position does not train and the token elsewhere, ``inference_logprobs`` are 1.0 where
    the mask is -100. ``overrides`` has a mapping for each sequence, ``group_overrides`` is one for all. The order of
    the fields is that of the original's replies.
    """

    tokens: FirstFault[Ints]
    masks: FirstFault[Ints]
    scores: Floats
    advantages: FirstFault[Floats] | None = None
    ref_logprobs: FirstFault[Floats] | None = None
    messages: FirstFault[FirstFault[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: FirstFault[Floats] | None = None
    overrides: FirstFault[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Int64 | None = None
    distill_token_ids: FirstFault[FirstFault[Ints]] | None = None
    distill_logprobs: FirstFault[FirstFault[Floats]] | None = None

    @field_validator("messages")
    @classmethod
    def _messages_are_complete(cls, messages: list[list[dict[str, Any]]] | None) -> list[list[dict[str, Any]]] | None:
        for sequence, turns in enumerate(messages or ()):
            for turn, message in enumerate(turns):
                if "role" not in message or "content" not in message:
                    raise ValueError(f"Message must have 'role' and 'content' fields: messages[{sequence}][{turn}]")
        return messages


def why_unusable(group: ScoredGroup) -> str:
    """Return the first fault that makes a group useless, naming the field and index; empty if there is none.

    Optional lists may be null or empty: the original's environments send ``[]`` for fields that they lack.
    """
    count = len(group.tokens)
    if not count:
        return "tokens is empty"
    for index, tokens in enumerate(group.tokens):
        if not tokens:
            return f"tokens[{index}] is empty"
    for name in ("masks", "scores"):
        if len(getattr(group, name)) != count:
            return f"{name} has {_entries(getattr(group, name))}, tokens has {count}"
    for name in ("advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides"):
        values = getattr(group, name)
        if values and len(values) != count:
            return f"{name} has {_entries(values)}, tokens has {count}"
    for name in ("masks", "advantages", "ref_logprobs", "inference_logprobs"):
        fault = _ragged(name, getattr(group, name) or (), group.tokens)
        if fault:
            return fault
    return _placeholder_logprob(group) or _distillation(group) or _extreme_number(group)


def why_not_finite(group: ScoredGroup) -> str:
    """Return the first score that is not finite, in words; empty if all are finite."""
    return next((f"scores[{index}] is {score}" for index, score in enumerate(group.scores) if not isfinite(score)), "")


def _ragged(name: str, rows: Sequence[Sequence[Any]], tokens: Sequence[Sequence[int]]) -> str:
    """Return the first row whose length differs from its tokens', in words; empty if there are no rows."""
    for index, (row, reference) in enumerate(zip(rows, tokens, strict=False)):
        if len(row) != len(reference):
            return f"{name}[{index}] has {_entries(row)}, tokens[{index}] has {len(reference)}"
    return ""


def _placeholder_logprob(group: ScoredGroup) -> str:
    for index, (logprobs, mask) in enumerate(zip(group.inference_logprobs or (), group.masks, strict=False)):
        if NO_LOGPROB in compress(logprobs, map(UNTRAINED.__ne__, mask)):
            at = next(i for i, (lp, m) in enumerate(zip(logprobs, mask, strict=True)) if lp == 1.0 and m != UNTRAINED)
            return f"inference_logprobs[{index}][{at}] is 1.0, which is not a logprob, where the mask trains"
    return ""


def _extreme_number(group: ScoredGroup) -> str:
    """Describe the first number that would make the gradient of a whole batch infinite; empty if there is none."""
    if (at := _first_beyond(group.scores)) is not None:
        return f"scores[{at}] is {group.scores[at]:g}, beyond {LARGEST_NUMBER:g}"
    for index, row in enumerate(group.advantages or ()):
        if (at := _first_beyond(row)) is not None:
            return f"advantages[{index}][{at}] is {row[at]:g}, beyond {LARGEST_NUMBER:g}"
    for index, (row, mask) in enumerate(zip(group.inference_logprobs or (), group.masks, strict=False)):
        # An API other than ours may let null pass, for unknown values.
        trained: list[float | None] = list(compress(row, map(UNTRAINED.__ne__, mask)))
        lowest = min((value for value in trained if value is not None), default=0.0)
        if lowest < LOWEST_LOGPROB:
            return f"inference_logprobs[{index}] has {lowest:g}, which no sampled token has, where the mask trains"
    for index, rows in enumerate(group.distill_logprobs or ()):
        lowest = min((min(values) for values in rows if values), default=0.0)
        if lowest < LOWEST_TEACHER_LOGPROB:
            return f"distill_logprobs[{index}] has {lowest:g}, which is not a logprob"
    return ""


def _first_beyond(values: Sequence[float]) -> int | None:
    """Return the place of the first finite number above the largest allowed magnitude."""
    if not values or max(map(abs, values)) <= LARGEST_NUMBER:
        return None
    return next((at for at, value in enumerate(values) if LARGEST_NUMBER < abs(value) < math.inf), None)


def _distillation(group: ScoredGroup) -> str:
    ids, logprobs = group.distill_token_ids or (), group.distill_logprobs or ()
    for name, rows in (("distill_token_ids", ids), ("distill_logprobs", logprobs)):
        if rows and len(rows) != len(group.tokens):
            return f"{name} has {_entries(rows)}, tokens has {len(group.tokens)}"
        fault = _ragged(name, rows, group.tokens)
        if fault:
            return fault
    if bool(ids) != bool(logprobs):
        return f"{'distill_logprobs' if ids else 'distill_token_ids'} is missing, but the other is there"
    for index, (row, other) in enumerate(zip(ids, logprobs, strict=True)):
        for position, (candidates, values) in enumerate(zip(row, other, strict=True)):
            if len(candidates) != len(values):
                return (
                    f"distill_logprobs[{index}][{position}] has {_entries(values)}, "
                    f"distill_token_ids[{index}][{position}] has {len(candidates)}"
                )
    return ""


def _entries(values: Sequence[Any]) -> str:
    return f"{len(values)} entr{'y' if len(values) == 1 else 'ies'}"
