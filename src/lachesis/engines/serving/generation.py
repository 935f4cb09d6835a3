"""Requests to ``/generate``, the engines' answers, and the JSON of both. Pure; no torch."""

from __future__ import annotations

import json
import math
import time
import uuid
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, GetPydanticSchema, InstanceOf, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load, save
from typing_extensions import TypedDict

from lachesis.common.errors import EngineError
from lachesis.common.json_values import is_object
from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import UNKNOWN_VERSIONS, Completion, FinishReason, VersionSpan
from lachesis.engines.serving.bodies import (
    SINGLE,
    Count,
    Flag,
    Number,
    Refused,
    Request,
    Text,
    TokenIds,
    Whole,
    given,
    parse,
)

POLICY = "policy"
ARRAYS = "application/x-safetensors"
"""The media type with which ``/generate`` answers in arrays instead of JSON."""
_MAX_N = 1024
_MAX_INT = (1 << 63) - 1
_SYNONYMS = ("max_new_tokens", "max_completion_tokens")
# The logprob of a removed token in JSON, which has no infinity.
_LEAST_LOGPROB = -9999.0


class Sampling(TypedDict, total=False):
    """The sampling fields known here; an engine may accept and check others."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    temperature: Annotated[Number, Field(ge=0)]
    top_p: Annotated[Number, Field(gt=0, le=1)]
    min_p: Annotated[Number, Field(ge=0, le=1)]
    repetition_penalty: Annotated[Number, Field(gt=0)]
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)]
    max_tokens: Annotated[Whole, Field(ge=1, le=_MAX_INT)]
    min_tokens: Annotated[Whole, Field(ge=0, le=_MAX_INT)]
    top_k: Annotated[Whole, Field(ge=-1, le=_MAX_INT)]
    seed: Annotated[Whole, Field(ge=-_MAX_INT - 1, le=_MAX_INT)]
    ignore_eos: Flag
    skip_special_tokens: Flag
    spaces_between_special_tokens: Flag
    include_stop_str_in_output: Flag
    detokenize: Flag
    stop: Annotated[list[Text], SINGLE]
    stop_token_ids: list[Count]


class SampledBody(Request):
    """The fields shared by all bodies that request completions.

    ``sampling`` holds the caller's sampling fields, under vLLM's names; in the body they are beside the other fields.
    """

    # OpenAI clients pass these on from their callers; they have no effect here.
    also = frozenset({
        "timeout", "user", "extra_body", "extra_headers", "extra_query", "tools", "tool_choice", "messages",
    })  # fmt: skip

    n: Annotated[Whole, Field(ge=1, le=_MAX_N)] = 1
    stream: Flag = False
    model: Text | None = None
    sampling: Annotated[dict[str, Any], GetPydanticSchema(lambda _, handler: handler(Sampling))] = Field(
        default_factory=dict
    )


def _images(value: Any) -> Any:
    """Return the images of a body. Raise Refused (400) unless :meth:`PromptImages.encoded` wrote them."""
    if not is_object(value):
        return value
    try:
        return PromptImages.decoded(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"the images cannot be read: {error!r}", remedy="send PromptImages.encoded()") from error


class GenerateBody(SampledBody):
    """The body of ``/generate``; exactly one of ``prompt`` and ``prompt_token_ids`` is set.

    ``logprobs = k`` requests the ``k`` likeliest tokens at each position besides the sampled one, whose logprob is
    always returned. Without ``text`` tokens are decoded only if there are stop strings. ``routed_experts`` asks a
    mixture-of-experts model which experts it used. ``images`` are :meth:`PromptImages.encoded`, and the prompt's token
    ids have their placeholders. (A trainer asks its engine by a :class:`~lachesis.common.types.GenerationRequest`.)
    """

    prompt: Text | None = None
    prompt_token_ids: TokenIds | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    text: Flag = True
    routed_experts: Flag = False
    images: Annotated[InstanceOf[PromptImages] | None, BeforeValidator(_images)] = None
    request_id: Text = Field(default_factory=lambda: uuid.uuid4().hex)

    @model_validator(mode="before")
    @classmethod
    def _one_prompt(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Accept token ids, or an object with text or token ids, as ``prompt``."""
        prompt = fields.get("prompt")
        if prompt is not None and fields.get("prompt_token_ids") is not None:
            raise Refused("the body has both prompt and prompt_token_ids", remedy="send one of them")
        if is_object(prompt):
            inner = given(prompt, ("prompt_token_ids", "prompt"), where="prompt")
            if len(inner) != 1:
                raise Refused("the field 'prompt' has no prompt, or two", remedy='send {"prompt_token_ids": [...]}')
            fields = fields | {"prompt": None} | inner
        elif isinstance(prompt, list):
            fields = fields | {"prompt": None, "prompt_token_ids": prompt}
        if fields.get("prompt") is None and not fields.get("prompt_token_ids"):
            raise Refused("the body has no prompt", remedy="send prompt or prompt_token_ids, at least one token long")
        return fields


