"""Sampling with saved weights: an engine around the base model, and the adapters that are loaded for it."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import CheckpointError, LachesisError
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.plugins.tinker.adapters import AdapterBank
from lachesis.plugins.tinker.records import LoraShape, Sampled, SampleRequest

# Adapters that are attached to the model only to sample with them; those used last stay.
_LOADED = 4
# The pair that means "no token" to clients in a row of likeliest tokens.
NO_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True)
class Weights:
    """An adapter to sample with; the same ``key`` means the same shape and tensors, which ``read`` gives.

    ``has_head`` returns True if it adapts the output layer.
    """

    key: str
    read: Callable[[], tuple[LoraShape, Mapping[str, Tensor]]]
    has_head: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Prepared:
    """An adapter in files, and the trainer's logprobs [T - 1] of a text with it."""

    directory: Path
    logprobs: tuple[float, ...]


class Sampler:
    """Samples in the worker's thread, requests for the same weights together."""

    def __init__(self, engine: EmbeddedEngine, bank: AdapterBank) -> None:
        self._engine = engine
        self._bank = bank
        self._loaded: OrderedDict[str, str] = OrderedDict()

    def check(self, request: SampleRequest) -> None:
        """Raise EngineError for a request that cannot be sampled."""
        self._engine.check(request.generation)

    def sample(self, weights: Weights | None, requests: Sequence[SampleRequest]) -> list[Sampled | LachesisError]:
        """Sample for each request, with an adapter or without; return the error of a failed one in its place."""
        with self._bank.active(None if weights is None else self._adapter(weights)):
            try:
                return self._together(requests)
            except LachesisError as error:
                if len(requests) == 1:
                    return [error]
            # A failed request must not fail the others.
            return [self._alone(request) for request in requests]

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the ``count`` likeliest tokens after a prompt by the base model, fewer if the text ends."""
        params = SamplingParams(max_tokens=count, temperature=0.0)
        deadline = Deadline("writing the canary", None)
        with self._bank.active(None):
            return self._engine.generate([GenerationRequest(tuple(prompt), params)], deadline=deadline)[0][0].token_ids

    def logprobs(self, weights: Weights | None, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprobs [T - 1] of the tokens of a text but the first, with an adapter or without."""
        with self._bank.active(None if weights is None else self._adapter(weights)):
            return self._engine.canary(token_ids).logprobs

    def prepare(self, weights: Weights, *, directory: Path, canary: Sequence[int]) -> Prepared:
        """Write an adapter as peft does into a new directory below ``directory``, and score the canary with it."""
        logprobs = self.logprobs(weights, canary)
        target = directory / uuid.uuid4().hex
        try:
            target.mkdir(parents=True)
            name = self._adapter(weights)
            save_file(self._bank.tensors(name), target / "adapter_model.safetensors")
            self._bank.config(name).save_pretrained(str(target))
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error}", remedy="free some disk space") from error
        return Prepared(target, logprobs)

    def _alone(self, request: SampleRequest) -> Sampled | LachesisError:
        try:
            return self._together([request])[0]
        except LachesisError as error:
            return error

    def _together(self, requests: Sequence[SampleRequest]) -> list[Sampled | LachesisError]:
        deadline = Deadline(f"sampling of {len(requests)} requests", None)
        completions = self._engine.generate([request.generation for request in requests], deadline=deadline)
        return [Sampled(found, *self._of_prompt(request)) for request, found in zip(requests, completions, strict=True)]

    def _of_prompt(self, request: SampleRequest) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Return the logprobs [P] of the prompt's tokens, and the K likeliest tokens [P, K] at each place."""
        ids = request.generation.prompt_ids
        scored, top = request.prompt_logprobs, request.top_prompt_logprobs
        if not scored and not top:
            return None, None, None
        logprobs = np.full(len(ids), np.nan, dtype=np.float32)
        top_ids = np.zeros((len(ids), top), dtype=np.int32)
        top_logprobs = np.full((len(ids), top), NO_LOGPROB, dtype=np.float32)
        # Nothing comes before the first token.
        first = max(1, len(ids) - scored) if scored else 1
        if first < len(ids):
            rows = self._engine.score("the prompt", ids)[first - 1 :].float()
            targets = torch.tensor(ids[first:], device=rows.device)
            logprobs[first:] = rows.gather(-1, targets[:, None]).squeeze(-1).cpu().numpy()
            best = rows.topk(min(top, rows.shape[-1]), dim=-1)
            top_ids[first:, : best.indices.shape[1]] = best.indices.cpu().numpy()
            top_logprobs[first:, : best.values.shape[1]] = best.values.cpu().numpy()
        return (logprobs if scored else None), (top_ids if top else None), (top_logprobs if top else None)

    def _adapter(self, weights: Weights) -> str:
        if weights.key not in self._loaded:
            self._loaded[weights.key] = self._bank.add(*weights.read())
        self._loaded.move_to_end(weights.key)
        while len(self._loaded) > _LOADED:
            self._bank.remove(self._loaded.popitem(last=False)[1])
        return self._loaded[weights.key]
