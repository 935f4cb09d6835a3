"""Conversion of environments' scored groups to training records. Pure.

The protocol's conventions: ``masks`` are -100 where a position does not train and the token elsewhere (some
environments write 0 and 1), ``inference_logprobs`` are 1.0 where the mask is -100, scores are raw rewards, a
temperature counts in the order ``overrides[i]``, ``generation_params``, ``group_overrides``, 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from lachesis.common.errors import DataError
from lachesis.common.teacher_logprobs import TeacherLogprobs, teacher_logprobs
from lachesis.common.types import UNKNOWN_VERSIONS, FinishReason, Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import TeacherConfig
from lachesis.plugins.atropos.api.scored_group import UNTRAINED, ScoredGroup, why_not_finite, why_unusable
from lachesis.rollouts.generation import TextDecoder

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")
# A rounding error of a log-softmax; anything above is not a logprob.
_ROUNDING = 1e-4
# Logits are divided by it; 0 means the likeliest token.
_COLDEST = 1e-4


class Unusable(DataError):
    """Error for a group that cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Settings that all groups of a run share.

    Attributes:
        decode: token ids of many sequences to their texts.
        vocab_size: of the model; larger ids belong to another tokenizer.
        max_length: longest sequence that the model takes, in tokens.
        eos_token_ids: tokens that show that a sequence ended by itself, if its environment does not say.
        teacher: set if teacher logprobs in groups are for a teacher's loss rather than advantages; it says which
            environments have to bring them, and their weights.
    """

    decode: TextDecoder
    vocab_size: int
    max_length: int
    eos_token_ids: frozenset[int]
    teacher: TeacherConfig | None = None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Sequence of a group [T]. ``trains`` is True where a position counts in the loss."""

    tokens: tuple[int, ...]
    trains: tuple[bool, ...]

    @property
    def start(self) -> int:
        """Start of the completion: at the first position that trains, but after at least one token of prompt."""
        first = self.trains.index(True) if True in self.trains else len(self.tokens)
        return max(1, first)


def convert_group(
    data: Mapping[str, Any], *, group_id: str, conversion: Conversion, environment: str | None = None
) -> Group:
    """Convert one group of the protocol to a group with rewards.

    Untrained positions before the first that trains are the prompt, those after it are masked in the completion.
    Missing logprobs are NaN. An environment's ``advantages`` are used unchanged, in place of any from
    the scores; so is 0 if ``set_advantage_to_zero`` asks for it, and the score itself in a group of one, which
    has no baseline. Other advantages are left to be computed.

    Args:
        data: the group.
        group_id: the prompt's id, unless the environment gives one as ``group_overrides.group_id``.
        conversion: settings of the run.
        environment: the name under which it is registered, if known.

    Raises:
        Unusable: with the reason.
    """
    try:
        # Not validated here: our API has done so, and faults that another API let pass show below.
        group = ScoredGroup.model_construct(**data)
        group.masks = [_as_labels(*pair) for pair in zip_longest(group.tokens, group.masks, fillvalue=())]
        reason = _positive_logprobs(group) or why_unusable(group) or why_not_finite(group)
        if reason:
            raise Unusable(reason)
        sequences = [_sequence(tokens, mask) for tokens, mask in zip(group.tokens, group.masks, strict=True)]
        _check(sequences, conversion)
        samples = [_sample(i, one, group, conversion) for i, one in enumerate(sequences)]
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise Unusable(f"it is malformed ({type(error).__name__}: {error})") from error
    first = samples[0].prompt_ids
    texts = conversion.decode([list(first), *(list(sample.completion_ids) for sample in samples)])
    prompt = Prompt(
        id=str((group.group_overrides or {}).get("group_id", group_id)),
        token_ids=first,
        text=texts[0],
        columns={"env_id": group.env_id} | ({} if environment is None else {"environment": environment}),
    )
    return Group(prompt, tuple(replace(s, text=text) for s, text in zip(samples, texts[1:], strict=True)))


def _positive_logprobs(group: ScoredGroup) -> str:
    """Describe logprobs of sampled tokens that are above 0, such as the placeholder 1.0."""
    rows = zip(group.inference_logprobs or (), group.masks, strict=False)
    trained = [value for row, mask in rows for value, m in zip(row, mask, strict=False) if m != UNTRAINED]
    known = [value for value in trained if value is not None]
    if not any(value > _ROUNDING for value in known):
        return ""
    average = sum(known) / len(known)
    return (
        f"ref_logprobs at generated positions avg {average:.2f} (should be negative!): its inference_logprobs are not "
        "logprobs of sampled tokens; serve the environment with --openai.server_type vllm and a server that returns "
        "logprobs"
    )


