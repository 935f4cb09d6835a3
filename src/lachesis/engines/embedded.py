"""The embedded engine: generation in the trainer's process, with the trainer's own module."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.deadline import Deadline
from lachesis.engines.base import Engine, PauseMode
from lachesis.engines.decoder import Decoder, ModelTraits, generation_mode
from lachesis.engines.rows import Rows, Share, branch, plan_batches
from lachesis.engines.sampling import RowSampling, draw_uniforms, process_logits, sample
from lachesis.errors import EngineError
from lachesis.types import CanaryReading, Completion, EngineHealth, GenerationRequest, SamplingParams

Decode = Callable[[Sequence[int]], str]


class EmbeddedEngine(Engine):
    """Samples from a causal language model that the trainer goes on training.

    Sequences that begin alike are computed once: a prompt is prefilled once for its ``n`` completions, and
    these share one row of the batch until they differ. Rows leave when all their sequences have ended. The
    model runs in evaluation mode without gradients (see :func:`generation_mode`) and uses its KV cache, also
    with gradient checkpointing on in training.

    Any causal model of transformers works. Those with recurrent layers (Mamba) batch only prompts of equal
    length; those whose cache cannot be picked apart by row (RecurrentGemma, xLSTM, encoder-decoder caches)
    or that have none (GPT) compute every sequence from its start at every token.

    Threads: one call generates at a time. ``pause`` and ``close`` may come from other threads.

    Args:
        model: causal language model, or a peft model around one.
        eos_token_ids: tokens that end every completion.
        pad_token_id: filler of shorter prompts; masked.
        max_batch_size: most sequences decoded at the same time.
        max_context: most tokens of prompt and completion together.
        decode: token ids to text; needed for ``stop`` strings only.
        session_id: who this engine is in canary readings; random if unset.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        max_batch_size: int,
        max_context: int,
        decode: Decode | None = None,
        session_id: str | None = None,
    ) -> None:
        self._model: PreTrainedModel | PeftModel | None = model
        self._traits = ModelTraits.of(model)
        self._eos_token_ids = tuple(eos_token_ids)
        self._pad_token_id = pad_token_id
        self._max_batch_size = max_batch_size
        self._max_context = max_context
        self._decode = decode
        self._session_id = session_id or uuid.uuid4().hex
        self._version = 0
        self._paused = self._closed = self._abort = False
        # Reentrant, so that a signal handler that pauses or closes does not wait for the call it interrupted.
        self._busy = threading.RLock()

    def generate(self, requests: Sequence[GenerationRequest], *, deadline: Deadline) -> list[list[Completion]]:
        """See :meth:`Engine.generate`. The end token is part of ``token_ids``, and so has a logprob.

        Raises:
            EngineError: closed, paused, a request that cannot be sampled, or logits that are not finite.
            DeadlineExceeded: checked at every decoding step.
        """
        with self._serving(deadline) as model:
            for i, request in enumerate(requests):
                self._check_request(i, request)
            results: list[list[Completion]] = [[] for _ in requests]
            with generation_mode(model):
                for shares in plan_batches(
                    requests, max_rows=self._max_batch_size, equal_lengths=not self._traits.pads
                ):
                    progress = (sum(map(len, results)), sum(request.n for request in requests))
                    rows = self._run(model, shares, deadline=deadline, progress=progress)
                    for share, completions in zip(shares, rows.completions(), strict=True):
                        results[share.index].extend(completions)
            return results

    def canary(self, token_ids: Sequence[int]) -> CanaryReading:
        """See :meth:`Engine.canary`. Half of the sequence is prefilled, the rest goes through the KV cache.

        Works while paused.

        Raises:
            EngineError: closed, or fewer than two tokens, or tokens that the model does not know.
        """
        with self._busy:
            model = self._open_model()
            if len(token_ids) < 2:
                raise EngineError(
                    f"a canary of {len(token_ids)} tokens has no logprob",
                    remedy="give at least two tokens",
                )
            self._check_tokens("the canary", token_ids)
            with generation_mode(model):
                logprobs = self._score(model, list(token_ids)).tolist()
            return CanaryReading(tuple(logprobs), version=self._version, session_id=self._session_id)

    def set_version(self, version: int) -> None:
        """See :meth:`Engine.set_version`."""
        self._open_model()
        self._version = version

    def health(self) -> EngineHealth:
        """See :meth:`Engine.health`."""
        self._open_model()
        return EngineHealth(
            ready=not self._paused,
            version=self._version,
            session_id=self._session_id,
            paused=self._paused,
            detail="paused" if self._paused else "",
        )

    def pause(self, *, mode: PauseMode = "keep") -> None:
        """Refuse new calls, and return when none is running.

        ``keep`` and ``drain`` are the same here: what another thread is generating is finished first.
        ``abort`` ends it at its next token; what is unfinished gets the finish reason ``abort``.
        """
        self._open_model()
        self._paused = True
        self._abort = mode == "abort"
        with self._busy:
            pass

    def resume(self) -> None:
        """See :meth:`Engine.resume`."""
        self._open_model()
        self._paused = self._abort = False

    def close(self) -> None:
        """Let go of the model. A call that is still running in another thread ends with EngineError."""
        self._closed = True
        with self._busy:
            self._model = None

    def _run(
        self,
        model: PreTrainedModel | PeftModel,
        shares: Sequence[Share],
        *,
        deadline: Deadline,
        progress: tuple[int, int],
    ) -> Rows:
        """Generate one batch. ``live`` [R] are rows still growing, ``node`` [R] the decoder's row of each."""
        done, total = progress
        device = model.device
        rows = Rows(shares, end_token_ids=self._eos_token_ids, decode=self._decode, version=self._version)
        if self._abort:
            return rows
        prompts = [share.request.prompt_ids for share in shares]
        params = [share.request.params for share in shares]
        uniforms = _draw(shares, rows.max_tokens)
        live, node = rows.all, rows.share
        decoder = Decoder(model, traits=self._traits, prompts=prompts, pad_token_id=self._pad_token_id)
        logits = decoder.prefill()
        sampling = RowSampling.of(params, vocab_size=logits.shape[-1], device=device)
        seen = _seen_tokens(prompts, logits) if sampling.repetition_penalty is not None else None
        for step in range(rows.max_tokens):
            self._check_running()
            tokens, logprobs = _sample_rows(
                process_logits(logits, sampling, seen=seen), node, uniforms[live, step], sampling=sampling
            )
            if not np.isfinite(logprobs).all():
                raise EngineError(
                    f"the model's logits are not finite at completion token {step + 1}",
                    remedy="the weights have NaN or infinite values: lower the learning rate or resume earlier",
                )
            growing = rows.record(live, step=step, tokens=tokens, logprobs=logprobs, version=self._version)
            live, node, tokens = live[growing], node[growing], tokens[growing]
            if live.size == 0 or self._abort:
                break
            deadline.check(f"{done + len(rows.all) - live.size} of {total} sequences finished")
            parents, inputs, node = branch(
                node, tokens, width=logits.shape[0], vocab_size=logits.shape[1], filler=self._pad_token_id
            )
            fed = torch.from_numpy(inputs).to(device)
            if parents is not None:
                picked = torch.from_numpy(parents).to(device)
                decoder.fork(picked)
                sampling = sampling.take(picked)
                seen = None if seen is None else seen.index_select(0, picked)
            if seen is not None:
                seen.scatter_(1, fed[:, None], True)
            logits = decoder.step(fed)
        return rows

    def _score(self, model: PreTrainedModel | PeftModel, token_ids: list[int]) -> Tensor:
        """Logprobs [T - 1] of ``token_ids`` [T] after the first, by the code that generates."""
        split = len(token_ids) // 2
        decoder = Decoder(model, traits=self._traits, prompts=[token_ids[:split]], pad_token_id=self._pad_token_id)
        logits = [decoder.prefill(last_only=False)]
        decoder.fork(torch.zeros(1, dtype=torch.int64, device=model.device))
        if rest := token_ids[split:-1]:
            logits.append(decoder.extend(torch.tensor([rest], device=model.device)))
        logprobs = torch.cat(logits, dim=1)[0].float().log_softmax(-1)
        targets = torch.tensor(token_ids[1:], device=model.device)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1)

    @contextmanager
    def _serving(self, deadline: Deadline) -> Iterator[PreTrainedModel | PeftModel]:
        """The right to generate, once no other call does."""
        remaining = deadline.remaining_s()
        if not self._busy.acquire(timeout=-1 if remaining is None else remaining):
            deadline.check("another call is still generating")
            raise EngineError("another call is still generating", remedy="wait for it, or raise the deadline")
        try:
            model = self._open_model()
            if self._paused:
                raise EngineError(
                    "the embedded engine is paused and generates nothing",
                    remedy="resume it after the weights have changed",
                )
            yield model
        finally:
            self._busy.release()

    def _open_model(self) -> PreTrainedModel | PeftModel:
        if self._closed or self._model is None:
            raise EngineError("the embedded engine is closed", remedy="make a new engine")
        return self._model

    def _check_running(self) -> None:
        if self._closed:
            raise EngineError("the embedded engine was closed while it generated", remedy="close it after generating")

    def _check_request(self, index: int, request: GenerationRequest) -> None:
        """Raise EngineError for a request that cannot be sampled; ``index`` is its place in the call."""
        where, params = f"request {index}", request.params
        self._check_tokens(f"the prompt of {where}", request.prompt_ids)
        length = len(request.prompt_ids)
        if length + params.max_tokens > self._max_context:
            raise EngineError(
                f"{where} has a prompt of {length} tokens and asks for {params.max_tokens} more, but the "
                f"context holds {self._max_context}",
                remedy="shorten the prompt or lower sampling.max_completion_length",
            )
        if wrong := _wrong_parameter(request.n, params):
            raise EngineError(f"{where} has {wrong}", remedy="correct the sampling parameters")
        if params.stop and self._decode is None:
            raise EngineError(
                f"{where} has stop strings, but this engine has no tokenizer to find them with",
                remedy="give the engine `decode`, or use stop_token_ids",
            )

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise EngineError(f"{what} is empty", remedy="begin it with at least one token")
        if min(token_ids) < 0 or max(token_ids) >= self._traits.vocab_size:
            raise EngineError(
                f"{what} has token ids outside of 0 to {self._traits.vocab_size - 1}",
                remedy="use the tokenizer that belongs to the model",
            )
        if len(token_ids) > self._max_context:
            raise EngineError(
                f"{what} has {len(token_ids)} tokens, but the context holds {self._max_context}",
                remedy="shorten it",
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
        "an empty stop string": all(params.stop),
    }
    return next((wrong for wrong, right in checks.items() if not right), "")


