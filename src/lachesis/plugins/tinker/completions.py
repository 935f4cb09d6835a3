"""Requests and answers of vLLM's ``/v1/completions``, with token ids and logprobs in place of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lachesis.common.errors import EngineError
from lachesis.common.json_values import is_list
from lachesis.common.types import Completion, VersionSpan
from lachesis.plugins.tinker.records import Sampled, SampleRequest
from lachesis.plugins.tinker.sampling import NO_LOGPROB

_VERSION = VersionSpan(0, 0)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """``logprobs`` float32 [P], NaN for the first token; ``top_ids`` int32 and ``top_logprobs`` float32 [P, K]."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def completion_body(
    model: str, *, prompt_ids: Sequence[int], max_tokens: int, request: SampleRequest | None = None
) -> dict[str, Any]:
    """Return the body of a request; without ``request`` it asks only for tokens, at temperature 1."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": max_tokens,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    if request is None:
        return body
    asked = request.generation
    body |= {
        "n": asked.n,
        "seed": asked.seed,
        "temperature": asked.params.temperature,
        "top_p": asked.params.top_p,
        "top_k": asked.params.top_k,
        "stop": list(asked.params.stop),
        "stop_token_ids": list(asked.params.stop_token_ids),
    }
    if request.prompt_logprobs or request.top_prompt_logprobs:
        body["prompt_logprobs"] = request.top_prompt_logprobs
    return body


def read_sampled(reply: Any, *, request: SampleRequest, url: str) -> Sampled:
    """Return the completions of an answer. Raises EngineError unless it is whole."""
    asked = request.generation
    try:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        completions = [_completion(choice) for choice in choices]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(url, error) from error
    if len(completions) != asked.n:
        raise _malformed(url, f"{len(completions)} completions instead of {asked.n}")
    if not request.prompt_logprobs and not request.top_prompt_logprobs:
        return Sampled(completions)
    prompt = read_prompt(reply, token_ids=asked.prompt_ids, top=request.top_prompt_logprobs, url=url)
    if request.prompt_logprobs:
        unasked = max(0, len(asked.prompt_ids) - request.prompt_logprobs)
        prompt.logprobs[:unasked] = np.nan
        prompt.top_ids[:unasked], prompt.top_logprobs[:unasked] = 0, NO_LOGPROB
    return Sampled(
        completions,
        prompt.logprobs if request.prompt_logprobs else None,
        prompt.top_ids if request.top_prompt_logprobs else None,
        prompt.top_logprobs if request.top_prompt_logprobs else None,
    )


def read_prompt(reply: Any, *, token_ids: Sequence[int], top: int, url: str) -> PromptLogprobs:
    """Return the logprobs of a prompt's tokens, and its ``top`` likeliest ones. Raises EngineError unless whole."""
    length = len(token_ids)
    found = PromptLogprobs(
        np.full(length, np.nan, np.float32),
        np.zeros((length, top), np.int32),
        np.full((length, top), NO_LOGPROB, np.float32),
    )
    try:
        places = reply["choices"][0]["prompt_logprobs"]
        if not is_list(places) or len(places) != length:
            raise ValueError("prompt_logprobs and the prompt differ in length")
        for place, (entry, token) in enumerate(zip(places, token_ids, strict=True)):
            if place == 0:
                continue
            values = {int(one): float(value["logprob"]) for one, value in entry.items()}
            found.logprobs[place] = values[token]
            best = sorted(values, key=lambda one: values[one], reverse=True)[:top]
            found.top_ids[place, : len(best)] = best
            found.top_logprobs[place, : len(best)] = [values[one] for one in best]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(url, error) from error
    return found


def _completion(choice: Any) -> Completion:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(logprobs)} logprobs for {len(tokens)} tokens")
    return Completion(
        token_ids=tuple(map(int, tokens)),
        logprobs=tuple(map(float, logprobs)),
        finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
        versions=_VERSION,
    )


def _malformed(url: str, reason: object) -> EngineError:
    return EngineError(
        f"{url}/v1/completions answered without the requested fields: {reason}",
        remedy="use a vLLM server that supports return_token_ids",
    )
