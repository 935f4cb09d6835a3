"""OpenAI's routes over a served engine: models, completions and chat, with token ids as vLLM returns them."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, field_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from lachesis.engines.serving.bodies import Count, Flag, Refused, Request, Text, TokenIds, parse
from lachesis.engines.serving.generation import (
    POLICY,
    GenerateBody,
    GenerateChunk,
    GenerateCompletion,
    GenerateResult,
    SampledBody,
    finite,
    parse_sampled,
    top_logprobs,
)
from lachesis.engines.serving.server import (
    check_model,
    check_token_ids,
    event_stream,
    guarded,
    read_body,
    while_connected,
)
from lachesis.plugins.embedded_server.backend import EmbeddedBackend

_Top = Annotated[Count, Field(le=20)]


class _OpenAIBody(SampledBody):
    stream_options: dict[str, Any] = Field(default_factory=dict)
    return_token_ids: Flag = False


class _CompletionBody(_OpenAIBody):
    """Body of a completion request; ``prompt`` is one prompt or several, each as text or as token ids."""

    also = ("user", "timeout", "add_special_tokens")

    prompt: tuple[Text | TokenIds, ...]
    logprobs: _Top | None = None
    prompt_logprobs: Count | None = None
    echo: Any = None
    suffix: Any = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _several(cls, prompt: Any) -> Any:
        if not prompt:
            raise Refused("the prompt is empty", remedy="begin it with at least one token")
        return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) and all(prompt) else [prompt]


class _ChatBody(_OpenAIBody):
    also = ("user", "timeout", "tool_choice")

    messages: list[dict[str, Any]]
    logprobs: Flag = False
    top_logprobs: _Top = 0
    tools: Any = None
    add_generation_prompt: Flag = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_tokens_as_token_ids: Flag = False


class _TokensChatBody(_ChatBody):
    """Body for a turn whose prompt is given as tokens, which mean the same as the messages; these are not rendered."""

    tokens: TokenIds

    @field_validator("tokens")
    @classmethod
    def _not_empty(cls, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if not tokens:
            raise Refused("tokens is empty", remedy="begin the prompt with at least one token")
        return tokens


class _TokenizeBody(Request):
    """Body with a text, or a conversation that the chat template renders."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: Text | None = None
    tools: Any = None
    add_generation_prompt: Flag = True
    add_special_tokens: Flag | None = None
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: Flag = False


