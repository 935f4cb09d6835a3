"""``/v1/chat/completions/tokens``: vLLM's chat, its parsers of tools and reasoning included, after a prompt of tokens.

The multi-turn client of verifiers 0.1 uses it from the second turn on, to avoid retokenizing earlier turns.
"""

from __future__ import annotations

import copy
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lachesis.engines.serving.bodies import Refused, TokenIds, parse
from lachesis.engines.serving.bodies import Request as Body
from lachesis.engines.serving.server import guarded, read_body, while_connected

PATH = "/v1/chat/completions/tokens"


class _Tokens(Body):
    tokens: TokenIds = Field(min_length=1)


def chat_tokens_route(state: Any) -> Route:
    """Return the route, which calls vLLM's own chat from its server's ``state``."""

    async def answer(request: Request) -> Response:
        body = await read_body(request)
        tokens = parse(_Tokens, {"tokens": body.pop("tokens", None)}).tokens
        return await while_connected(request, _chat(state.openai_serving_chat, body, tokens, request))

    return Route(PATH, guarded(answer), methods=["POST"])


async def _chat(serving: Any, body: dict[str, Any], tokens: tuple[int, ...], request: Request) -> Response:
    from lachesis.engines.vllm import compat

    if serving is None:
        raise Refused("this model does not support chat", status=404, remedy="use /v1/completions or /generate")
    given = copy.copy(serving)
    given.render_chat_request = _rendered_as(serving, tokens)
    try:
        found = await given.create_chat_completion(compat.chat_request(body), request)
    except compat.caller_errors() as error:
        raise Refused(f"vLLM refuses the request: {error}", remedy="correct the request") from error
    if not hasattr(found, "model_dump"):
        return StreamingResponse(found, media_type="text/event-stream")
    code = getattr(getattr(found, "error", None), "code", 200)
    return JSONResponse(found.model_dump(), status_code=code)


def _rendered_as(serving: Any, tokens: tuple[int, ...]) -> Any:
    """Return vLLM's chat renderer with its own checks, but with these tokens instead of the rendered messages'."""

    async def render_chat_request(request: Any) -> Any:
        found = await serving.render_chat_request(request)
        if not isinstance(found, tuple):
            return found  # vLLM's error response
        messages, prompts = found
        replaced = {name: value for name, value in prompts[0].items() if name != "prompt"}
        return messages, [replaced | {"prompt_token_ids": list(tokens)}]

    return render_chat_request
