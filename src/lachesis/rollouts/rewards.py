"""Reward functions: what they are given, what they may return, and what happens when they fail.

A failing function never becomes a reward of 0: it stops the run, or its groups are dropped and counted.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from lachesis.errors import ConfigError, RewardError
from lachesis.rollouts.imports import load_function
from lachesis.rollouts.reward_attempts import RewardAttempts
from lachesis.rollouts.reward_calls import CallThread
from lachesis.types import Group, Sample

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["fail", "drop_group"]
RewardList: TypeAlias = Sequence[float | None]


class RewardFunction(Protocol):
    """``f(completions, **columns) -> list[float | None]``, a function or a coroutine function.

    It is called with keywords, and only with those that it takes. With N completions in all:

    - ``completions``: N lists of one message; the text is ``completions[i][0]["content"]``
    - ``prompts``: N prompts, each a text, or a list of messages where the dataset has conversations
    - ``completion_ids``: N lists of token ids
    - each column of the dataset by its name: N values (a column named like one of the above is hidden)

    The completions of one prompt follow each other; a call has those of one prompt or of several. It returns
    N numbers, as a list, array or tensor, with ``None`` where it abstains. It runs on a thread of its own. It
    may be called again for a part of the same completions, when a call failed and the culprit is looked for.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> RewardList | Awaitable[RewardList]: ...


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function and the name it has in metrics and messages."""

    name: str
    function: RewardFunction


@dataclass(frozen=True, slots=True)
class Scored:
    """The groups with their rewards, and what became of the others.

    ``errors`` has one per dropped group, and one for each call that failed though every group in it could be
    scored alone.
    """

    groups: list[Group]
    dropped: int
    errors: list[RewardError]


def load_reward(spec: str, base_dir: Path | None = None) -> NamedReward:
    """The reward function that ``module.function`` or ``FILE.py:FUNCTION`` names, by the function's name.

    Raises:
        ConfigError: it cannot be found or imported.
    """
    function = load_function(spec, base_dir)
    return NamedReward(name=spec.replace(":", ".").rpartition(".")[2], function=function)


def load_rewards(specs: Sequence[str], base_dir: Path | None = None) -> list[NamedReward]:
    """All functions of a configuration; those that would share a name are called by their whole spec."""
    rewards = [load_reward(spec, base_dir) for spec in specs]
    names = [reward.name for reward in rewards]
    return [
        dataclasses.replace(reward, name=spec) if names.count(reward.name) > 1 else reward
        for spec, reward in zip(specs, rewards, strict=True)
    ]


class Rewarder:
    """Scores groups with several functions: a reward for each function, and their weighted sum.

    Each function is called once for all groups. When that fails it is called group by group, to name the
    culprit and, with ``drop_group``, to keep the others.
    """

    def __init__(
        self,
        functions: Sequence[NamedReward],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float = 60.0,
        on_error: OnError = "fail",
    ) -> None:
        """
        Args:
            weights: one per function; all 1 if ``None``.
            timeout_s: deadline of one call of one function.
            on_error: ``fail`` raises, ``drop_group`` leaves out the groups that a function fails on.

        Raises:
            ConfigError: the weights do not fit the functions, or two functions have one name.
        """
        self.names = tuple(reward.name for reward in functions)
        self._weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        _check_setup(self.names, self._weights)
        self._thread = CallThread("rewards")
        self._functions = tuple(
            RewardAttempts(reward.name, reward.function, thread=self._thread, timeout_s=timeout_s)
            for reward in functions
        )
        self._on_error: OnError = on_error

    def check_columns(self, columns: Iterable[str]) -> None:
        """Before anything is generated: each function gets the arguments that it cannot do without.

        Raises:
            RewardError: a function needs a column that the dataset does not have.
        """
        known = frozenset(columns)
        for function in self._functions:
            function.check_columns(known)

    def score(self, groups: Sequence[Group], *, on_error: OnError | None = None) -> Scored:
        """The groups with ``Sample.rewards`` (one per function) and ``Sample.reward`` set.

        ``reward`` is Σ w_k·r_k over the functions that did not abstain, ``None`` where all did.

        Args:
            on_error: overrides the rewarder's own.

        Raises:
            RewardError: a function failed and the policy is ``fail``; or it needs a column that there is not.
        """
        if not groups:
            return Scored(groups=[], dropped=0, errors=[])
        fail_fast = (on_error or self._on_error) == "fail"
        self.check_columns({name for group in groups for name in group.prompt.columns})
        kept = list(groups)
        tables: list[list[list[float | None]]] = [[] for _ in kept]  # [group][function][sample]
        errors: list[RewardError] = []
        for function in self._functions:
            if not kept:
                break
            results, failures = function.score(kept, fail_fast=fail_fast)
            errors += failures
            good = [(index, rewards) for index, rewards in enumerate(results) if rewards is not None]
            tables = [[*tables[index], rewards] for index, rewards in good]
            kept = [kept[index] for index, _ in good]
        dropped = len(groups) - len(kept)
        if errors:
            logger.warning("dropped %d of %d groups; first error: %s", dropped, len(groups), errors[0])
        scored = [self._with_rewards(group, table) for group, table in zip(kept, tables, strict=True)]
        return Scored(groups=scored, dropped=dropped, errors=errors)

    def close(self) -> None:
        """End the thread that functions run on. Idempotent."""
        self._thread.close()

    def _with_rewards(self, group: Group, table: Sequence[Sequence[float | None]]) -> Group:
        """``table[k][i]`` is the reward of sample i by function k."""
        samples = [
            _rewarded(sample, rewards, _total(rewards, self._weights))
            for sample, rewards in zip(group.samples, zip(*table, strict=True), strict=True)
        ]
        return dataclasses.replace(group, samples=tuple(samples))


def _rewarded(sample: Sample, rewards: tuple[float | None, ...], reward: float | None) -> Sample:
    """The sample with its rewards. ``dataclasses.replace`` takes twice as long, for every sample of a run."""
    return Sample(
        prompt_ids=sample.prompt_ids,
        completion_ids=sample.completion_ids,
        logprobs=sample.logprobs,
        finish_reason=sample.finish_reason,
        versions=sample.versions,
        text=sample.text,
        mask=sample.mask,
        temperature=sample.temperature,
        rewards=rewards,
        reward=reward,
        advantage=sample.advantage,
    )


def _total(rewards: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Σ w_k·r_k over the rewards that are there; ``None`` where none is."""
    parts = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
    return sum(parts) if parts else None


def _check_setup(names: Sequence[str], weights: Sequence[float]) -> None:
    if not names:
        raise ConfigError("rewards.functions is empty", remedy="name at least one reward function")
    if len(weights) != len(names):
        raise ConfigError(
            f"rewards.weights has {len(weights)} values for {len(names)} functions",
            remedy="give one weight per function, or leave them out",
        )
    if bad := [weight for weight in weights if not math.isfinite(weight)]:
        raise ConfigError(f"rewards.weights has a weight of {bad[0]}", remedy="give finite numbers")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two reward functions are called {twice[0]!r}", remedy="name each function once")
