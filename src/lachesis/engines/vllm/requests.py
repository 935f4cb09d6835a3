"""Translation of our requests to vLLM's, and of vLLM's outputs to ours."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from lachesis.common.errors import EngineError, EngineUnreachable
from lachesis.common.types import FinishReason
from lachesis.engines.serving.bodies import Refused
from lachesis.engines.serving.generation import GenerateBody, GenerateChunk, GenerateCompletion, GenerateResult
from lachesis.engines.vllm import compat
from lachesis.engines.vllm.groups import Ended, Group, Member, missing_parts
from lachesis.engines.vllm.images import image_prompt
from lachesis.engines.vllm.logprobs import KEY, FetchedLogprobs
from lachesis.engines.vllm.routed_experts import read_routes
from lachesis.process.tasks import cancel, together

logger = logging.getLogger(__name__)


class Generator:
    """Runs requests on vLLM's engine.

    The ``n`` completions of a request are submitted one by one, split as vLLM itself would (completion ``i`` has seed +
    i), so that each has its own times, from which its weight versions follow.

    Args:
        engine: vLLM's ``EngineClient``.
        lora_request: attached to every request, with LoRA on.
        max_model_len: maximum tokens of prompt and completion together.
        caches_prefixes: True if the engine has a prefix cache, so that its answers count cached tokens.
    """

    def __init__(self, engine: Any, *, lora_request: Any | None, max_model_len: int, caches_prefixes: bool) -> None:
        self._engine = engine
        self._caches_prefixes = caches_prefixes
        self._max_model_len = max_model_len
        self._lora_request = lora_request
        self._fetched: FetchedLogprobs | None = None
        self._numbers = itertools.count()
        missing = missing_parts(engine)
        self._groups = not missing
        if missing:
            logger.warning(
                "%s lacks %s: completions go in one by one, which is slower", compat.engine_kind(), ", ".join(missing)
            )

    def fetch_logprobs(self, fetched: FetchedLogprobs) -> None:
        """Start to keep logprobs of sampled tokens in the worker until their sequence has ended."""
        self._fetched = fetched

    async def generate(self, request: GenerateBody, *, cache_salt: str) -> GenerateResult:
        """Return all completions. Raise Refused if vLLM rejects the request, EngineError if vLLM is dead."""
        started = time.monotonic()
        kept = self._fetched if not request.logprobs and request.prompt_logprobs is None else None
        if kept is not None and request.prompt is None and self._groups:
            done = await self._complete_together(request, cache_salt=cache_salt, kept=kept)
        else:
            # An error cancels the others, which aborts their requests in vLLM.
            done = await together(
                self._complete(request, i, cache_salt=cache_salt, kept=kept) for i in range(request.n)
            )
        first, _ = done[0]
        return GenerateResult(
            prompt=request.prompt,
            prompt_token_ids=tuple(first.prompt_token_ids),
            completions=tuple(
                replace(
                    _sequence(output, request=request, started=started, logprobs=logprobs),
                    cached_tokens=self._cached_tokens(output),
                )
                for output, logprobs in done
            ),
            prompt_logprobs=None if request.prompt_logprobs is None else _prompt_logprobs(first),
        )

    async def stream(self, request: GenerateBody, *, cache_salt: str) -> AsyncGenerator[GenerateChunk]:
        """Yield pieces of all completions as they come."""
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for output in self._run(request, index, cache_salt=cache_salt, delta=True):
                    await queue.put((index, output))
            except Exception as error:
                await queue.put((index, error))

        tasks = [asyncio.ensure_future(pump(index)) for index in range(request.n)]
        try:
            running, prompt_sent = request.n, False
            while running:
                index, output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                chunk = _chunk(output, index=index, request=request, with_prompt=not prompt_sent)
                prompt_sent = True
                running -= chunk.finish_reason is not None
                yield chunk
        finally:
            await cancel(tasks)

    async def canary(self, token_ids: Sequence[int], *, cache_salt: str) -> tuple[float, ...]:
        """Return logprobs of the tokens after the first, recomputed rather than read from the prefix cache."""
        request = GenerateBody(
            prompt_token_ids=tuple(token_ids),
            sampling={"temperature": 1.0, "max_tokens": 1, "skip_reading_prefix_cache": True},
            prompt_logprobs=0,
            request_id=f"canary-{time.monotonic_ns()}",
        )
        output = await self._final(request, 0, cache_salt=cache_salt)
        entries = _prompt_logprobs(output)
        return tuple(entry[token] for entry, token in zip(entries[1:], token_ids[1:], strict=True) if entry is not None)

    async def cached_tokens(self, token_ids: Sequence[int], *, cache_salt: str) -> int:
        """Return how many tokens of a prompt vLLM reads from its prefix cache."""
        request = GenerateBody(
            prompt_token_ids=tuple(token_ids),
            sampling={"temperature": 1.0, "max_tokens": 1},
            request_id=f"cache-probe-{time.monotonic_ns()}",
        )
        return (await self._final(request, 0, cache_salt=cache_salt)).num_cached_tokens or 0

    async def _complete_together(
        self, request: GenerateBody, *, cache_salt: str, kept: FetchedLogprobs
    ) -> list[tuple[Any, tuple[float, ...]]]:
        """Return the results of :meth:`_complete` for all completions of a prompt of token ids."""
        params = compat.parse_sampling(request.sampling, logprobs=0, text=request.text)
        self._check_room(len(request.prompt_token_ids or ()), params.max_tokens)
        keys = [self._key(request, index) for index in range(request.n)]
        asked: dict[int, asyncio.Future[str]] = {}

        def ended(place: int, output: Any) -> None:
            token_ids = output.outputs[0].token_ids
            if token_ids:
                asked[place] = kept.ask(keys[place], prompt_length=len(output.prompt_token_ids), token_ids=token_ids)
            else:
                kept.drop(keys[place])

        try:
            outputs = await self._run_group(request, params, keys, cache_salt=cache_salt, ended=ended)
            answers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        except BaseException:
            for key in keys:
                kept.drop(key)
            raise
        return [
            (output, kept.read(answers[place], token_ids=output.outputs[0].token_ids) if place in answers else ())
            for place, output in enumerate(outputs)
        ]

    async def _run_group(
        self, request: GenerateBody, params: Any, keys: Sequence[str], *, cache_salt: str, ended: Ended
    ) -> list[Any]:
        members = [
            Member(f"{request.request_id}-{index}", _seed(request, index), {KEY: key}) for index, key in enumerate(keys)
        ]
        with _our_errors():
            prompt = self._token_prompt(request, cache_salt=cache_salt)
            group = Group(self._engine, ended=ended)
            return await group.run(prompt, params, members, lora_request=self._lora_request)

    def _token_prompt(self, request: GenerateBody, *, cache_salt: str) -> Any:
        """Convert the prompt to token ids in vLLM's form, which need no tokenizer thread."""
        token_ids = request.prompt_token_ids or ()
        if request.images is None:
            return compat.tokens_input(list(token_ids), cache_salt=cache_salt)
        processor = self._engine.renderer.get_mm_processor()
        return image_prompt(processor, token_ids, request.images, cache_salt=cache_salt)

    def _key(self, request: GenerateBody, index: int) -> str:
        """Return a unique name for the logprobs of a completion."""
        return f"{request.request_id}-{index}-{next(self._numbers)}"

    async def _complete(
        self, request: GenerateBody, index: int, *, cache_salt: str, kept: FetchedLogprobs | None
    ) -> tuple[Any, tuple[float, ...] | None]:
        """Return vLLM's last output, and the logprobs if they are not in it."""
        if kept is None:
            return await self._final(request, index, cache_salt=cache_salt), None
        name = self._key(request, index)
        try:
            output = await self._final(request, index, cache_salt=cache_salt, kept_as=name)
        except BaseException:
            kept.drop(name)
            raise
        token_ids = output.outputs[0].token_ids
        return output, await kept.take(name, prompt_length=len(output.prompt_token_ids), token_ids=token_ids)

    async def _final(self, request: GenerateBody, index: int, *, cache_salt: str, kept_as: str | None = None) -> Any:
        last = None
        async for output in self._run(request, index, cache_salt=cache_salt, kept_as=kept_as):
            last = output
        if last is None:
            raise EngineError("vLLM ended a request without an output", remedy="look at the server's log")
        return last

    async def _run(
        self,
        request: GenerateBody,
        index: int,
        *,
        cache_salt: str,
        delta: bool = False,
        kept_as: str | None = None,
    ) -> AsyncIterator[Any]:
        params = compat.parse_sampling(
            {**request.sampling, "seed": _seed(request, index)},
            logprobs=request.logprobs or 0,
            prompt_logprobs=request.prompt_logprobs,
            delta=delta,
            text=request.text,
            extra=None if kept_as is None else {KEY: kept_as},
        )
        if request.prompt is not None:
            prompt: Any = compat.TextPrompt(prompt=request.prompt, cache_salt=cache_salt)
        else:
            self._check_room(len(request.prompt_token_ids or ()), params.max_tokens)
            with _our_errors():
                prompt = self._token_prompt(request, cache_salt=cache_salt)
        outputs = self._engine.generate(
            prompt, params, f"{request.request_id}-{index}", lora_request=self._lora_request
        )
        with _our_errors():
            async with aclosing(outputs):
                async for output in outputs:
                    self._check_room(len(output.prompt_token_ids), params.max_tokens)
                    if any(completion.finish_reason == "error" for completion in output.outputs):
                        raise EngineError("vLLM failed to compute a request", remedy="look at the server's log")
                    yield output

    def _cached_tokens(self, output: Any) -> int | None:
        """Return the number of prompt tokens found in the prefix cache; ``None`` for a prompt that vLLM never read."""
        if not self._caches_prefixes or not output.outputs[0].token_ids:
            return None
        return output.num_cached_tokens

    def _check_room(self, prompt_tokens: int, max_tokens: int | None) -> None:
        """Refuse a completion that does not fit the context, which vLLM would truncate and report as finished."""
        if prompt_tokens + (max_tokens or 0) > self._max_model_len:
            raise Refused(
                f"the prompt has {prompt_tokens} tokens and {max_tokens} more are requested, but the context holds "
                f"{self._max_model_len}",
                remedy="shorten the prompt or lower max_tokens",
            )


