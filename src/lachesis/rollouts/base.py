"""The contract of a rollout source: where scored groups come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.types import Group


class RolloutSource(ABC):
    """Yields groups whose samples carry tokens, behaviour logprobs, weight versions and rewards."""

    @abstractmethod
    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Between 1 and ``count`` groups, with rewards set and advantages not yet.

        Asking for many at once lets an engine batch; a source may give fewer, for example where a group was
        dropped because its reward failed.

        Raises:
            DeadlineExceeded, EngineError, RewardError, DataError.
        """

    def requeue(self, prompts: Sequence[Any]) -> bool:
        """Take prompts back to sample them again later; False where the source cannot."""
        return False

    @abstractmethod
    def report_version(self, version: int) -> None:
        """The policy moved on to ``version``; sources that throttle by staleness need to know."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Counts since the last call (dropped groups, reward errors, seconds spent generating, ...)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly: data position, epoch, sampling counters. JSON-serializable."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""

    def close(self) -> None:
        """Stop whatever runs in the background. Idempotent."""
        return None