def _draw(shares: Sequence[Share], steps: int) -> np.ndarray:
    """Uniforms [rows, steps] of all completions of the shares; see :func:`draw_uniforms`."""
    keys = [(share.request.seed, j) for share in shares for j in range(share.first, share.first + share.count)]
    return draw_uniforms(keys, steps)


def _seen_tokens(prompts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """bool [N, V] on the device of ``logits`` [N, V]: which tokens each prompt has."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    return seen.to(logits.device)


def _sample_rows(
    logprobs: Tensor, node: np.ndarray, uniforms: np.ndarray, *, sampling: RowSampling
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logprobs [R] of rows that draw from distributions ``node`` [R] of ``logprobs`` [N, V]."""
    device = logprobs.device
    # Past its last fork the batch has one sequence to a row, in order: nothing to pick.
    if node.size != logprobs.shape[0] or not np.array_equal(node, np.arange(node.size)):
        picked = torch.from_numpy(node).to(device)
        logprobs = logprobs.index_select(0, picked)
        greedy = None if sampling.greedy is None else sampling.greedy.index_select(0, picked)
    else:
        greedy = sampling.greedy
    drawn = None if sampling.all_greedy else torch.from_numpy(uniforms).to(device)
    tokens, chosen = sample(logprobs, drawn, greedy=greedy)
    return tokens.cpu().numpy(), chosen.cpu().numpy()