def engine_is_dead(error: BaseException) -> EngineUnreachable:
    """Return the error for an engine whose process has ended; the server's process ends seconds later too."""
    return EngineUnreachable(f"vLLM's engine is dead: {error}", remedy="look at its log and restart it")


@contextmanager
def _our_errors() -> Iterator[None]:
    """Convert vLLM's errors inside the context to ours."""
    try:
        yield
    except compat.EngineDeadError as error:
        raise engine_is_dead(error) from error
    except compat.caller_errors() as error:
        raise Refused(f"vLLM refuses the request: {error}", remedy="correct the request") from error


def _seed(request: GenerateBody, index: int) -> int | None:
    seed = request.sampling.get("seed")
    return None if seed is None else seed + index


def _sequence(
    output: Any, *, request: GenerateBody, started: float, logprobs: tuple[float, ...] | None
) -> GenerateCompletion:
    # vLLM leaves 0 if there was no token, and has no metrics with --disable-log-stats.
    return GenerateCompletion(
        **_sampled(output, request, logprobs=logprobs),
        finish_reason=_finish_reason(output.outputs[0].finish_reason) or "abort",
        routed=read_routes(output) if request.routed_experts else None,
        first_token_time=getattr(output.metrics, "first_token_ts", 0.0) or started,
        last_token_time=getattr(output.metrics, "last_token_ts", 0.0) or time.monotonic(),
        token_versions=compat.token_versions(output.outputs[0]),
    )


