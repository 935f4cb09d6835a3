"""The contract of an engine: it turns prompts into completions under weights whose version it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from lachesis.deadline import Deadline
from lachesis.types import CanaryReading, Completion, EngineHealth, GenerationRequest

PauseMode = Literal["keep", "drain", "abort"]


class Engine(ABC):
    """Generates completions. One engine may be a process of its own, many servers, or part of the trainer."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], *, deadline: Deadline) -> list[list[Completion]]:
        """Complete every request: ``result[i]`` holds the ``requests[i].n`` completions, in order.

        Raises:
            EngineError: the engine cannot serve (closed, paused, a prompt longer than its context).
            DeadlineExceeded: the deadline passed; nothing of the call is returned.
        """

    @abstractmethod
    def canary(self, token_ids: Sequence[int]) -> CanaryReading:
        """Logprobs of a fixed sequence under the current weights, at temperature 1."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Announce that the current weights are those of ``version``. Called by bridges only."""

    @abstractmethod
    def health(self) -> EngineHealth:
        """A snapshot; never blocks on generation."""

    @abstractmethod
    def pause(self, *, mode: PauseMode = "keep") -> None:
        """Stop generating before weights change. Idempotent."""

    @abstractmethod
    def resume(self) -> None:
        """Generate again. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent; later calls of other methods raise EngineError."""
