"""The contract of an engine, which generates completions and knows the version of its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lachesis.common.deadline import Deadline
from lachesis.common.types import (
    CanaryReading,
    Completion,
    EngineHealth,
    GenerationRequest,
    Group,
    Prompt,
    Sample,
    SamplingParams,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lachesis.metrics.values import MetricValue

PauseMode = Literal["keep", "drain", "abort"]

# A callback that gets the index of each completed request. It runs in the generating thread, so it must be quick; an
# error that it raises ends the call.
Finished = Callable[[int, list[Completion]], None]


class Engine(ABC):
    """An engine that generates completions.

    It may be a server process, many servers, or a part of the trainer's process.
    """

    @abstractmethod
    def generate(
        self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """Complete every request: ``result[i]`` holds the ``requests[i].n`` completions, in order.

        ``finished`` is called once for each request, as soon as it is complete, while others may still be generated.

        Raises:
            EngineError: the engine cannot serve the call (closed, paused, or a prompt is longer than its context).
            DeadlineExceeded: the deadline passed; no completion of the call is returned.
        """

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        max_tokens: int,
        seed: int = 0,
        timeout_s: float | None = None,
        **params: Any,
    ) -> list[Group]:
        """Return ``n`` completions of each prompt, as groups without texts and rewards.

        Args:
            prompts: token ids.
            seed: equal seeds give equal completions under equal weights.
            timeout_s: time limit of the call, in seconds; none if unset.
            params: further fields of :class:`SamplingParams`, such as ``temperature``.

        Raises:
            EngineError: as :meth:`generate`.
            DeadlineExceeded: not all completions were finished in time.
        """
        asked = SamplingParams(max_tokens=max_tokens, **params)
        requests = [
            GenerationRequest(prompt_ids=tuple(ids), params=asked, n=n, seed=(seed * len(prompts) + number) % 2**63)
            for number, ids in enumerate(prompts)
        ]
        deadline = Deadline(f"sampling of {len(prompts)} prompts x {n} completions", timeout_s)
        answers = self.generate(requests, deadline=deadline)
        return [
            Group(
                prompt=Prompt(id=str(number), token_ids=request.prompt_ids, text=""),
                samples=tuple(_sample(request, completion) for completion in answer),
            )
            for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
        ]

    @abstractmethod
    def canary(self, token_ids: Sequence[int]) -> CanaryReading:
        """Return logprobs of a fixed sequence under the current weights, at temperature 1."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Announce that the current weights are ``version``. Called only by bridges."""

    @abstractmethod
    def health(self) -> EngineHealth:
        """Return the engine's current health without waiting for generation."""

    @abstractmethod
    def pause(self, *, mode: PauseMode = "keep") -> None:
        """Stop generating before weights change. Idempotent."""

    @abstractmethod
    def resume(self) -> None:
        """Resume generation. Idempotent."""

    def metrics(self) -> dict[str, MetricValue]:
        """Return the metrics since the last call; most engines have none."""
        return {}

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which the engine does not use modules that it shares with the trainer, if any."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Release everything.

        Idempotent; later calls of other methods raise EngineError.
        """


def _sample(request: GenerationRequest, completion: Completion) -> Sample:
    return Sample(
        prompt_ids=request.prompt_ids,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        versions=completion.versions,
        routed=completion.routed,
        temperature=1.0 if request.params.greedy else request.params.temperature,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The trained model, around which an engine in the trainer's process is built.

    ``eos_token_ids`` end every completion; ``max_context`` is the maximum of prompt and completion tokens together.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: Sequence[int]
    max_context: int


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Return max |a - b|; NaN if any value is NaN, infinity if the lengths differ."""
    if len(a) != len(b):
        return float("inf")
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return float("nan") if any(d != d for d in differences) else max(differences, default=0.0)
