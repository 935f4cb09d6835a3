"""The embedded engine: generation in the trainer's process with the trainer's own model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import (
    CanaryReading,
    Completion,
    EngineHealth,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from lachesis.engines.base import Engine, Finished, PauseMode
from lachesis.engines.embedded.decoder import Decoder, ModelTraits, generation_mode
from lachesis.engines.embedded.experts import stacked_experts
from lachesis.engines.embedded.gate import TokenGate
from lachesis.engines.embedded.route_recorder import RoutedPasses, RouteRecorder
from lachesis.engines.embedded.rows import BatchRows, Share, branch, plan_batches
from lachesis.engines.embedded.sampling import (
    Histories,
    RowSampling,
    draw_uniforms,
    process_logits,
    sample,
)

if TYPE_CHECKING:
    from peft import PeftModel

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Step:
    """A decoding step, which adds a token to L sequences.

    ``requests`` and ``completions`` [L] identify the sequences, as indices into the call and into a request's ``n``;
    ``token_ids`` and ``logprobs`` [L] are the sampled tokens; ``reasons`` [L] are finish reasons, ``None`` if a
    sequence continues. If requested, ``routed`` [L] are the experts of sequences that end, and ``top_ids`` and
    ``top_logprobs`` [L, K] the likeliest tokens.
    """

    requests: np.ndarray
    completions: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    reasons: Sequence[FinishReason | None]
    routed: Sequence[RoutedExperts | None]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


# A callback for each step, in the generating thread; it returns the requests whose clients are gone.
Listener = Callable[[Step], Collection[int]]


class EmbeddedEngine(Engine):
    """An engine in the trainer's process that samples from the model being trained.

    Common prefixes are computed once: a prompt is prefilled once for its ``n`` completions, which share one row of the
    batch until they differ. Rows are dropped when all their sequences have ended. The model runs in evaluation mode
    without gradients (see :func:`generation_mode`) and uses its KV cache, even if training uses gradient checkpointing.

    Any causal model of transformers works. Models with recurrent layers (Mamba) batch only prompts of equal length;
    models without a cache (GPT) or whose cache rows cannot be selected (RecurrentGemma, xLSTM, encoder-decoder caches)
    recompute every sequence from its start at every token.

    Threads: one call generates at a time. Other methods may be called from other threads; if they need the model, they
    get it between two tokens.

    Args:
        model: causal language model, or a peft model around one.
        eos_token_ids: tokens that end every completion.
        pad_token_id: padding for shorter prompts; masked.
        max_batch_size: maximum number of sequences decoded at once.
        max_context: maximum number of tokens of prompt and completion together.
        decode: converts token ids to text; needed only for ``stop`` strings.
        session_id: name of this engine in canary readings; random if unset.
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
        self._recorder = RouteRecorder(model) if stacked_experts(model) else None
        self._eos_token_ids = tuple(eos_token_ids)
        self._pad_token_id = pad_token_id
        self._max_batch_size = max_batch_size
        self._max_context = max_context
        self._decode = decode
        self._session_id = session_id or uuid.uuid4().hex
        self._version = 0
        self.gate = TokenGate()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        deadline: Deadline,
        finished: Finished | None = None,
        listener: Listener | None = None,
        top_logprobs: int = 0,
    ) -> list[list[Completion]]:
        """See :meth:`Engine.generate`. The end token is part of ``token_ids`` and has a logprob.

        Args:
            requests: the requests to complete.
            deadline: the deadline, checked at every decoding step.
            finished: called for each complete request, between two tokens of the others.
            listener: called for every decoding step.
            top_logprobs: number of likeliest tokens that the listener gets at each step.

        Raises:
            EngineError: closed, paused, a request that cannot be sampled, or logits that are not finite.
            DeadlineExceeded: the deadline passed.
        """
        with self.gate.generating(deadline), ExitStack() as mode:
            model = self._open_model()
            for i, request in enumerate(requests):
                self.check(request, where=f"request {i}")
            results: list[list[Completion]] = [[] for _ in requests]
            total = sum(request.n for request in requests)
            call = _Call(model, deadline, mode, listener, top_logprobs, finished, total=total)
            call.recorder = self._recorder if any(one.params.routed_experts for one in requests) else None
            mode.enter_context(call.generating())
            for shares in plan_batches(requests, max_rows=self._max_batch_size, equal_lengths=not self._traits.pads):
                rows = self._run(call, shares)
                call.done += len(rows.all)
                for share, completions in zip(shares, rows.completions(), strict=True):
                    results[share.index].extend(completions)
                    call.finish(share, results[share.index])
            return results

    def check(self, request: GenerationRequest, *, where: str = "the request") -> None:
        """Raise EngineError for an invalid request; ``where`` names it in the message, as in "request 3"."""
        params = request.params
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
        if params.routed_experts and self._recorder is None:
            raise EngineError(
                f"{where} asks for routed experts, but the model is not a mixture of experts",
                remedy="set algorithm.router_replay: false",
            )
        if self._decode is None and params.stop:
            raise EngineError(
                f"{where} has stop strings, but this engine has no tokenizer to find them",
                remedy="give the engine `decode`, or use stop_token_ids",
            )
        if params.guided_regex is not None:
            raise EngineError(
                f"{where} has a regular expression, which the embedded engine does not support",
                remedy="leave out sampling.guided_regex, or use vLLM",
            )

    def canary(self, token_ids: Sequence[int]) -> CanaryReading:
        """See :meth:`Engine.canary`. Half of the sequence is prefilled, the rest decoded with the KV cache.

        Works while paused, and between two tokens of a call that generates.

        Raises:
            EngineError: the engine is closed, there are fewer than two tokens, or a token is not in the vocabulary.
        """
        if len(token_ids) < 2:
            self._open_model()
            raise EngineError(f"a canary of {len(token_ids)} tokens is too short", remedy="give at least two tokens")
        logprobs = self.score("the canary", token_ids)
        targets = torch.tensor(token_ids[1:], device=logprobs.device)
        read = logprobs.gather(-1, targets[:, None]).squeeze(-1).tolist()
        return CanaryReading(tuple(read), version=self._version, session_id=self._session_id)

    def score(self, what: str, token_ids: Sequence[int]) -> Tensor:
        """Return logprobs [T - 1, V], at temperature 1, of the token after each of ``token_ids`` [T] but the last.

        Uses the code for generation. ``what`` names the sequence in errors.
        """
        with self.exclusive() as model:
            self._check_tokens(what, token_ids)
            with generation_mode(model):
                return self._score(model, list(token_ids))

    @contextmanager
    def exclusive(self) -> Iterator[PreTrainedModel | PeftModel]:
        """Yield the model for exclusive reading or changing; generation continues afterwards. Works while paused."""
        with self.gate.guest():
            yield self._open_model()

    def set_version(self, version: int) -> None:
        self._open_model()
        self._version = version

    def health(self) -> EngineHealth:
        self._open_model()
        return EngineHealth(
            ready=not self.gate.paused,
            version=self._version,
            session_id=self._session_id,
            paused=self.gate.paused,
            detail="paused" if self.gate.paused else "",
        )

    def pause(self, *, mode: PauseMode = "keep") -> None:
        """Refuse new calls, and return once no call computes any more.

        ``keep`` holds a running call of another thread between two tokens until :meth:`resume`; ``drain`` lets it
        finish; ``abort`` ends it at its next token, with the finish reason ``abort``.
        """
        self._open_model()
        self.gate.begin_pause(mode)
        self.gate.wait_for_pause(mode)

    def resume(self) -> None:
        self._open_model()
        self.gate.resume()

    def close(self) -> None:
        """Release the model. A call that is still running in another thread ends with EngineError."""
        self.gate.close()
        self._model = None

    def _run(self, call: _Call, shares: Sequence[Share]) -> BatchRows:
        """Generate one batch. ``live`` [R] are the rows still growing, ``node`` [R] their decoder rows."""
        model, device = call.model, call.model.device
        self._give_way(call)
        rows = BatchRows(shares, end_token_ids=self._eos_token_ids, decode=self._decode, version=self._version)
        if self.gate.aborting:
            return rows
        params = [share.request.params for share in shares]
        keys = [(share.request.seed, j) for share in shares for j in range(share.first, share.first + share.count)]
        uniforms = draw_uniforms(keys, rows.max_tokens)
        live, node = rows.all, rows.share
        prompts = [share.request.prompt_ids for share in shares]
        images = [share.request.images for share in shares]
        decoder = Decoder(model, traits=self._traits, prompts=prompts, pad_token_id=self._pad_token_id, images=images)
        recorder = self._recorder if any(one.routed_experts for one in params) else None
        passes = RoutedPasses(decoder, rows, shares, recorder=recorder)
        logits = passes.prefill()
        sampling = RowSampling.of(params, vocab_size=logits.shape[-1], device=device)
        histories = Histories(shares, sampling=sampling, logits=logits, end_token_ids=self._eos_token_ids)
        for step in range(rows.max_tokens):
            banned = histories.banned(node, length=step)
            distributions = process_logits(
                logits, sampling, seen=histories.seen, counts=histories.counts, banned=banned
            )
            tokens, logprobs = _sample_rows(distributions, node, uniforms[live, step], sampling=sampling)
            _check_finite(logprobs, step=step)
            growing = rows.record(live, step=step, tokens=tokens, logprobs=logprobs, version=self._version)
            if call.listener is not None:
                growing &= call.tell(rows, live, tokens, logprobs, distributions=distributions, node=node)
            ended, live, node, tokens = live[~growing], live[growing], node[growing], tokens[growing]
            call.finish_rows(rows, ended, live)
            if live.size == 0 or self.gate.aborting:
                break
            call.check_time(rows, ended, live)
            # Between a token and its forward pass, so that a token has the version of its logits.
            self._give_way(call)
            if self.gate.aborting:
                break
            parents, inputs, node = branch(
                node, tokens, width=logits.shape[0], vocab_size=logits.shape[1], filler=self._pad_token_id
            )
            fed = torch.from_numpy(inputs).to(device)
            if parents is not None:
                picked = torch.from_numpy(parents).to(device)
                decoder.fork(picked)
                sampling = sampling.take(picked)
                histories.fork(parents, picked)
            histories.append(fed)
            logits = passes.step(fed, live=live, node=node, step=step)
        return rows

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        """Raise EngineError for a sequence that is empty, too long, or has tokens outside the vocabulary."""
        if not token_ids:
            raise EngineError(f"{what} is empty", remedy="begin it with at least one token")
        if min(token_ids) < 0 or max(token_ids) >= self._traits.vocab_size:
            raise EngineError(
                f"{what} has token ids outside the range 0 to {self._traits.vocab_size - 1}",
                remedy="use the tokenizer that belongs to the model",
            )
        if len(token_ids) > self._max_context:
            raise EngineError(
                f"{what} has {len(token_ids)} tokens, but the context holds {self._max_context}", remedy="shorten it"
            )

    def _give_way(self, call: _Call) -> None:
        self.gate.between_tokens(call.deadline, mode=call.mode, enter=call.generating)

    def _score(self, model: PreTrainedModel | PeftModel, token_ids: list[int]) -> Tensor:
        split = max(1, len(token_ids) // 2)
        decoder = Decoder(model, traits=self._traits, prompts=[token_ids[:split]], pad_token_id=self._pad_token_id)
        logits = [decoder.prefill(last_only=False)]
        decoder.fork(torch.zeros(1, dtype=torch.int64, device=model.device))
        if rest := token_ids[split:-1]:
            logits.append(decoder.extend(torch.tensor([rest], device=model.device)))
        return torch.cat(logits, dim=1)[0, : len(token_ids) - 1].float().log_softmax(-1)

    def _open_model(self) -> PreTrainedModel | PeftModel:
        self.gate.check_open()
        assert self._model is not None
        return self._model


@dataclass(slots=True)
class _Call:
    """A call of ``generate``, with the state that its batches share. ``done`` of ``total`` sequences have ended."""

    model: PreTrainedModel | PeftModel
    deadline: Deadline
    mode: ExitStack
    listener: Listener | None
    top_logprobs: int
    finished: Finished | None
    total: int
    recorder: RouteRecorder | None = None
    done: int = 0
    told: set[int] = field(default_factory=set)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Put the model into generation mode, with hooks on its experts if they are recorded."""
        with generation_mode(self.model), nullcontext() if self.recorder is None else self.recorder.attached():
            yield

    def finish(self, share: Share, completions: list[Completion]) -> None:
        """Report the share's request as finished, once, if these are all of its completions."""
        if self.finished is not None and share.index not in self.told and len(completions) == share.request.n:
            self.told.add(share.index)
            self.finished(share.index, completions)

    def finish_rows(self, rows: BatchRows, ended: np.ndarray, live: np.ndarray) -> None:
        """Report requests completed by the end of the rows ``ended``; the rows ``live`` still grow."""
        if self.finished is not None and ended.size:
            for share, completions in rows.complete(ended, live):
                self.finish(share, completions)

    def check_time(self, rows: BatchRows, ended: np.ndarray, live: np.ndarray) -> None:
        """Raise DeadlineExceeded if the deadline passed; the message counts the rows that ``ended``."""
        self.deadline.check(f"{self.done + len(rows.all) - live.size} of {self.total} sequences finished")
        if ended.size:
            self.deadline.progressed()

    def tell(
        self,
        rows: BatchRows,
        live: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        *,
        distributions: Tensor,
        node: np.ndarray,
    ) -> np.ndarray:
        """Call the listener for a step of the rows ``live`` [L]; return bool [L], False for rows without a client."""
        assert self.listener is not None
        top_ids = top_logprobs = None
        if self.top_logprobs:
            top = distributions.topk(min(self.top_logprobs, distributions.shape[-1]), dim=-1)
            top_ids, top_logprobs = top.indices.cpu().numpy()[node], top.values.cpu().numpy()[node]
        dropped = self.listener(
            Step(
                requests=rows.request[live],
                completions=rows.completion[live],
                token_ids=tokens,
                logprobs=logprobs,
                reasons=rows.reasons(live),
                routed=rows.routed_of(live),
                top_ids=top_ids,
                top_logprobs=top_logprobs,
            )
        )
        return ~np.isin(rows.request[live], list(dropped))


def _check_finite(logprobs: np.ndarray, *, step: int) -> None:
    """Raise EngineError if a logprob of the tokens of a step is not finite."""
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"the model's logits are not finite at completion token {step + 1}",
            remedy="the weights have NaN or infinite values: lower the learning rate or resume earlier",
        )