B = TypeVar("B", bound=SampledBody)
T = TypeVar("T")


class TokenVersions(NamedTuple):
    """The weight version that sampled the tokens from ``start`` up to ``end``, by vLLM's count."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCompletion(Completion):
    """A completion of T tokens with details that only its server has; the routes fill in ``versions``.

    Versions come from ``token_versions`` if the engine labels each token, else from the times. ``top_logprobs`` [T], if
    requested, map token ids to logprobs, the sampled token first. The times are ``time.monotonic()`` of this host at
    the first and the last token. An aborted completion has the finish reason ``abort`` and may be empty.
    ``cached_tokens`` is the number of prompt tokens read from the prefix cache, ``None`` if unknown.
    """

    versions: VersionSpan = UNKNOWN_VERSIONS
    text: str
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    first_token_time: float
    last_token_time: float
    token_versions: tuple[TokenVersions, ...] = ()
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """Completions of a request, in order.

    ``prompt_logprobs`` [P], if requested, has ``None`` for the first position and a map for each other one.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[GenerateCompletion, ...]
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """The part of completion ``index`` since its last chunk; ``finish_reason`` is set in the last one.

    ``prompt_token_ids`` come with the first chunk of a request. ``time`` is ``time.monotonic()`` at the last
    token of the chunk.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    time: float


class VersionClock:
    """The history of weight versions. It starts at version 0, the weights at the server's start."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._versions = [0]

    @property
    def current(self) -> int:
        """Return the current version."""
        return self._versions[-1]

    def record(self, version: int) -> None:
        """Record that the weights are those of ``version`` from now on."""
        self._times.append(time.monotonic())
        self._versions.append(version)

    def at(self, moment: float) -> int:
        """Return the version in force at ``moment``, a reading of ``time.monotonic()``."""
        return self._versions[bisect_right(self._times, moment)]

    def span(self, first: float, last: float) -> VersionSpan:
        """Return the versions in force at two moments."""
        return VersionSpan(self.at(first), self.at(last))

    def of(self, completion: GenerateCompletion) -> VersionSpan:
        """Return the versions of the first and the last token: the engine's labels if it has them."""
        if told := completion.token_versions:
            return VersionSpan(told[0].version, told[-1].version)
        return self.span(completion.first_token_time, completion.last_token_time)


def parse_sampled(kind: type[B], document: Mapping[str, Any], *, sampling_fields: Collection[str]) -> B:
    """Parse a body that contains an engine's sampling fields beside its own.

    Raises:
        Refused: (400) a field is unknown, of the wrong type or out of range, or there is no prompt, or two.
    """
    own = {*kind.model_fields, *kind.also} - {"sampling"}
    fields = given(document, {*own, *_SYNONYMS, *sampling_fields})
    sampling = {name: fields.pop(name) for name in sampling_fields if name in fields}
    for synonym in _SYNONYMS:
        if synonym in fields:
            sampling.setdefault("max_tokens", fields.pop(synonym))
    return parse(kind, fields | {"sampling": sampling})


def result_document(result: GenerateResult, *, request: GenerateBody, clock: VersionClock) -> dict[str, Any]:
    """Return the answer of ``/generate``.

    ``logprobs[i][t]`` is a list of ``{token id: logprob}``, the sampled token first; null unless requested.
    ``routed_experts[i]``, if asked for, are the numbers of :class:`RoutedExperts`. ``cached_tokens[i]`` of the
    prompt were in the prefix cache, null if unknown; the field is missing if it is unknown for all.
    ``weight_versions[i]`` are the versions by token, if the engine labels them.
    """
    done = result.completions
    document: dict[str, Any] = {
        "text": [c.text for c in done],
        "prompt": result.prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": [c.token_ids for c in done],
        "finish_reasons": [c.finish_reason for c in done],
        "logprobs": None if request.logprobs is None else [_documented(c) for c in done],
        "token_logprobs": [[finite(value) for value in c.logprobs] for c in done],
        "weight_version": [clock.of(c)._asdict() for c in done],
    }
    if any(c.token_versions for c in done):
        document["weight_versions"] = [[one._asdict() for one in c.token_versions] for c in done]
    cached = [c.cached_tokens for c in done]
    if any(tokens is not None for tokens in cached):
        document["cached_tokens"] = cached
    if request.routed_experts:
        document["routed_experts"] = [None if c.routed is None else c.routed.chosen.tolist() for c in done]
    if result.prompt_logprobs is not None:
        document["prompt_logprobs"] = [
            None if entry is None else {str(token): finite(value) for token, value in entry.items()}
            for entry in result.prompt_logprobs
        ]
    return document


