"""The bodies of ``/generate`` and of the reading routes: from JSON to records and back. Pure; no torch."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lachesis.common.errors import EngineError
from lachesis.engines.serving.bodies import Body
from lachesis.engines.serving.served import (
    AdapterStatus,
    DigestRequest,
    DigestSlice,
    GenerateChunk,
    GeneratedSequence,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    Refused,
)
from lachesis.engines.serving.versions import VersionClock

POLICY = "policy"
MAX_N = 1024
_OWN = {"prompt", "prompt_token_ids", "n", "stream", "model", "logprobs", "prompt_logprobs", "request_id"}
# OpenAI clients hand these through from their callers; they have no meaning here.
_WITHOUT_MEANING = {
    "timeout", "user", "extra_body", "extra_headers", "extra_query", "tools", "tool_choice", "messages",
}  # fmt: skip
_SYNONYMS = ("max_new_tokens", "max_completion_tokens")
_NUMBERS = {
    "temperature": ("0 or above", lambda x: x >= 0),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("above 0", lambda x: x > 0),
    "presence_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
}
_INTEGERS = {"max_tokens": 1, "min_tokens": 0, "top_k": -1, "seed": -(1 << 63)}
_FLAGS = {
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize",
}  # fmt: skip
# What JSON has for the logprob of a token that was cut: it knows no infinity.
_LEAST_LOGPROB = -9999.0


def parse_generate(document: Mapping[str, Any], *, sampling_fields: Collection[str]) -> tuple[GenerateRequest, bool]:
    """The request in a body of ``/generate``, and whether its answer is to be streamed.

    Raises:
        Refused: (400) a field is unknown, of the wrong type or out of range, or there is no prompt, or two.
    """
    body = Body(document, known={*_OWN, *_WITHOUT_MEANING, *_SYNONYMS, *sampling_fields})
    prompt, token_ids = _prompt(body)
    return (
        GenerateRequest(
            prompt=prompt,
            prompt_token_ids=token_ids,
            n=body.integer("n", 1, low=1, high=MAX_N),
            sampling=parse_sampling(body, fields=sampling_fields),
            logprobs=body.integer("logprobs", None, low=0),
            prompt_logprobs=body.integer("prompt_logprobs", None, low=0),
            model=body.text("model", None),
            request_id=body.text("request_id", "") or uuid.uuid4().hex,
        ),
        body.flag("stream", False),
    )


def parse_sampling(body: Body, *, fields: Collection[str]) -> dict[str, Any]:
    """The sampling fields that a body has, checked as far as their meaning is known here."""
    sampling: dict[str, Any] = {}
    for name in fields:
        if body.get(name) is None:
            continue
        if name in _NUMBERS:
            value = body.number(name)
            meaning, holds = _NUMBERS[name]
            if not (math.isfinite(value) and holds(value)):
                raise Refused(f"{name} is {value}, not {meaning}", remedy="correct the field")
        elif name in _INTEGERS:
            value = body.integer(name, low=_INTEGERS[name], high=(1 << 63) - 1)
        elif name in _FLAGS:
            value = body.flag(name)
        elif name == "stop":
            value = list(body.texts(name))
        elif name == "stop_token_ids":
            value = list(body.integers(name))
        else:
            value = body.get(name)
        sampling[name] = value
    for synonym in _SYNONYMS:
        if "max_tokens" not in sampling and body.get(synonym) is not None:
            sampling["max_tokens"] = body.integer(synonym, low=1, high=(1 << 63) - 1)
    return sampling


def check_model(name: str | None, *, info: ModelInfo, adapter: AdapterStatus | None) -> None:
    """All names of the model mean the weights in force: the base's, ``policy``, the adapter's.

    Raises:
        Refused: (404) the name is none of them.
    """
    names = [*info.served_names, info.model, POLICY, *([adapter.name] if adapter else [])]
    if name is not None and name not in names:
        known = " or ".join(dict.fromkeys(names))
        raise Refused(f"no model {name!r} is served here", status=404, remedy=f"ask for {known}")


def parse_canary(document: Mapping[str, Any], *, info: ModelInfo) -> tuple[int, ...]:
    """The token ids of a canary request, which the model knows and has room for."""
    body = Body(document, known={"token_ids"})
    token_ids = body.integers("token_ids")
    if not 2 <= len(token_ids) <= info.max_model_len:
        raise Refused(
            f"a canary of {len(token_ids)} tokens cannot be read", remedy=f"give 2 to {info.max_model_len} token ids"
        )
    check_token_ids(token_ids, info=info)
    return token_ids


def check_prompt(request: GenerateRequest, *, info: ModelInfo) -> None:
    """What can be known of a prompt of token ids before it is generated from.

    Raises:
        Refused: (400) the model does not know a token, or has no room for prompt and completion.
    """
    token_ids = request.prompt_token_ids
    if token_ids is None:
        return
    check_token_ids(token_ids, info=info)
    # Without max_tokens the engine takes as many as there is room for, and at least one.
    wanted = request.sampling.get("max_tokens", 1)
    if len(token_ids) + wanted > info.max_model_len:
        raise Refused(
            f"the prompt has {len(token_ids)} tokens and {wanted} are to follow, but the context holds "
            f"{info.max_model_len}",
            remedy="shorten the prompt, lower max_tokens, or start the server with a larger --max-model-len",
        )


def check_token_ids(token_ids: Sequence[int], *, info: ModelInfo) -> None:
    """Raise Refused (400) for a token id that the model does not know."""
    if token_ids and max(token_ids) >= info.vocab_size:
        raise Refused(
            f"token id {max(token_ids)} is outside of 0 to {info.vocab_size - 1}",
            remedy="use the tokenizer that belongs to the model",
        )


def parse_digests(document: Mapping[str, Any]) -> DigestRequest:
    """What to digest; a slice without a name is of the tensor that it is named after."""
    body = Body(document, known={"slices", "adapter"})
    slices = body.mapping("slices", None)
    parsed: dict[str, DigestSlice] | None = None
    if slices is not None:
        parsed = {}
        for name, value in slices.items():
            if not isinstance(value, dict):
                raise Refused(f"slices.{name} is no object", remedy='give {"name": ..., "start": ..., "rows": ...}')
            part = Body(value, known={"name", "start", "rows"}, where=f"slices.{name}")
            rows = part.integer("rows", None, low=0)
            parsed[name] = DigestSlice(part.text("name", name), part.integer("start", 0, low=0), rows)
    return DigestRequest(slices=parsed, adapter=body.flag("adapter", False))


def result_document(result: GenerateResult, *, request: GenerateRequest, clock: VersionClock) -> dict[str, Any]:
    """The answer of ``/generate``.

    ``logprobs[i][t]`` is a list of ``{token id: logprob}``, the sampled token first; null unless asked for.
    """
    done = result.completions
    document: dict[str, Any] = {
        "text": [c.text for c in done],
        "prompt": result.prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": [c.token_ids for c in done],
        "finish_reasons": [c.finish_reason for c in done],
        "logprobs": None if request.logprobs is None else [_documented(c) for c in done],
        "token_logprobs": [[finite(value) for value in c.token_logprobs] for c in done],
        "weight_version": [clock.span(c.first_token_time, c.last_token_time)._asdict() for c in done],
    }
    if result.prompt_logprobs is not None:
        document["prompt_logprobs"] = [
            None if entry is None else {str(token): finite(value) for token, value in entry.items()}
            for entry in result.prompt_logprobs
        ]
    return document


def chunk_document(chunk: GenerateChunk, *, request: GenerateRequest, versions: tuple[int, int]) -> dict[str, Any]:
    """One event of a streamed answer: what is new in completion ``index``, and its first and last version so far."""
    document: dict[str, Any] = {
        "index": chunk.index,
        "text": chunk.text,
        "token_ids": chunk.token_ids,
        "token_logprobs": [finite(value) for value in chunk.token_logprobs],
        "logprobs": None if request.logprobs is None else _documented(chunk),
        "finish_reason": chunk.finish_reason,
        "weight_version": {"first": versions[0], "last": versions[1]},
    }
    if chunk.prompt_token_ids is not None:
        document["prompt_token_ids"] = chunk.prompt_token_ids
    return document


def finite(logprob: float) -> float:
    """A logprob as JSON can hold it.

    Raises:
        EngineError: it is no number.
    """
    if math.isnan(logprob):
        raise EngineError(
            "the model's logprobs are not finite",
            remedy="the weights have NaN or infinite values: lower the learning rate or resume earlier",
        )
    return max(logprob, _LEAST_LOGPROB)


def _documented(part: GeneratedSequence | GenerateChunk) -> list[list[dict[str, float]]]:
    if part.top_logprobs is not None:
        return [[{str(token): finite(value)} for token, value in entry.items()] for entry in part.top_logprobs]
    return [[{str(t): finite(value)}] for t, value in zip(part.token_ids, part.token_logprobs, strict=True)]


def _prompt(body: Body) -> tuple[str | None, tuple[int, ...] | None]:
    """The prompt as text or as token ids; ``prompt`` may be either, or an object that names it."""
    value = body.get("prompt")
    token_ids = body.integers("prompt_token_ids", None)
    if value is not None and token_ids is not None:
        raise Refused("the body has both prompt and prompt_token_ids", remedy="send one of them")
    if isinstance(value, dict):
        inner = Body(value, known={"prompt_token_ids", "prompt"}, where="prompt")
        if (inner.get("prompt_token_ids") is None) == (inner.get("prompt") is None):
            raise Refused("prompt names no prompt, or two", remedy='send {"prompt_token_ids": [...]}')
        text, token_ids = inner.text("prompt", None), inner.integers("prompt_token_ids", None)
    elif isinstance(value, list):
        text, token_ids = None, body.integers("prompt")
    else:
        text = body.text("prompt", None)
    if text is None and not token_ids:
        raise Refused("the body has no prompt", remedy="send prompt or prompt_token_ids, at least one token long")
    return text, token_ids