def _sample_rows(
    logprobs: Tensor, node: np.ndarray, uniforms: np.ndarray, *, sampling: RowSampling
) -> tuple[np.ndarray, np.ndarray]:
    """Sample tokens and logprobs [R] of rows from the distributions ``node`` [R] of ``logprobs`` [N, V]."""
    device = logprobs.device
    # After the last fork each row has one sequence, in order: nothing to select.
    if node.size != logprobs.shape[0] or not np.array_equal(node, np.arange(node.size)):
        picked = torch.from_numpy(node).to(device)
        logprobs = logprobs.index_select(0, picked)
        greedy = None if sampling.greedy is None else sampling.greedy.index_select(0, picked)
    else:
        greedy = sampling.greedy
    drawn = None if sampling.all_greedy else torch.from_numpy(uniforms).to(device)
    tokens, chosen = sample(logprobs, drawn, greedy=greedy)
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _wrong_parameter(n: int, params: SamplingParams) -> str:
    """Describe the first parameter that is out of range; return an empty text if all are valid."""
    checks = {
        f"n = {n} (must be at least 1)": n >= 1,
        f"max_tokens = {params.max_tokens} (must be at least 1)": params.max_tokens >= 1,
        f"temperature = {params.temperature} (must be finite, at least 0)": 0 <= params.temperature < float("inf"),
        f"top_p = {params.top_p} (must be above 0 and at most 1)": 0 < params.top_p <= 1,
        f"top_k = {params.top_k} (must be at least 0)": params.top_k >= 0,
        f"min_p = {params.min_p} (must be from 0 to 1)": 0 <= params.min_p <= 1,
        f"repetition_penalty = {params.repetition_penalty} (must be above 0)": params.repetition_penalty > 0,
        f"min_tokens = {params.min_tokens} (must be from 0 to max_tokens)": 0 <= params.min_tokens <= params.max_tokens,
        f"presence_penalty = {params.presence_penalty} (must be from -2 to 2)": -2 <= params.presence_penalty <= 2,
        f"frequency_penalty = {params.frequency_penalty} (must be from -2 to 2)": -2 <= params.frequency_penalty <= 2,
        "an empty stop string": all(params.stop),
    }
    return next((wrong for wrong, right in checks.items() if not right), "")
