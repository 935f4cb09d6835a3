"""Collection of one batch of groups from a source, with refilling and later retries of failed prompts."""

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
from lachesis.rollouts.base import RolloutSource, prompt_key


@dataclass(eq=False)
class Collector:
    """Collector that takes groups from a source until a batch is full; one thread at a time may use it.

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
        """Return the groups of the next batch.

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
            deadline.check(f"{have + len(taken)} groups are complete")
        return taken

    def requeue(self) -> None:
        """Put prompts that failed entirely back in line if their retry is due; called before each batch."""
        if self.reroll is not None:
            self._counts["rerolled_groups"] += self.reroll.requeue_into(self.source)

    def keeps(self, group: Group, *, tries: int) -> bool:
        """Return True if a finished group takes its place, False if another must be sampled for it.

        Decides group by group what :meth:`collect` does in rounds. ``tries`` counts the groups set aside in this place
        before.
        """
        if self.reroll is not None:
            self.reroll.note([group])
        kept = tries >= self.refill_rounds or self.signal(group)
        self._counts["refilled_groups"] += not kept
        return kept

    def report_version(self, version: int) -> None:
        """Tell the source that the policy has moved on to ``version``."""
        self.source.report_version(version)
        if self.reroll is not None:
            self.reroll.step = version

    def counters(self) -> dict[str, float]:
        """Return the source's counters, plus ``refilled_groups`` and ``rerolled_groups`` where those options are on."""
        counts, self._counts = self._counts, Counter()
        mine = {"refilled_groups": self.refill_rounds > 0, "rerolled_groups": self.reroll is not None}
        return self.source.counters() | {name: float(counts[name]) for name, used in mine.items() if used}

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state and the prompts that wait for a retry."""
        state: dict[str, Any] = {"source": self.source.state_dict()}
        return state if self.reroll is None else state | {"reroll": self.reroll.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.source.load_state_dict(state["source"])
        if self.reroll is not None and "reroll" in state:
            self.reroll.load_state_dict(state["reroll"])

    def close(self) -> None:
        """Close the source."""
        self.source.close()


class WholeBatches(Collector):
    """Collector for a source that makes batches itself: it takes them unchanged."""

    def collect(self, *, deadline: Deadline) -> list[Group]:
        return self.source.next_groups(self.count, deadline=deadline)


@dataclass(kw_only=True, eq=False)
class Reroll:
    """Queue of prompts all of whose completions failed, to be retried with a better policy.

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
        known = {prompt_key(prompt) for prompt in self._waiting}
        for group in groups:
            if failed_entirely(group) and prompt_key(group.prompt) not in known:
                known.add(prompt_key(group.prompt))
                self._waiting.append(group.prompt)

    def requeue_into(self, source: RolloutSource) -> int:
        """Return the oldest prompts to the source if their retry is due, and return how many there were.

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
        """Return the step and the waiting prompts; JSON-serializable."""
        waiting = [encode_group(Group(prompt=prompt, samples=())) for prompt in self._waiting]
        return {"step": self.step, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.step = int(state["step"])
        self._waiting = deque(decode_group(line).prompt for line in state["waiting"])