def _as_labels(tokens: Sequence[int], mask: Sequence[int]) -> list[int]:
    """Convert a mask of 0 and 1 to the protocol's own convention; any other is unchanged."""
    if len(mask) != len(tokens) or not set(mask) <= {0, 1} or list(mask) == list(tokens):
        return list(mask)
    return [token if value else UNTRAINED for token, value in zip(tokens, mask, strict=True)]


def _sequence(tokens: Sequence[int], mask: Sequence[int]) -> _Sequence:
    """Make a sequence. Raises Unusable for a mask that follows neither of the two conventions."""
    for position, (token, value) in enumerate(zip(tokens, mask, strict=True)):
        if value not in (UNTRAINED, token):
            raise Unusable(f"a mask has {value} at position {position}, neither -100 nor the token {token}")
    return _Sequence(tuple(tokens), tuple(value != UNTRAINED for value in mask))


def _check(sequences: Sequence[_Sequence], conversion: Conversion) -> None:
    for index, one in enumerate(sequences):
        if len(one.tokens) > conversion.max_length:
            raise Unusable(f"tokens[{index}] has {len(one.tokens)} tokens, but the model takes {conversion.max_length}")
        _check_ids(one.tokens, f"tokens[{index}]", "the environment's", conversion)
    if not any(any(one.trains[one.start :]) for one in sequences):
        raise Unusable("no position of any sequence trains")


def _check_ids(ids: Sequence[int], where: str, whose: str, conversion: Conversion) -> None:
    for token in ids:
        if not 0 <= token < conversion.vocab_size:
            raise Unusable(
                f"{where} has the token {token}, but the model's vocabulary has {conversion.vocab_size}: {whose} "
                "tokenizer is another one"
            )


def _sample(index: int, one: _Sequence, group: ScoredGroup, conversion: Conversion) -> Sample:
    """Make a sample of a sequence, without its text."""
    start, score = one.start, float(group.scores[index])
    overrides = (group.overrides or [{}] * (index + 1))[index] or {}
    logprobs = _logprobs(group, index, one)
    advantage, by_token = _advantages(index, one, group, logprobs, conversion)
    if overrides.get("set_advantage_to_zero"):
        advantage, by_token = 0.0, None
    return Sample(
        prompt_ids=one.tokens[:start],
        completion_ids=one.tokens[start:],
        logprobs=logprobs,
        finish_reason=_finish_reason(overrides, one, conversion),
        versions=_versions(overrides),
        mask=tuple(map(int, one.trains[start:])),
        temperature=_temperature(overrides, group),
        rewards=(score,),
        reward=score,
        advantage=advantage,
        token_advantages=by_token,
        teacher=None if conversion.teacher is None else _teacher_logprobs(index, one, group, conversion),
    )


def _logprobs(group: ScoredGroup, index: int, one: _Sequence) -> tuple[float, ...]:
    rows = group.inference_logprobs
    if not rows:
        return (math.nan,) * (len(one.tokens) - one.start)
    pairs = zip(rows[index][one.start :], one.trains[one.start :], strict=True)
    return tuple(min(0.0, float(value)) if trains and value is not None else math.nan for value, trains in pairs)


def _advantages(
    index: int, one: _Sequence, group: ScoredGroup, logprobs: Sequence[float], conversion: Conversion
) -> tuple[float | None, tuple[float, ...] | None]:
    """Return the sequence's advantage, None if it comes from the scores, and further advantages of tokens, if any."""
    given, trains = group.advantages, one.trains[one.start :]
    if given:
        values = [float(value) for value in given[index][one.start :]]
        trained = [value for value, counts in zip(values, trains, strict=True) if counts]
        if not all(map(math.isfinite, trained)):
            raise Unusable(f"advantages[{index}] has a value that is not finite")
        if len(set(trained)) <= 1:
            return (trained[0] if trained else 0.0), None
        return 0.0, tuple(v if counts else 0.0 for v, counts in zip(values, trains, strict=True))
    advantage = float(group.scores[index]) if len(group.scores) == 1 else None
    if not group.distill_token_ids or conversion.teacher is not None:
        return advantage, None
    return advantage, _distilled(index, one, group, logprobs, conversion)


