"""The route ``/inference/v1/generate``: token ids in, token ids out, for the train clients of verifiers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, Field

from lachesis.common.types import Completion
from lachesis.engines.serving.bodies import Refused, Request, Text, TokenIds
from lachesis.engines.serving.generation import GenerateBody, GenerateResult, finite, parse_sampled

# Fields of ``sampling_params`` without effect here: answers always have the logprob of each sampled token, and never
# the routed experts.
_WITHOUT_MEANING = ("logprobs", "routed_experts_prompt_start")


class TokensBody(Request):
    """Body with a prompt as token ids, and vLLM's sampling parameters under their names."""

    # The server sets the prefix cache's salt, one per weight version; answers always have token ids.
    also = ("cache_salt", "return_token_ids")

    token_ids: TokenIds
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: Text | None = None


class TokenLogprob(BaseModel):
    """A token's logprob; ``token`` is ``token_id:N``, so that it cannot be mistaken for another token's text."""

    token: str
    logprob: float


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]


class TokensChoice(BaseModel):
    """A completion of T tokens; ``logprobs.content`` has T entries."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: ChoiceLogprobs
    finish_reason: str


class TokensAnswer(BaseModel):
    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: list[TokensChoice]


def generate_body(body: TokensBody, *, sampling_fields: Collection[str]) -> GenerateBody:
    """Convert the request to the engines' form.

    Raises:
        Refused: (400) a sampling parameter is unknown, of the wrong type or out of range.
    """
    if not body.token_ids:
        raise Refused("token_ids is empty", remedy="begin the prompt with at least one token")
    asked = {name: value for name, value in body.sampling_params.items() if name not in _WITHOUT_MEANING}
    document = asked | {"prompt_token_ids": list(body.token_ids), "model": body.model, "text": False}
    return parse_sampled(GenerateBody, document, sampling_fields=sampling_fields)


def tokens_answer(result: GenerateResult, *, request_id: str) -> TokensAnswer:
    """Return the answer with all completions of a request."""
    choices = [token_choice(completion, index=index) for index, completion in enumerate(result.completions)]
    return TokensAnswer(request_id=request_id, prompt_token_ids=result.prompt_token_ids, choices=choices)


def token_choice(completion: Completion, *, index: int) -> TokensChoice:
    """Convert a completion to its form in an answer."""
    places = zip(completion.token_ids, completion.logprobs, strict=True)
    content = [TokenLogprob(token=f"token_id:{token}", logprob=finite(value)) for token, value in places]
    return TokensChoice(
        index=index,
        token_ids=completion.token_ids,
        logprobs=ChoiceLogprobs(content=content),
        finish_reason=completion.finish_reason,
    )
