"""OpenAI's routes over a served engine: models, completions and chat, with token ids as vLLM returns them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from lachesis.engines.embedded.server.served import ServedEmbedded
from lachesis.engines.serving.bodies import Body
from lachesis.engines.serving.routes import event_stream, guarded, read_body, while_connected
from lachesis.engines.serving.served import (
    GenerateChunk,
    GeneratedSequence,
    GenerateRequest,
    GenerateResult,
    Refused,
)
from lachesis.engines.serving.wire import MAX_N, POLICY, check_model, check_token_ids, finite, parse_sampling

_COMMON = {
    "model", "n", "stream", "stream_options", "user", "return_token_ids", "max_completion_tokens", "timeout",
    "max_new_tokens", "logprobs",
}  # fmt: skip
_COMPLETION = {"prompt", "echo", "suffix", "add_special_tokens"}
_CHAT = {"messages", "top_logprobs", "add_generation_prompt", "chat_template_kwargs", "tools", "tool_choice"}
_MAX_TOP = 20


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a body asks for: a request for each prompt, and how its answer looks."""

    requests: tuple[GenerateRequest, ...]
    model: str
    chat: bool
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool


class OpenAIRoutes:
    """``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``.

    Args:
        backend: the engine, with its tokenizer.
    """

    def __init__(self, backend: ServedEmbedded) -> None:
        self._backend = backend
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """The routes, with errors as on all others."""
        return [
            Route("/v1/models", guarded(self._models), methods=["GET"]),
            Route("/v1/completions", guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        info, adapter = self._backend.model_info(), self._backend.adapter()
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

    async def _completions(self, request: Request) -> Response:
        body = Body(await read_body(request), known=_COMMON | _COMPLETION | self._backend.sampling_fields)
        for name in ("echo", "suffix"):
            if body.get(name):
                raise Refused(f"{name} is not known to the embedded engine", remedy="leave it out, or use vLLM")
        top = body.integer("logprobs", None, low=0, high=_MAX_TOP)
        return await self._answer(request, self._asked(body, _prompts(body), top=top, chat=False))

    async def _chat(self, request: Request) -> Response:
        body = Body(await read_body(request), known=_COMMON | _CHAT | self._backend.sampling_fields)
        wants = body.flag("logprobs", False)
        top = body.integer("top_logprobs", 0, low=0, high=_MAX_TOP) if wants else None
        prompt = render_chat(body, self._backend.tokenizer)
        return await self._answer(request, self._asked(body, [prompt], top=top, chat=True))

    def _asked(self, body: Body, prompts: Sequence[str | tuple[int, ...]], *, top: int | None, chat: bool) -> _Asked:
        info = self._backend.model_info()
        model = body.text("model", None)
        check_model(model, info=info, adapter=self._backend.adapter())
        sampling = parse_sampling(body, fields=self._backend.sampling_fields)
        if chat and body.get("max_tokens") is None and "max_tokens" not in sampling:
            sampling["max_tokens"] = max(1, info.max_model_len - max(map(len, prompts)))
        options = body.mapping("stream_options", {})
        n = body.integer("n", 1, low=1, high=MAX_N)
        requests = []
        for prompt in prompts:
            check_token_ids(prompt if isinstance(prompt, tuple) else (), info=info)
            requests.append(
                GenerateRequest(
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_token_ids=prompt if isinstance(prompt, tuple) else None,
                    n=n,
                    sampling=sampling,
                    logprobs=top,
                    model=model,
                    request_id=uuid.uuid4().hex,
                )
            )
        return _Asked(
            requests=tuple(requests),
            model=model or info.served_names[0],
            chat=chat,
            stream=body.flag("stream", False),
            usage=bool(options.get("include_usage")),
            logprobs=top is not None,
            token_ids=body.flag("return_token_ids", False),
        )

    async def _answer(self, request: Request, asked: _Asked) -> Response:
        if asked.stream:
            if len(asked.requests) > 1:
                raise Refused("several prompts cannot be streamed at once", remedy="send one prompt, or stream: false")
            events = self._events(asked)
            return event_stream(await while_connected(request, anext(events)), events)
        work = asyncio.gather(*(self._backend.generate(one) for one in asked.requests))
        return JSONResponse(self._document(asked, await while_connected(request, work)))

    def _document(self, asked: _Asked, results: Sequence[GenerateResult]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for result in results:
            for sequence in result.completions:
                choice = {"index": len(choices), **self._choice(asked, sequence, delta=False)}
                if asked.token_ids and not asked.chat:
                    choice["prompt_token_ids"] = result.prompt_token_ids
                choices.append(choice)
        tokens = sum(len(s.token_ids) for r in results for s in r.completions)
        document = _envelope(asked, chunk=False) | {"choices": choices}
        if asked.chat and asked.token_ids:
            document["prompt_token_ids"] = results[0].prompt_token_ids
        return document | {"usage": _usage(sum(len(r.prompt_token_ids) for r in results), tokens)}

    async def _events(self, asked: _Asked) -> AsyncIterator[str]:
        envelope = _envelope(asked, chunk=True)
        prompt, tokens, started = 0, 0, set()
        async with aclosing(self._backend.stream(asked.requests[0])) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                choice = {"index": chunk.index, **self._choice(asked, chunk, delta=True)}
                if asked.chat and chunk.index not in started:
                    started.add(chunk.index)
                    choice["delta"] = {"role": "assistant", **choice["delta"]}
                event = envelope | {"choices": [choice]}
                if chunk.prompt_token_ids is not None:
                    prompt = len(chunk.prompt_token_ids)
                    if asked.token_ids:
                        (event if asked.chat else choice)["prompt_token_ids"] = chunk.prompt_token_ids
                tokens += len(chunk.token_ids)
                yield json.dumps(event)
        if asked.usage:
            yield json.dumps(envelope | {"choices": [], "usage": _usage(prompt, tokens)})

    def _choice(self, asked: _Asked, part: GeneratedSequence | GenerateChunk, *, delta: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"finish_reason": part.finish_reason, "logprobs": None}
        if not asked.chat:
            choice["text"] = part.text
        elif delta:
            choice["delta"] = {"content": part.text}
        else:
            choice["message"] = {"role": "assistant", "content": part.text}
        if asked.logprobs:
            shape = _chat_logprobs if asked.chat else _completion_logprobs
            choice["logprobs"] = shape(part, self._token_text)
        if asked.token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _token_text(self, token: int) -> str:
        return str(self._backend.tokenizer.decode([token]))


def render_chat(body: Body, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The token ids of a conversation. Refused (400) where it is none, or the model has no chat template."""
    messages = body.sequence("messages")
    if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise Refused("messages is no list of messages with a role", remedy='send [{"role": "user", "content": ...}]')
    if tokenizer.chat_template is None:
        raise Refused("the model's tokenizer has no chat template", remedy="use /v1/completions or /generate")
    options: Mapping[str, Any] = body.mapping("chat_template_kwargs", {})
    try:
        ids: Any = tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=body.flag("add_generation_prompt", True),
            tokenize=True,
            return_dict=False,
            **options,
        )
    except Exception as error:  # a template is a program of the model's, and may raise anything
        raise Refused(f"the chat template cannot render these messages: {error}", remedy="correct them") from error
    return tuple(ids)


def _prompts(body: Body) -> list[str | tuple[int, ...]]:
    """One prompt or several, each as text or as token ids."""
    value = body.get("prompt")
    if isinstance(value, list) and value and all(isinstance(item, str) and item for item in value):
        return list(value)
    if isinstance(value, list) and value and all(isinstance(item, list) and item for item in value):
        return [Body({"prompt": item}, known={"prompt"}).integers("prompt") for item in value]
    prompt = body.integers("prompt") if isinstance(value, list) else body.text("prompt")
    if not prompt:
        raise Refused("the prompt is empty", remedy="begin it with at least one token")
    return [prompt]


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


def _completion_logprobs(part: GeneratedSequence | GenerateChunk, text: Callable[[int], str]) -> dict[str, Any]:
    tokens = [text(token) for token in part.token_ids]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(value) for value in part.token_logprobs],
        "top_logprobs": [{text(t): finite(value) for t, value in entry.items()} for entry in _top(part)],
        "text_offset": offsets,
    }


def _chat_logprobs(part: GeneratedSequence | GenerateChunk, text: Callable[[int], str]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text(token), "logprob": finite(logprob), "bytes": list(text(token).encode())}

    content = []
    for token, logprob, top in zip(part.token_ids, part.token_logprobs, _top(part), strict=True):
        others = [entry(other, value) for other, value in top.items()] if part.top_logprobs is not None else []
        content.append(entry(token, logprob) | {"top_logprobs": others})
    return {"content": content}


def _top(part: GeneratedSequence | GenerateChunk) -> Sequence[Mapping[int, float]]:
    if part.top_logprobs is not None:
        return part.top_logprobs
    return [{token: value} for token, value in zip(part.token_ids, part.token_logprobs, strict=True)]
