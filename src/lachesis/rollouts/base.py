"""The contract of a rollout source, which provides scored groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lachesis.common.contracts import contract
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, RewardError
from lachesis.common.types import Group, Prompt

if TYPE_CHECKING:
    from lachesis.plugins.environments.rollout_func import RolloutTrainer


class ResumablePart(ABC):
    """A part of the pipeline with counters, whose state is saved in checkpoints."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Return counts and seconds since the last call (dropped groups, reward errors, seconds of generation, ...)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly, such as position, epoch and counters; JSON-serializable."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def saved(self) -> None:
        """Record that the last returned state is on disk, so that its content need not be kept."""
        return None

    def complete(self) -> None:
        """Record that the run has finished its last step and saved its result; no further calls follow."""
        return None

    def close(self) -> None:
        """Stop all background work. Idempotent."""
        return None


class RolloutSource(ResumablePart):
    """A source of groups whose samples have tokens, sampling logprobs, weight versions and rewards."""

    @abstractmethod
    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Return between 1 and ``count`` groups, with rewards but without advantages.

        Requesting many at once lets an engine batch. A source may return fewer, for example if a group was dropped
        because its reward failed.

        Raises:
            DeadlineExceeded, EngineError, RewardError, DataError.
        """

    def requeue(self, prompts: Sequence[Any]) -> bool:
        """Take prompts back to sample them again later; return False if the source cannot."""
        return False

    @abstractmethod
    def report_version(self, version: int) -> None:
        """Record that the policy is now at ``version``, for sources that throttle by staleness."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn prompt and its request number, from which the seeds of its completions derive."""

    prompt: Prompt
    request: int


def prompt_key(prompt: Prompt) -> str:
    """Return the id of a prompt, which is unique within a source, with the name of the source if it has one."""
    return f"{prompt.source}/{prompt.id}" if prompt.source else prompt.id


# A callback that gets the index of a draw in the call, and its scored group or the reason for dropping it. It may run
# in any thread, so it must be quick; an error that it raises ends the call.
Done = Callable[[int, Group | RewardError], None]


class GroupwiseSource(RolloutSource):
    """A source whose groups are independent: drawn in order, and finished in any order."""

    # True if overlapping calls wait for each other when the engine handles one at a time.
    queues = False

    @abstractmethod
    def draw(self, count: int) -> list[Draw]:
        """Return the next ``count`` prompts and advance the source's position. One thread at a time."""

    @abstractmethod
    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        """Generate and score groups, calling ``done`` for each finished one. Calls may overlap.

        Raises:
            DeadlineExceeded, EngineError, RewardError: for the draws for which ``done`` was not called.
        """


class CustomRollouts(Protocol):
    """The contract of a rollout function, as in TRL; ``plugins/environments/rollout_func.py`` describes its result."""

    def __call__(self, prompts: list[Any], trainer: RolloutTrainer) -> Mapping[str, Any]: ...


ROLLOUTS = contract("rollout function", CustomRollouts, error=EngineError)