def _distilled(
    index: int, one: _Sequence, group: ScoredGroup, logprobs: Sequence[float], conversion: Conversion
) -> tuple[float, ...]:
    """Return log p_teacher - log p_sampler of each sampled token: the reverse KL's gradient, as an advantage.

    On-policy distillation (Agarwal et al., arXiv 2306.13649). 0 where the sampler's logprob is unknown.
    """
    ids, values = (group.distill_token_ids or [])[index], (group.distill_logprobs or [])[index]
    advantages = []
    for position in range(one.start, len(one.tokens)):
        ours, token = logprobs[position - one.start], one.tokens[position]
        if not one.trains[position] or math.isnan(ours):
            advantages.append(0.0)
            continue
        _check_ids(ids[position], f"distill_token_ids[{index}][{position}]", "the teacher's", conversion)
        if token not in ids[position]:
            raise Unusable(_lacks(index, position, token))
        advantages.append(float(values[position][ids[position].index(token)]) - ours)
    return tuple(advantages)


def _teacher_logprobs(index: int, one: _Sequence, group: ScoredGroup, conversion: Conversion) -> TeacherLogprobs | None:
    """Return the environment's teacher logprobs of each token; ``None`` if the group has none.

    A group may lack them if the teacher has no weight there, or its overrides have ``skip_teacher_top_k``.
    """
    teacher = conversion.teacher
    assert teacher is not None
    silent = bool((group.group_overrides or {}).get("skip_teacher_top_k"))
    if silent or not teacher.weights.get(str(group.env_id), teacher.weight):
        return None
    if not group.distill_token_ids or not group.distill_logprobs:
        raise Unusable(
            "it has no distill_token_ids, but algorithm.teacher.kind is rollouts; have the environment ask a teacher, "
            f'or set algorithm.teacher.weights: {{"{group.env_id}": 0}}'
        )
    tops: list[dict[int, float]] = []
    for position in range(one.start, len(one.tokens)):
        ids, values = group.distill_token_ids[index][position], group.distill_logprobs[index][position]
        _check_ids(ids, f"distill_token_ids[{index}][{position}]", "the teacher's", conversion)
        tops.append(dict(zip(ids, map(float, values), strict=True)))
    sampled = one.tokens[one.start :]
    if teacher.estimate == "sampled":
        for place, (top, token, trains) in enumerate(zip(tops, sampled, one.trains[one.start :], strict=True)):
            if trains and top and token not in top:
                raise Unusable(_lacks(index, one.start + place, token))
    return teacher_logprobs(tops, sampled, top_k=0 if teacher.estimate == "sampled" else teacher.top_k)


def _lacks(index: int, position: int, token: int) -> str:
    where = f"distill_token_ids[{index}][{position}] lacks the sampled token {token}"
    return f"{where}: the teacher has another tokenizer, or its logprobs belong to another sequence"


def _temperature(overrides: Mapping[str, Any], group: ScoredGroup) -> float:
    for place in (overrides, group.generation_params or {}, group.group_overrides or {}):
        if "temperature" in place:
            value = float(place["temperature"])
            if value != 0 and not _COLDEST <= value <= 1 / _COLDEST:
                raise Unusable(f"its temperature is {value}")
            return value
    return 1.0


def _finish_reason(overrides: Mapping[str, Any], one: _Sequence, conversion: Conversion) -> FinishReason:
    for known in _FINISH_REASONS:
        if overrides.get("finish_reason") == known:
            return known
    turns = sum(now and not before for before, now in zip((False, *one.trains), one.trains, strict=False))
    if turns > 1 or not one.trains[-1]:
        return "stop"  # several turns: only the environment could say how they ended, and it did not
    trained = [token for token, counts in zip(one.tokens, one.trains, strict=True) if counts]
    return "stop" if trained and trained[-1] in conversion.eos_token_ids else "length"


def _versions(overrides: Mapping[str, Any]) -> VersionSpan:
    """Return the weight versions that the environment gives; unknown without, as it may run batches ahead."""
    given = overrides.get("weight_version")
    if isinstance(given, Mapping):
        return VersionSpan(int(given["first"]), int(given["last"]))
    return UNKNOWN_VERSIONS
