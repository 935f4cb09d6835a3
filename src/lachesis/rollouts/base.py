"""The contract of a rollout source: where scored groups come from."""

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
    """Part of the pipeline that counts, and whose state a checkpoint has."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Return counts and seconds since the last call (dropped groups, reward errors, seconds of generation, ...)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to resume exactly, such as position, epoch and counters; JSON-serializable."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def saved(self) -> None:
        """Record that the last state taken is on disk, so that what it contains need not be kept."""
        return None

    def complete(self) -> None:
        """Record that the run has done its last step and saved its result; nothing is asked for afterwards."""
        return None

    def close(self) -> None:
        """Stop all background work. Idempotent."""
        return None


class RolloutSource(ResumablePart):
    """Source of groups whose samples carry tokens, behaviour logprobs, weight versions and rewards."""

    @abstractmethod
    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Return between 1 and ``count`` groups, with rewards set and advantages not yet.

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
        """Note that the policy is now at ``version``, for sources that throttle by staleness."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt whose turn has come, and the number of its request, from which the seeds of its completions derive."""

    prompt: Prompt
    request: int


def prompt_key(prompt: Prompt) -> str:
    """Return the id of a prompt, which is unique within a source, with the name of the source if it has one."""
    return f"{prompt.source}/{prompt.id}" if prompt.source else prompt.id


# Is told of a draw, by its place in the call: the scored group, or why its group was dropped. In any thread, so it has
# to be quick; what it raises ends the call.
Done = Callable[[int, Group | RewardError], None]


class GroupwiseSource(RolloutSource):
    """A source whose groups are independent: drawn in order, and finished in any order."""

    # True if calls that overlap wait for each other where the engine takes one at a time.
    queues = False

    @abstractmethod
    def draw(self, count: int) -> list[Draw]:
        """Return the next ``count`` prompts and move the source's position past them. One thread at a time."""

    @abstractmethod
    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        """Generate and score groups, and tell ``done`` of each once it is. Calls may overlap.

        Raises:
            DeadlineExceeded, EngineError, RewardError: for the draws that ``done`` was not told of.
        """


class CustomRollouts(Protocol):
    """Contract of a rollout function, as TRL's; ``plugins/environments/rollout_func.py`` describes its result."""

    def __call__(self, prompts: list[Any], trainer: RolloutTrainer) -> Mapping[str, Any]: ...


ROLLOUTS = contract("rollout function", CustomRollouts, error=EngineError)