def _chunk(output: Any, *, index: int, request: GenerateBody, with_prompt: bool) -> GenerateChunk:
    return GenerateChunk(
        **_sampled(output, request),
        index=index,
        finish_reason=_finish_reason(output.outputs[0].finish_reason),
        prompt_token_ids=tuple(output.prompt_token_ids) if with_prompt else None,
        time=getattr(output.metrics, "last_token_ts", 0.0) or time.monotonic(),
    )


def _sampled(output: Any, request: GenerateBody, *, logprobs: tuple[float, ...] | None = None) -> dict[str, Any]:
    """Return the fields that a completion and a chunk share; ``logprobs`` if they are not in the output."""
    (completion,) = output.outputs
    if logprobs is not None:
        return {"text": completion.text, "token_ids": tuple(completion.token_ids), "logprobs": logprobs}
    tokens, entries = completion.token_ids, completion.logprobs or []
    places = list(zip(tokens, entries, strict=True))
    top = None
    if request.logprobs:  # the sampled token first, then the likeliest
        top = tuple({other: entry[other].logprob for other in (token, *entry)} for token, entry in places)
    own = tuple(entry[token].logprob for token, entry in places)
    return {"text": completion.text, "token_ids": tuple(tokens), "logprobs": own, "top_logprobs": top}


def _prompt_logprobs(output: Any) -> tuple[Mapping[int, float] | None, ...]:
    if output.prompt_logprobs is None:
        raise EngineError("vLLM returned no logprobs for a prompt", remedy="look at the server's log")
    return tuple(
        None if entry is None else {token: value.logprob for token, value in entry.items()}
        for entry in output.prompt_logprobs
    )


def _finish_reason(reason: Any) -> FinishReason | None:
    return reason if reason in (None, "length", "abort") else "stop"
