"""Small stand-ins for parts that are slow or need a model. They keep the contracts of what they stand for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import CanaryReading, Completion, EngineHealth, GenerationRequest, VersionSpan
from lachesis.engines.base import Engine, Finished, PauseMode

Answer = Callable[[GenerationRequest, int], Sequence[int]]


def random_tokens(request: GenerationRequest, index: int) -> list[int]:
    """Between 1 and ``max_tokens`` tokens below 32; equal for equal prompts, seeds and indices."""
    source = random.Random(f"{request.prompt_ids}:{request.seed}:{index}")
    return [source.randrange(32) for _ in range(source.randint(1, request.params.max_tokens))]


class FakeEngine(Engine):
    """An engine whose completions come from a function of the request and the completion's number.

    Every token has the same logprob. ``requests`` holds what was asked for, one list per call.
    """

    def __init__(
        self,
        answer: Answer = random_tokens,
        *,
        logprob: float = -0.5,
        version: int = 0,
        session_id: str = "fake",
    ) -> None:
        self.requests: list[list[GenerationRequest]] = []
        self.version = version
        self._answer = answer
        self._logprob = logprob
        self._session_id = session_id
        self._paused = False
        self._closed = False

    def generate(
        self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Finished | None = None
    ) -> list[list[Completion]]:
        self._check_open()
        if self._paused:
            raise EngineError("the engine is paused")
        self.requests.append(list(requests))
        completions = []
        for index, request in enumerate(requests):
            completions.append([self._complete(request, i) for i in range(request.n)])
            if finished is not None:
                finished(index, completions[-1])
        deadline.check()
        return completions

    def canary(self, token_ids: Sequence[int]) -> CanaryReading:
        """Another logprob for every version."""
        self._check_open()
        logprobs = (-1.0 / (self.version + 2),) * (len(token_ids) - 1)
        return CanaryReading(logprobs=logprobs, version=self.version, session_id=self._session_id)

    def set_version(self, version: int) -> None:
        self._check_open()
        self.version = version

    def health(self) -> EngineHealth:
        self._check_open()
        return EngineHealth(True, self.version, self._session_id, paused=self._paused)

    def pause(self, *, mode: PauseMode = "keep") -> None:
        self._check_open()
        self._paused = True

    def resume(self) -> None:
        self._check_open()
        self._paused = False

    def close(self) -> None:
        self._closed = True

    def _complete(self, request: GenerationRequest, index: int) -> Completion:
        tokens = tuple(self._answer(request, index))[: request.params.max_tokens]
        return Completion(
            token_ids=tokens,
            logprobs=(self._logprob,) * len(tokens),
            finish_reason="length" if len(tokens) == request.params.max_tokens else "stop",
            versions=VersionSpan(self.version, self.version),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