def result_arrays(result: GenerateResult, *, clock: VersionClock, session_id: str) -> bytes:
    """Return the answer of ``/generate`` for clients that accept :data:`ARRAYS`: N completions as arrays for a trainer.

    ``lengths`` [N] and, one completion after the other, ``token_ids`` [sum of lengths] (int32) and ``token_logprobs``
    (float32); ``weight_version`` [N, 2], first and last (int64). If requested, ``routed_experts``, those of
    :class:`RoutedExperts` one completion after the other, with ``routed_lengths`` [N] (int64), 0 for none.
    ``cached_tokens`` [N] (int64) if known for any, -1 where unknown. The metadata hold the session, and the
    finish reasons as a JSON list.

    Raises:
        EngineError: a logprob is NaN.
    """
    done = result.completions
    logprobs = np.fromiter(chain.from_iterable(c.logprobs for c in done), dtype=np.float32)
    if np.isnan(logprobs).any():
        finite(math.nan)
    spans = [clock.of(c) for c in done]
    arrays = {
        "lengths": np.array([len(c.token_ids) for c in done], dtype=np.int64),
        "token_ids": np.fromiter(chain.from_iterable(c.token_ids for c in done), dtype=np.int32),
        "token_logprobs": np.maximum(logprobs, np.float32(_LEAST_LOGPROB)),
        "weight_version": np.array(spans, dtype=np.int64),
    }
    cached = [c.cached_tokens for c in done]
    if any(tokens is not None for tokens in cached):
        arrays["cached_tokens"] = np.array([-1 if tokens is None else tokens for tokens in cached], dtype=np.int64)
    if known := [c.routed.chosen for c in done if c.routed is not None]:
        arrays["routed_experts"] = np.concatenate(known)
        arrays["routed_lengths"] = np.array([0 if c.routed is None else len(c.routed) for c in done], dtype=np.int64)
    reasons = json.dumps([c.finish_reason for c in done])
    return save(arrays, metadata={"session_id": session_id, "finish_reasons": reasons})


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return the document of :func:`result_arrays`, equal to the JSON answer except for the texts.

    Raises:
        KeyError, TypeError, ValueError: it is incomplete.
    """
    try:
        # The header says how long it is in its first eight bytes.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        arrays = load(data)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    lengths: list[int] = arrays["lengths"].tolist()
    also: dict[str, Any] = {}
    if "cached_tokens" in arrays:
        also["cached_tokens"] = [None if tokens < 0 else tokens for tokens in arrays["cached_tokens"].tolist()]
    if "routed_experts" in arrays:
        parts = np.split(arrays["routed_experts"], np.cumsum(arrays["routed_lengths"])[:-1])
        also["routed_experts"] = [part if len(part) else None for part in parts]
    return also | {
        "session_id": header["session_id"],
        "finish_reasons": json.loads(header["finish_reasons"]),
        "token_ids": _divided(arrays["token_ids"].tolist(), lengths),
        "token_logprobs": _divided(arrays["token_logprobs"].tolist(), lengths),
        "weight_version": [{"first": first, "last": last} for first, last in arrays["weight_version"].tolist()],
    }


def _divided(values: list[T], lengths: Sequence[int]) -> list[list[T]]:
    """Split values into consecutive parts of these lengths; np.split takes a microsecond or more per part.

    Raises:
        ValueError: the lengths do not add up to the number of values.
    """
    if sum(lengths) != len(values) or min(lengths, default=0) < 0:
        raise ValueError(f"{len(values)} values for parts with {sum(lengths)} values")
    return [values[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]


def chunk_document(chunk: GenerateChunk, *, request: GenerateBody, versions: tuple[int, int]) -> dict[str, Any]:
    """Return one event of a streamed answer: the new part of completion ``index``, and its versions so far.

    ``versions`` are the first and the last.
    """
    document: dict[str, Any] = {
        "index": chunk.index,
        "text": chunk.text,
        "token_ids": chunk.token_ids,
        "token_logprobs": [finite(value) for value in chunk.logprobs],
        "logprobs": None if request.logprobs is None else _documented(chunk),
        "finish_reason": chunk.finish_reason,
        "weight_version": {"first": versions[0], "last": versions[1]},
    }
    if chunk.prompt_token_ids is not None:
        document["prompt_token_ids"] = chunk.prompt_token_ids
    return document


def finite(logprob: float) -> float:
    """Return a logprob as a finite number, for JSON.

    Raises:
        EngineError: the logprob is NaN.
    """
    if math.isnan(logprob):
        raise EngineError(
            "the model's logprobs are not finite",
            remedy="the weights have NaN or infinite values: lower the learning rate or resume earlier",
        )
    return max(logprob, _LEAST_LOGPROB)


def top_logprobs(part: GenerateCompletion | GenerateChunk) -> tuple[Mapping[int, float], ...]:
    """Return for each token a map of logprobs: the requested ones, or that of the sampled token alone."""
    if part.top_logprobs is not None:
        return part.top_logprobs
    return tuple({token: value} for token, value in zip(part.token_ids, part.logprobs, strict=True))


def _documented(part: GenerateCompletion | GenerateChunk) -> list[list[dict[str, float]]]:
    return [[{str(token): finite(value)} for token, value in entry.items()] for entry in top_logprobs(part)]