B = TypeVar("B", bound=_OpenAIBody)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Parsed body of an OpenAI request: one request for each prompt; the body shapes the answer."""

    requests: tuple[GenerateBody, ...]
    model: str
    body: _OpenAIBody
    chat: bool


class OpenAIRoutes:
    """``/v1/models``, completions, chats (also with the prompt as tokens) and ``/tokenize``, over an engine."""

    def __init__(self, served: EmbeddedBackend) -> None:
        self._served = served
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Return the routes, whose errors look as on all other routes."""
        return [
            Route("/v1/models", guarded(self._models), methods=["GET"]),
            Route("/v1/completions", guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
            Route("/v1/chat/completions/tokens", guarded(self._chat_tokens), methods=["POST"]),
            Route("/tokenize", guarded(self._tokenize), methods=["POST"]),
        ]

    async def _models(self, request: HttpRequest) -> Response:
        info, adapter = self._served.model_info(), self._served.adapter()
        names = [*info.served_names, POLICY, *([adapter.name] if adapter else [])]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "lachesis",
                "root": info.model,
                "max_model_len": info.max_model_len,
            }
            for name in dict.fromkeys(names)
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _completions(self, request: HttpRequest) -> Response:
        body = await self._parsed(_CompletionBody, request)
        for name in ("echo", "suffix"):
            if getattr(body, name):
                raise Refused(f"{name} is not supported by the embedded engine", remedy="leave it out, or use vLLM")
        return await self._answer(request, self._asked(body, body.prompt, top=body.logprobs))

    async def _chat(self, request: HttpRequest) -> Response:
        body = await self._parsed(_ChatBody, request)
        return await self._turn(request, body, render_chat(body, self._served.tokenizer))

    async def _chat_tokens(self, request: HttpRequest) -> Response:
        body = await self._parsed(_TokensChatBody, request)
        return await self._turn(request, body, body.tokens)

    async def _turn(self, request: HttpRequest, body: _ChatBody, prompt: tuple[int, ...]) -> Response:
        top = body.top_logprobs if body.logprobs else None
        return await self._answer(request, self._asked(body, [prompt], top=top))

    async def _tokenize(self, request: HttpRequest) -> Response:
        body = parse(_TokenizeBody, await read_body(request))
        info, tokenizer = self._served.model_info(), self._served.tokenizer
        check_model(body.model, info=info, adapter=self._served.adapter())
        tokens = _tokenized(body, tokenizer)
        strings = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        document = {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
        return JSONResponse(document | {"token_strs": strings})

    async def _parsed(self, kind: type[B], request: HttpRequest) -> B:
        return parse_sampled(kind, await read_body(request), sampling_fields=self._served.sampling_fields)

    def _asked(self, body: _OpenAIBody, prompts: Sequence[str | tuple[int, ...]], *, top: int | None) -> _Asked:
        info = self._served.model_info()
        check_model(body.model, info=info, adapter=self._served.adapter())
        sampling = body.sampling
        if isinstance(body, _ChatBody) and "max_tokens" not in sampling:
            sampling["max_tokens"] = max(1, info.max_model_len - max(map(len, prompts)))
        for prompt in prompts:
            check_token_ids(prompt if isinstance(prompt, tuple) else (), info=info)
        requests = tuple(
            GenerateBody(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=prompt if isinstance(prompt, tuple) else None,
                n=body.n,
                sampling=sampling,
                logprobs=top,
                prompt_logprobs=body.prompt_logprobs if isinstance(body, _CompletionBody) else None,
                model=body.model,
            )
            for prompt in prompts
        )
        return _Asked(requests, body.model or info.served_names[0], body, chat=isinstance(body, _ChatBody))

    async def _answer(self, request: HttpRequest, asked: _Asked) -> Response:
        if asked.body.stream:
            if len(asked.requests) > 1:
                raise Refused("several prompts cannot be streamed at once", remedy="send one prompt, or stream: false")
            events = self._events(asked)
            return event_stream(await while_connected(request, anext(events)), events)
        work = asyncio.gather(*(self._served.generate(one) for one in asked.requests))
        return JSONResponse(self._document(asked, await while_connected(request, work)))

    def _document(self, asked: _Asked, results: Sequence[GenerateResult]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for result in results:
            for sequence in result.completions:
                choice = {"index": len(choices), **self._choice(asked, sequence, delta=False)}
                if asked.body.return_token_ids and not asked.chat:
                    choice["prompt_token_ids"] = result.prompt_token_ids
                if result.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = [self._named(entry) for entry in result.prompt_logprobs]
                choices.append(choice)
        tokens = sum(len(s.token_ids) for r in results for s in r.completions)
        document = _envelope(asked, chunk=False) | {"choices": choices}
        if asked.chat and asked.body.return_token_ids:
            document["prompt_token_ids"] = results[0].prompt_token_ids
        return document | {"usage": _usage(sum(len(r.prompt_token_ids) for r in results), tokens)}

    async def _events(self, asked: _Asked) -> AsyncIterator[str]:
        envelope = _envelope(asked, chunk=True)
        prompt, tokens, started = 0, 0, set()
        async with aclosing(self._served.stream(asked.requests[0])) as chunks:
            async for chunk in chunks:
                choice = {"index": chunk.index, **self._choice(asked, chunk, delta=True)}
                if asked.chat and chunk.index not in started:
                    started.add(chunk.index)
                    choice["delta"] = {"role": "assistant", **choice["delta"]}
                event = envelope | {"choices": [choice]}
                if chunk.prompt_token_ids is not None:
                    prompt = len(chunk.prompt_token_ids)
                    if asked.body.return_token_ids:
                        (event if asked.chat else choice)["prompt_token_ids"] = chunk.prompt_token_ids
                tokens += len(chunk.token_ids)
                yield json.dumps(event)
        if asked.body.stream_options.get("include_usage"):
            yield json.dumps(envelope | {"choices": [], "usage": _usage(prompt, tokens)})

    def _choice(self, asked: _Asked, part: GenerateCompletion | GenerateChunk, *, delta: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"finish_reason": part.finish_reason, "logprobs": None}
        if not asked.chat:
            choice["text"] = part.text
        elif delta:
            choice["delta"] = {"content": part.text}
        else:
            choice["message"] = {"role": "assistant", "content": part.text}
        if asked.requests[0].logprobs is not None:
            shape = _chat_logprobs if asked.chat else _completion_logprobs
            by_id = isinstance(asked.body, _ChatBody) and asked.body.return_tokens_as_token_ids
            choice["logprobs"] = shape(part, "token_id:{}".format if by_id else self._token_text)
        if asked.body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _named(self, entry: Mapping[int, float] | None) -> dict[str, dict[str, Any]] | None:
        """Return the logprobs at one place of a prompt, in vLLM's format."""
        if entry is None:
            return None
        return {
            str(token): {"logprob": finite(value), "decoded_token": self._token_text(token)}
            for token, value in entry.items()
        }

    def _token_text(self, token: int) -> str:
        return str(self._served.tokenizer.decode([token]))


def _tokenized(body: _TokenizeBody, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize a text, with special tokens unless the body declines them, or a conversation by its chat template."""
    if (body.prompt is None) == (body.messages is None):
        raise Refused("the body must have either prompt or messages", remedy="send one of the two")
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise Refused("add_special_tokens is for texts: a conversation's come from its template", remedy="leave it out")
    return list(render_chat(body, tokenizer, continued=body.continue_final_message))


def render_chat(
    body: _ChatBody | _TokenizeBody, tokenizer: PreTrainedTokenizerBase, *, continued: bool = False
) -> tuple[int, ...]:
    """Render a conversation to token ids; raise Refused (400) if it is malformed or there is no chat template."""
    if not body.messages or not all(isinstance(message.get("role"), str) for message in body.messages):
        raise Refused("messages is not a list of objects with a role", remedy='send [{"role": "user", "content": ...}]')
    # With a template of a client's own, or a length to pad to, one request would hold up all.
    options = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents"}
    if taken := sorted(options & body.chat_template_kwargs.keys()):
        raise Refused(f"chat_template_kwargs has {taken[0]!r}, not a variable of the template", remedy="leave it out")
    if tokenizer.chat_template is None:
        raise Refused("the model's tokenizer has no chat template", remedy="use /v1/completions or /generate")
    try:
        ids: Any = tokenizer.apply_chat_template(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt and not continued,
            continue_final_message=continued,
            tokenize=True,
            return_dict=False,
            **body.chat_template_kwargs,
        )
    except Exception as error:  # a template is a program that comes with the model, and may raise anything
        raise Refused(f"the chat template cannot render these messages: {error}", remedy="correct them") from error
    return tuple(ids)


def _envelope(asked: _Asked, *, chunk: bool) -> dict[str, Any]:
    kind = ("chat.completion" + ".chunk" * chunk) if asked.chat else "text_completion"
    prefix = "chatcmpl" if asked.chat else "cmpl"
    return {
        "id": f"{prefix}-{asked.requests[0].request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
    }


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion_logprobs(part: GenerateCompletion | GenerateChunk, text: Callable[[int], str]) -> dict[str, Any]:
    tokens = [text(token) for token in part.token_ids]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(value) for value in part.logprobs],
        "top_logprobs": [{text(t): finite(value) for t, value in entry.items()} for entry in top_logprobs(part)],
        "text_offset": offsets,
    }


def _chat_logprobs(part: GenerateCompletion | GenerateChunk, text: Callable[[int], str]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text(token), "logprob": finite(logprob), "bytes": list(text(token).encode())}

    content = []
    for token, logprob, top in zip(part.token_ids, part.logprobs, top_logprobs(part), strict=True):
        others = [entry(other, value) for other, value in top.items()] if part.top_logprobs is not None else []
        content.append(entry(token, logprob) | {"top_logprobs": others})
    return {"content": content}
