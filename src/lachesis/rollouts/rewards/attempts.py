"""Calls of a reward function with a deadline; if a call fails, a search for the sample to blame."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from lachesis.common.deadline import Deadline
from lachesis.common.errors import RewardError, StopRequested, did_you_mean
from lachesis.common.json_values import own
from lachesis.common.types import Group, Prompt
from lachesis.process.threads import call_watched
from lachesis.rollouts.rewards.functions import (
    HANG_REMEDY,
    VALUE_REMEDY,
    Answer,
    BadValue,
    CallLog,
    Excluded,
    RewardCall,
    RewardFailure,
    Signature,
    TrainerState,
    shorten,
)
from lachesis.rollouts.rewards.runners import RewardRunner

# Per-sample columns: a value per sample for each name.
Extras: TypeAlias = Mapping[str, Sequence[Any]]

# The form of a completion for a function if the prompt is a text: a list of one message, or a text like the prompt.
TextCompletions: TypeAlias = Literal["messages", "text"]

# The per-sample column with the messages of a multi-turn completion, which functions get as the completion.
TURNS = "_turns"
# Arguments that a function can have besides the columns of the dataset.
GIVEN = ("prompts", "prompt_texts", "completions", "completion_ids", "trainer_state", *CallLog.NAMES)
# Scoring group by group, to find a group on which a function hangs, stops after this many hangs in a row.
_MOST_HANGS = 3
# Seconds that calls may still take, all together, once the run was asked to stop.
_STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Item:
    """A group to score, with columns that have a value per sample, where a rollout function gave some."""

    group: Group
    extras: Extras = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    """Rewards of one group's samples, and the values logged per sample."""

    rewards: list[float | Excluded | None]
    extras: Extras


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """Results of one function for each item, ``None`` where it failed, and the errors."""

    judged: list[Judged | None]
    errors: list[RewardError]
    metrics: Mapping[str, list[float]]


@dataclass
class StopCheck:
    """Check of a run's scoring for a stop request, called while reward functions run."""

    stop_requested: Callable[[], bool] = lambda: False
    _since: float | None = None

    def __call__(self) -> None:
        """Raise StopRequested once calls took longer than the grace after a stop request."""
        if self._since is None:
            self._since = time.monotonic() if self.stop_requested() else None
        elif time.monotonic() - self._since > _STOP_GRACE_S:
            raise StopRequested("the run was asked to stop while it waited for reward functions")


@dataclass(frozen=True)
class RewardAttempts:
    """Caller of one function for all groups at once and, if that fails, for each group alone.

    Args:
        runner: runs it; with several calls at a time each gets whole groups.
        text_completions: form of the completions of prompts that are texts.
    """

    name: str
    runner: RewardRunner
    _: KW_ONLY
    timeout_s: float
    text_completions: TextCompletions = "messages"
    stop_check: StopCheck = field(default_factory=StopCheck)

    def check_columns(self, columns: frozenset[str]) -> None:
        """Raise RewardError if the function needs an argument that is neither given nor a column."""
        known = sorted(columns.difference(GIVEN))
        for name in self.runner.signature.required:
            if name in columns or name in GIVEN:
                continue
            # A given argument is suggested only for a near miss: "solution" is not a misspelt "completions".
            others = "name a column, add this one, or give a default"
            if not any(map(self.runner.signature.takes, ("completions", "completion_ids"))):
                others = "a reward is called once with lists of all completions: def f(completions, answer, **columns)"
            raise RewardError(
                f"reward function {self.name!r} needs {name!r}, which is neither one of {', '.join(GIVEN)} "
                f"nor a column of the dataset ({', '.join(known) or 'it has none'})",
                remedy=did_you_mean(name, GIVEN, otherwise=did_you_mean(name, known, otherwise=others), cutoff=0.8),
            )

    def blanks(self, problems: Sequence[Prompt]) -> Iterator[str]:
        """Yield sentences about required columns that some of the problems lack."""
        for name in self.runner.signature.required:
            without = [problem for problem in problems if problem.columns.get(name) is None]
            # A name that no problem has is a given argument, or comes with the turns.
            if without and any(name in problem.columns for problem in problems):
                yield (
                    f"reward function {self.name!r} needs {name!r}, but {len(without):,} of {len(problems):,} problems "
                    f"do not have it (the first is {without[0].id!r}); it gets None for these"
                )

    def score(self, items: Sequence[Item], *, fail_fast: bool, state: TrainerState) -> FunctionScores:
        """Return the rewards of each item.

        Raises:
            RewardError: the first failure, with ``fail_fast``.
            StopRequested: the run was asked to stop, and the calls took too long after that.
        """
        attempt = _Attempt(
            self.name, self.runner, self.timeout_s, self.text_completions, self.stop_check, fail_fast, state
        )
        judged = attempt.score(items)
        return FunctionScores(judged, attempt.errors, attempt.metrics)


