"""From a source to the groups of one batch: refilling, and prompts that get another try later."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError
from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.types import Group, Prompt
from lachesis.pipeline.filters import failed_entirely, has_signal
from lachesis.rollouts.base import RolloutSource


@dataclass(eq=False)
class Collector:
    """Takes groups from a source until a batch is full. One thread at a time.

    Args:
        refill_rounds: how often groups without signal are put aside and others sampled in their place; what is
            still missing after that is filled up with those put aside.
        reroll: prompts that failed entirely, to be tried again; ``None`` tries none again.
    """

    source: RolloutSource
    count: int
    refill_rounds: int = 0
    reroll: Reroll | None = None
    signal: Callable[[Group], bool] = has_signal
    _counts: Counter[str] = field(default_factory=Counter[str], init=False)

    def collect(self, *, deadline: Deadline) -> list[Group]:
        """The groups of the next batch.

        Raises:
            DeadlineExceeded, EngineError, RewardError, DataError: as the source does.
        """
        self.requeue()
        groups: list[Group] = []
        aside: list[Group] = []
        for left in range(self.refill_rounds, -1, -1):
            taken = self._take(self.count - len(groups), deadline=deadline, have=len(groups))
            if self.refill_rounds == 0:
                groups = taken
                break
            groups += [group for group in taken if self.signal(group)]
            aside += [group for group in taken if not self.signal(group)]
            if len(groups) == self.count:
                break
            self._counts["refilled_groups"] += (self.count - len(groups)) if left else 0
        if self.reroll is not None:
            self.reroll.note([*groups, *aside])
        return groups + aside[: self.count - len(groups)]

    def _take(self, count: int, *, deadline: Deadline, have: int) -> list[Group]:
        taken: list[Group] = []
        while len(taken) < count:
            taken += self.source.next_groups(count - len(taken), deadline=deadline)
            deadline.check(f"{have + len(taken)} groups are there")
        return taken

    def requeue(self) -> None:
        """Before each batch: prompts that failed entirely get their other try where it is time."""
        if self.reroll is not None:
            self._counts["rerolled_groups"] += self.reroll.requeue_into(self.source)

    def keeps(self, group: Group, *, tries: int) -> bool:
        """Whether a group that is finished takes its place, or another is sampled for it: of groups one by one what
        :meth:`collect` does in rounds. ``tries`` counts those put aside in this place before."""
        if self.reroll is not None:
            self.reroll.note([group])
        kept = tries >= self.refill_rounds or self.signal(group)
        self._counts["refilled_groups"] += not kept
        return kept

    def report_version(self, version: int) -> None:
        """The policy moved on to ``version``."""
        self.source.report_version(version)
        if self.reroll is not None:
            self.reroll.step = version

    def counters(self) -> dict[str, float]:
        """The source's, and ``refilled_groups`` and ``rerolled_groups`` where these are on."""
        counts, self._counts = self._counts, Counter()
        mine = {"refilled_groups": self.refill_rounds > 0, "rerolled_groups": self.reroll is not None}
        return self.source.counters() | {name: float(counts[name]) for name, used in mine.items() if used}

    def state_dict(self) -> dict[str, Any]:
        """The source's state and the prompts waiting for another try."""
        state: dict[str, Any] = {"source": self.source.state_dict()}
        return state if self.reroll is None else state | {"reroll": self.reroll.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.source.load_state_dict(state["source"])
        if self.reroll is not None and "reroll" in state:
            self.reroll.load_state_dict(state["reroll"])

    def close(self) -> None:
        """Close the source."""
        self.source.close()


class WholeBatches(Collector):
    """Takes the batches of a source that makes them itself, as they are."""

    def collect(self, *, deadline: Deadline) -> list[Group]:
        return self.source.next_groups(self.count, deadline=deadline)


@dataclass(kw_only=True, eq=False)
class Reroll:
    """Prompts all of whose completions failed, waiting in line for a better policy.

    Args:
        start_step: first step at which they are tried again.
        max_groups: most of them in one batch.
    """

    start_step: int
    max_groups: int
    step: int = field(default=0, init=False)
    _waiting: deque[Prompt] = field(default_factory=deque[Prompt], init=False)

    def note(self, groups: list[Group]) -> None:
        """Remember the prompts of the groups that failed entirely, each once."""
        known = {prompt.id for prompt in self._waiting}
        for group in groups:
            if failed_entirely(group) and group.prompt.id not in known:
                known.add(group.prompt.id)
                self._waiting.append(group.prompt)

    def requeue_into(self, source: RolloutSource) -> int:
        """Hand the oldest prompts back to the source if it is time; how many.

        Raises:
            ConfigError: the source cannot take prompts back.
        """
        if self.step < self.start_step or not self._waiting:
            return 0
        prompts = [self._waiting.popleft() for _ in range(min(self.max_groups, len(self._waiting)))]
        if not source.requeue(prompts):
            raise ConfigError(
                "pipeline.reroll_start_fraction is below 1, but this source cannot sample a prompt again",
                remedy="set pipeline.reroll_start_fraction: 1.0",
            )
        return len(prompts)

    def state_dict(self) -> dict[str, Any]:
        """The step and the waiting prompts. JSON-serializable."""
        waiting = [encode_group(Group(prompt=prompt, samples=())) for prompt in self._waiting]
        return {"step": self.step, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.step = int(state["step"])
        self._waiting = deque(decode_group(line).prompt for line in state["waiting"])
