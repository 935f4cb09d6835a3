"""Which requests an embedded engine can sample. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.common.errors import EngineError
from lachesis.common.types import GenerationRequest, SamplingParams


def check_request(
    where: str, request: GenerationRequest, *, vocab_size: int, max_context: int, can_decode: bool
) -> None:
    """Raise EngineError for a request that cannot be sampled; ``where`` names it, as in "request 3"."""
    params = request.params
    check_tokens(f"the prompt of {where}", request.prompt_ids, vocab_size=vocab_size, max_context=max_context)
    length = len(request.prompt_ids)
    if length + params.max_tokens > max_context:
        raise EngineError(
            f"{where} has a prompt of {length} tokens and asks for {params.max_tokens} more, but the "
            f"context holds {max_context}",
            remedy="shorten the prompt or lower sampling.max_completion_length",
        )
    if wrong := _wrong_parameter(request.n, params):
        raise EngineError(f"{where} has {wrong}", remedy="correct the sampling parameters")
    if params.stop and not can_decode:
        raise EngineError(
            f"{where} has stop strings, but this engine has no tokenizer to find them with",
            remedy="give the engine `decode`, or use stop_token_ids",
        )
    if params.guided_regex is not None and not can_decode:
        raise EngineError(
            f"{where} has a regular expression, but this engine has no tokenizer to follow it with",
            remedy="give the engine `decode`",
        )


def check_tokens(what: str, token_ids: Sequence[int], *, vocab_size: int, max_context: int) -> None:
    """Raise EngineError for a sequence that is empty, too long, or has tokens that the model does not know."""
    if not token_ids:
        raise EngineError(f"{what} is empty", remedy="begin it with at least one token")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise EngineError(
            f"{what} has token ids outside of 0 to {vocab_size - 1}",
            remedy="use the tokenizer that belongs to the model",
        )
    if len(token_ids) > max_context:
        raise EngineError(
            f"{what} has {len(token_ids)} tokens, but the context holds {max_context}", remedy="shorten it"
        )


def _wrong_parameter(n: int, params: SamplingParams) -> str:
    """The first parameter that is out of range, in words; empty if all are right."""
    checks = {
        f"n = {n}, not at least 1": n >= 1,
        f"max_tokens = {params.max_tokens}, not at least 1": params.max_tokens >= 1,
        f"temperature = {params.temperature}, not finite and at least 0": 0 <= params.temperature < float("inf"),
        f"top_p = {params.top_p}, not above 0 and at most 1": 0 < params.top_p <= 1,
        f"top_k = {params.top_k}, not at least 0": params.top_k >= 0,
        f"min_p = {params.min_p}, not from 0 to 1": 0 <= params.min_p <= 1,
        f"repetition_penalty = {params.repetition_penalty}, not above 0": params.repetition_penalty > 0,
        f"min_tokens = {params.min_tokens}, not from 0 to max_tokens": 0 <= params.min_tokens <= params.max_tokens,
        f"presence_penalty = {params.presence_penalty}, not from -2 to 2": -2 <= params.presence_penalty <= 2,
        f"frequency_penalty = {params.frequency_penalty}, not from -2 to 2": -2 <= params.frequency_penalty <= 2,
        "an empty stop string": all(params.stop),
    }
    return next((wrong for wrong, right in checks.items() if not right), "")