@dataclass
class _Attempt:
    """Calls of one function for one batch."""

    name: str
    runner: RewardRunner
    timeout_s: float
    text_completions: TextCompletions
    stop_check: StopCheck
    fail_fast: bool
    state: TrainerState
    failures: int = 0
    errors: list[RewardError] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def score(self, items: Sequence[Item]) -> list[Judged | None]:
        judged: list[Judged | None] = []
        shards = _shards(items, self.runner.width)
        for shard, answer in zip(shards, self._run(shards), strict=True):
            judged += self._judge(shard, answer)
        return judged

    def _judge(self, items: Sequence[Item], answer: Answer) -> list[Judged | None]:
        if answer.failure is None:
            return self._take(items, answer)
        if len(items) == 1:
            self._blame(items[0], answer.failure)
            return [None]
        errors_before = len(self.errors)
        judged = self._one_by_one(items)
        if len(self.errors) == errors_before:
            where = f"in one call with {len(items)} groups, but not in separate calls with each of them"
            self._note(answer.failure, where)
        return judged

    def _one_by_one(self, items: Sequence[Item]) -> list[Judged | None]:
        judged: list[Judged | None] = []
        costly = 0
        for item in items:
            if costly == _MOST_HANGS:
                what = f"was not called again, after {costly} calls in a row that hung or crashed,"
                self._note(RewardFailure(what, HANG_REMEDY), f"on {_describe(item.group, None)}")
                judged.append(None)
                continue
            (answer,) = self._run([[item]])
            if answer.failure is None:
                judged += self._take([item], answer)
                costly = 0
            else:
                self._blame(item, answer.failure)
                judged.append(None)
                costly = costly + 1 if answer.failure.costly else 0
        return judged

    def _run(self, shards: Sequence[Sequence[Item]]) -> list[Answer]:
        calls = [_call(shard, self.runner.signature, self.state, self.text_completions) for shard in shards]
        with Deadline(f"the reward function {self.name}", self.timeout_s, "rewards.timeout_s").waiting():
            return call_watched(partial(self.runner.run, calls, timeout_s=self.timeout_s), watch=self.stop_check)

    def _take(self, items: Sequence[Item], answer: Answer) -> list[Judged | None]:
        """Return the values of each item, unless one of them is not a reward."""
        judged: list[Judged | None] = []
        for item, part in _parts(items):
            values = answer.values[part]
            bad = next(((i, value) for i, value in enumerate(values) if isinstance(value, BadValue)), None)
            if bad is None:
                rewards: list[float | Excluded | None] = [value for value in values if not isinstance(value, BadValue)]
                judged.append(Judged(rewards, {name: v[part] for name, v in answer.logged.extras.items()}))
            else:
                self._note(RewardFailure(bad[1].what, VALUE_REMEDY), f"on {_describe(item.group, bad[0])}")
                judged.append(None)
        for name, numbers in answer.logged.metrics.items():
            self.metrics.setdefault(name, []).extend(numbers)
        return judged

    def _blame(self, item: Item, failure: RewardFailure) -> None:
        """Report the failure of a group; for the first such group also look for the sample to blame."""
        culprit = self._culprit(item) if failure.traceable and self.failures == 0 else None
        self.failures += 1
        self._note(failure, f"on {_describe(item.group, culprit)}")

    def _culprit(self, item: Item) -> int | None:
        """Return the first sample for which the function fails when called with that one alone."""
        for index, sample in enumerate(item.group.samples):
            extras = {name: values[index : index + 1] for name, values in item.extras.items()}
            (answer,) = self._run([[Item(replace(item.group, samples=(sample,)), extras)]])
            if answer.failure is not None:
                return index
        return None

    def _note(self, failure: RewardFailure, where: str) -> None:
        error = RewardError(f"reward function {self.name!r} {failure.what} {where}", remedy=failure.remedy)
        error.__cause__ = failure.cause
        self.errors.append(error)
        if self.fail_fast:
            raise error


