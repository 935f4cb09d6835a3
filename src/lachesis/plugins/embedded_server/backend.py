"""The embedded engine behind a server's routes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from lachesis.common.errors import EngineError, EngineUnreachable, StaleWeights
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.base import PauseMode
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.receiver import Receiver, end_this_process
from lachesis.engines.serving.backend import (
    MEMORY_PARTS,
    AdapterStatus,
    DigestRequest,
    EngineBackend,
    MemoryPart,
    ModelInfo,
    ReceiverSpec,
    ReceiverStatus,
    Refused,
    TensorInfo,
)
from lachesis.engines.serving.generation import GenerateBody, GenerateChunk, GenerateCompletion, GenerateResult
from lachesis.engines.serving.session import Session
from lachesis.plugins.embedded_server.batches import BatchRunner, Growing, GrowingText, Job
from lachesis.plugins.embedded_server.weights import EmbeddedWeights
from lachesis.process.threads import loop_event

T = TypeVar("T")

# Fields of vLLM for which this engine supports only one value.
_NEUTRAL: Mapping[str, Any] = {
    "ignore_eos": False, "detokenize": True, "spaces_between_special_tokens": True,
}  # fmt: skip
_FIELDS = frozenset(_NEUTRAL) | {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "skip_special_tokens", "include_stop_str_in_output",
}  # fmt: skip
_PARAMS = _FIELDS & {field.name for field in fields(SamplingParams)}
_MAX_TOKENS = 16  # vLLM's default if a request says nothing
_CONTROL_THREADS = 16


@dataclass(kw_only=True, eq=False)
class EmbeddedBackend(EngineBackend):
    """A :class:`EngineBackend` over an embedded engine.

    Args:
        engine: with a decoder of text, used only here.
        weights: of the same engine.
        tokenizer: of the same model.
        info: description of the model that the server returns.
        session: of the server.
        max_num_seqs: completions generated at the same time.
        end: ends a server whose weights mix two versions, so that another can replace it.
    """

    engine: EmbeddedEngine
    weights: EmbeddedWeights
    tokenizer: PreTrainedTokenizerBase
    info: ModelInfo
    session: Session
    max_num_seqs: int
    end: Callable[[], None] = end_this_process

    def __post_init__(self) -> None:
        self._runner = BatchRunner(self.engine, max_sequences=self.max_num_seqs)
        self._receiver: Receiver | None = None
        self._away: frozenset[MemoryPart] = frozenset()
        self._threads = ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix="embedded-control")

    @property
    def kind(self) -> str:
        return "embedded"

    @property
    def sampling_fields(self) -> frozenset[str]:
        return _FIELDS

    def model_info(self) -> ModelInfo:
        return self.info

    def generated_tokens(self) -> int:
        return self._runner.generated_tokens

    async def generate(self, request: GenerateBody) -> GenerateResult:
        job, news = self._submit(request)
        try:
            while not job.done:
                await news.wait()
                news.clear()
        finally:
            job.cancelled = not job.done
        if job.error is not None:
            raise job.error
        return GenerateResult(
            prompt=request.prompt,
            prompt_token_ids=job.request.prompt_ids,
            completions=tuple(self._completion(sequence, job=job, request=request) for sequence in job.sequences),
            prompt_logprobs=await self._prompt_logprobs(job.request.prompt_ids, request.prompt_logprobs),
        )

    async def stream(self, request: GenerateBody) -> AsyncGenerator[GenerateChunk]:
        if request.prompt_logprobs is not None:
            raise Refused("prompt_logprobs cannot be streamed", remedy="send stream: false")
        job, news = self._submit(request)
        texts = [self._text(request) for _ in job.sequences]
        sent = [0] * len(texts)
        open_ones = set(range(len(texts)))
        first = True
        try:
            while open_ones:
                await news.wait()
                news.clear()
                if job.error is not None:
                    raise job.error
                for index in sorted(open_ones):
                    sequence = job.sequences[index]
                    # In this order: an end is sent after all tokens are there.
                    reason, length = sequence.reason, len(sequence.token_ids)
                    if reason is None and length == sent[index]:
                        continue
                    chunk = self._chunk(
                        index, sequence, job=job, request=request, start=sent[index], stop=length, text=texts[index]
                    )
                    sent[index] = length
                    yield replace(chunk, prompt_token_ids=job.request.prompt_ids) if first else chunk
                    first = False
                    if chunk.finish_reason is not None:
                        open_ones.discard(index)
        finally:
            job.cancelled = not job.done

    async def canary(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return (await self._in_thread(lambda: self.engine.canary(token_ids))).logprobs

    async def cached_tokens(self, token_ids: Sequence[int]) -> int:
        return 0  # prompts are cached only within a batch, which no update interrupts

    async def digests(self, request: DigestRequest) -> dict[str, int]:
        return await self._in_thread(lambda: self.weights.digests(request))

    async def load_adapter(self, *, name: str, path: Path) -> None:
        await self._in_thread(lambda: self.weights.load_adapter(name=name, path=path))

    async def unload_adapter(self, *, name: str) -> None:
        await self._in_thread(lambda: self.weights.unload_adapter(name=name))

    def adapter(self) -> AdapterStatus | None:
        return self.weights.adapter

    async def start_receiver(self, spec: ReceiverSpec) -> None:
        def start() -> None:
            self.weights.check_receivable(spec)
            if self._receiver is not None:
                self._receiver.check_free()
                self._receiver.close()
            self._receiver = Receiver(spec, rank=spec.rank, device=torch.device(self.weights.device))

        await self._in_thread(start)

    def receiver(self) -> ReceiverStatus:
        return ReceiverStatus() if self._receiver is None else self._receiver.status

    async def receive(self) -> None:
        def receive() -> None:
            receiver = self._receiver
            if receiver is None:
                raise Refused("no receiver was started", status=409, remedy="start one with /nccl/start_receiver")
            tensors = receiver.take(None)
            assert tensors is not None  # it waits for the senders
            try:
                with receiver.loading():
                    self.weights.apply(tensors, receiver.spec)
            except StaleWeights:
                self.engine.close()  # no token may come from weights of two versions
                self.end()
                raise

        await self._in_thread(receive)

    async def stop_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await self._in_thread(receiver.close)

    async def export_shared(self, path: Path) -> None:
        await self._in_thread(lambda: self.weights.export_shared(path, session=self.session, engine=self.kind))

    async def state_dict_info(self) -> dict[str, TensorInfo]:
        return self.weights.state_dict_info()

    async def reload(self, path: Path) -> None:
        await self._in_thread(lambda: self.weights.reload(path))

    async def pause(self, mode: PauseMode) -> None:
        await self._in_thread(lambda: self._runner.pause(mode))

    async def resume(self) -> None:
        self.engine.resume()

    async def is_paused(self) -> bool:
        return self.engine.gate.mode is not None

    async def sleep(self, level: int) -> None:
        """Move the weights to the host, if they are on a GPU, at both levels; level 2 does not have to discard them."""
        if not self.engine.gate.asleep:
            await self._in_thread(self.engine.gate.sleep)
            self._away = frozenset(MEMORY_PARTS)
            try:
                await self._in_thread(lambda: self.weights.move("cpu"))
            except EngineError:
                await self.wake_up(MEMORY_PARTS)
                raise

    async def wake_up(self, tags: Sequence[MemoryPart]) -> None:
        """Take back parts of the memory; the engine sleeps until it has all of them. It has no cache to restore."""
        if "weights" in self._away.intersection(tags):
            await self._in_thread(lambda: self.weights.move(self.info.device))
        self._away = self._away.difference(tags)
        if not self._away:
            self.engine.gate.wake()

    async def is_sleeping(self) -> bool:
        return self.engine.gate.asleep

    async def reset_prefix_cache(self) -> None:
        """Do nothing: this engine keeps no prefixes from one batch to the next."""

    async def label_weights(self, version: int) -> None:
        """Do nothing: the times of its tokens tell versions apart."""

    def check_alive(self) -> None:
        if not self._runner.alive:
            raise EngineUnreachable("the engine is dead: its thread has ended", remedy="start the server again")

    async def health(self) -> None:
        self.check_alive()

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        self._runner.close()
        self.weights.close()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _submit(self, request: GenerateBody) -> tuple[Job, asyncio.Event]:
        news, notify = loop_event()
        job = Job(self._request(request), top_logprobs=request.logprobs or 0, notify=notify)
        self._runner.submit(job)
        return job, news

    def _request(self, request: GenerateBody) -> GenerationRequest:
        """Translate the body into the engine's request; raise Refused (400) if it cannot be sampled."""
        sampling = request.sampling
        for name, neutral in _NEUTRAL.items():
            if sampling.get(name, neutral) != neutral:
                raise Refused(f"the embedded engine has no {name}", remedy=f"leave it at {neutral}, or use vLLM")
        if request.images is not None:
            raise Refused("the embedded engine's server takes no images", remedy="set engine.kind: embedded or vllm")
        prompt_ids = request.prompt_token_ids
        if prompt_ids is None:
            prompt_ids = tuple(self.tokenizer(request.prompt)["input_ids"])  # type: ignore[arg-type]
        room = self.info.max_model_len - len(prompt_ids)
        params: dict[str, Any] = {"max_tokens": max(1, min(_MAX_TOKENS, room))}
        params["routed_experts"] = request.routed_experts
        params |= {name: value for name, value in sampling.items() if name in _PARAMS}
        params |= {name: tuple(params.get(name, ())) for name in ("stop", "stop_token_ids")}
        params["top_k"] = max(0, params.get("top_k", 0))
        seed = sampling.get("seed", secrets.randbits(63))
        wanted = GenerationRequest(prompt_ids, SamplingParams(**params), n=request.n, seed=seed)
        try:
            self.engine.check(wanted)
        except EngineError as error:
            raise Refused(error.message, remedy=error.remedy) from error
        return wanted

    def _text(self, request: GenerateBody) -> GrowingText:
        sampling = request.sampling
        skip = sampling.get("skip_special_tokens", True)
        return GrowingText(
            lambda ids: str(self.tokenizer.decode(list(ids), skip_special_tokens=skip)),
            stop=sampling.get("stop", ()),
            include_stop=sampling.get("include_stop_str_in_output", False),
        )

    def _completion(self, sequence: Growing, *, job: Job, request: GenerateBody) -> GenerateCompletion:
        return GenerateCompletion(
            text=self._text(request).more(sequence.token_ids, finished=True) if request.text else "",
            token_ids=tuple(sequence.token_ids),
            finish_reason=sequence.reason or "abort",
            logprobs=tuple(sequence.logprobs),
            top_logprobs=tuple(sequence.top) if request.logprobs else None,
            routed=sequence.routed,
            first_token_time=sequence.times[0] if sequence.times else job.submitted,
            last_token_time=sequence.times[-1] if sequence.times else job.submitted,
        )

    def _chunk(
        self,
        index: int,
        sequence: Growing,
        *,
        job: Job,
        request: GenerateBody,
        start: int,
        stop: int,
        text: GrowingText,
    ) -> GenerateChunk:
        reason = sequence.reason if len(sequence.token_ids) == stop else None
        return GenerateChunk(
            index=index,
            text=text.more(sequence.token_ids[:stop], finished=reason is not None),
            token_ids=tuple(sequence.token_ids[start:stop]),
            logprobs=tuple(sequence.logprobs[start:stop]),
            top_logprobs=tuple(sequence.top[start:stop]) if request.logprobs else None,
            finish_reason=reason,
            time=sequence.times[stop - 1] if stop else job.submitted,
        )

    async def _prompt_logprobs(
        self, prompt_ids: Sequence[int], top: int | None
    ) -> tuple[Mapping[int, float] | None, ...] | None:
        """Return the logprobs of the prompt's tokens, and of the ``top`` likeliest at each place."""
        if top is None:
            return None
        if len(prompt_ids) == 1:
            return (None,)
        logprobs = await self._in_thread(lambda: self.engine.score("the prompt", prompt_ids).cpu())
        likeliest = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
        rows: list[Mapping[int, float] | None] = [None]
        for row, token in enumerate(prompt_ids[1:]):
            best = zip(likeliest.indices[row].tolist(), likeliest.values[row].tolist(), strict=True)
            rows.append({token: float(logprobs[row, token])} | dict(best))
        return tuple(rows)