def _shards(items: Sequence[Item], width: int) -> list[Sequence[Item]]:
    """Split the items into at most ``width`` parts of nearly equal length, in order."""
    count = min(width, len(items))
    ends = [len(items) * (i + 1) // count for i in range(count)]
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _call(
    items: Sequence[Item], signature: Signature, state: TrainerState, text_completions: TextCompletions
) -> RewardCall:
    """Make one call. Its lists and their content are copies for this call: a function may change them."""
    groups = [item.group for item in items]

    def per_sample(of_group: Sequence[Any]) -> list[Any]:
        return [own(value) for group, value in zip(groups, of_group, strict=True) for _ in group.samples]

    columns = dict.fromkeys(name for group in groups for name in group.prompt.columns)
    arguments: dict[str, Any] = {
        name: per_sample([group.prompt.columns.get(name) for group in groups])
        for name in filter(signature.takes, columns)
    }
    given = dict.fromkeys(name for item in items for name in item.extras if name != TURNS)
    for name in filter(signature.takes, given):
        of_items = (item.extras.get(name, [None] * len(item.group.samples)) for item in items)
        arguments[name] = [own(value) for values in of_items for value in values]
    samples = [sample for group in groups for sample in group.samples]
    if signature.takes("completions"):
        arguments["completions"] = [
            _completion(item.group.prompt, sample.text, text_completions) if turns is None else own(turns)
            for item in items
            for sample, turns in zip(
                item.group.samples, item.extras.get(TURNS, [None] * len(item.group.samples)), strict=True
            )
        ]
    if signature.takes("completion_ids"):
        arguments["completion_ids"] = [list(sample.completion_ids) for sample in samples]
    if signature.takes("prompts"):
        prompts = [group.prompt for group in groups]
        arguments["prompts"] = per_sample([list(p.messages) if p.messages else p.text for p in prompts])
    if signature.takes("prompt_texts"):
        arguments["prompt_texts"] = per_sample([group.prompt.text for group in groups])
    if signature.takes("trainer_state"):
        arguments["trainer_state"] = state
    for name in CallLog.NAMES:
        arguments.pop(name, None)
    return RewardCall(arguments, len(samples), tuple(filter(signature.takes, CallLog.NAMES)))


def _completion(prompt: Prompt, text: str, text_completions: TextCompletions) -> str | list[dict[str, str]]:
    """Return a completion as a message for a conversation; for a text in the requested form."""
    as_text = prompt.messages is None and text_completions == "text"
    return text if as_text else [{"role": "assistant", "content": text}]


def _parts(items: Sequence[Item]) -> Iterator[tuple[Item, slice]]:
    start = 0
    for item in items:
        end = start + len(item.group.samples)
        yield item, slice(start, end)
        start = end


def _describe(group: Group, sample: int | None) -> str:
    """Describe the place of a failure in one line: prompt id, completion text, columns."""
    columns = ", ".join(f"{name}={shorten(value)}" for name, value in group.prompt.columns.items())
    prompt = f"prompt {group.prompt.id!r} ({columns})" if columns else f"prompt {group.prompt.id!r}"
    count = len(group.samples)
    if sample is None:
        return f"the {count} completions of {prompt}"
    return f"completion {sample + 1} of {count} of {prompt}: {shorten(group.samples[sample].text, limit=120)}"
