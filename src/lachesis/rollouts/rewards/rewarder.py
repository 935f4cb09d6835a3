"""Reward functions: their arguments, their results, and the handling of failures.

A failing function never becomes a reward of 0: it stops the run, or its groups are dropped and counted.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from lachesis.common.errors import ConfigError, RewardError
from lachesis.common.imports import names_module
from lachesis.common.objects import names_object
from lachesis.common.types import Group, Prompt
from lachesis.plugins import load
from lachesis.process.threads import CallThread
from lachesis.process.watchdog import Watchdog
from lachesis.rollouts.rewards.attempts import GIVEN, Extras, Item, Judged, RewardAttempts, StopCheck, TextCompletions
from lachesis.rollouts.rewards.functions import Excluded, TrainerState
from lachesis.rollouts.rewards.loading import ImportPath, load_named, names_model, needs_main_thread
from lachesis.rollouts.rewards.runners import RewardRunner, RewardWorkers, ThreadRunner, WorkerRunner

logger = logging.getLogger(__name__)

# Limit of a process's imports in seconds, while no call waits for them.
_LONG_START_S = 1800.0

OnError: TypeAlias = Literal["fail", "drop_group"]
RewardList: TypeAlias = Sequence[float | Excluded | None]


class RewardFunction(Protocol):
    """``f(completions, **columns) -> list[float | None]``, a function or a coroutine function.

    It is called with the keywords that it takes. With N completions in all:

    - ``prompts``: N prompts, each a text, or a list of messages if the dataset has conversations
    - ``prompt_texts``: N prompts as the model sees them, rendered by the chat template
    - ``completions``: N lists of one message; the text is ``completions[i][0]["content"]``. If the prompt is a
      text and ``text_completions`` is ``text``, as in TRL and Axolotl, N texts
    - ``completion_ids``: N lists of token ids
    - each column of the dataset by its name: N values (a column named like one of these arguments is hidden)
    - ``trainer_state``: a :class:`~lachesis.rollouts.rewards.functions.TrainerState`, with ``global_step``
    - ``log_extra(column, values)``: keep N values beside the completions, in the tape and where they are shown
    - ``log_metric(name, value)``: show the mean of a number

    The completions of one prompt follow each other; a call has those of one prompt or of several. Lists and
    mappings, nested ones too, belong to each completion and call: a function may change them. It returns N
    numbers, as a list, array or tensor, with ``None`` where it abstains, and an
    :class:`~lachesis.rollouts.rewards.functions.Excluded` for a completion that could not be judged, which then leaves
    its group. It runs in a separate thread, or in the main thread of a separate process. It may be called again
    for a part of the same completions, to find the culprit after a failed call.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> RewardList | Awaitable[RewardList]: ...


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function and the name it has in metrics and messages."""

    name: str
    function: RewardFunction | ImportPath


@dataclass(frozen=True, slots=True)
class Scored:
    """The groups with their rewards, and the fate of the others.

    ``kept`` has the place of each remaining group among the given ones, and ``excluded``, by their places, the samples
    that a function could not judge: they have no reward and must leave their group. ``errors`` has one error per
    dropped group, and one for each failed call whose groups could all be scored separately. ``extras`` has the values
    that functions logged per sample of each remaining group; ``metrics`` has the mean of each logged metric.
    """

    groups: list[Group]
    dropped: int
    errors: list[RewardError]
    kept: list[int] = field(default_factory=list)
    excluded: list[Mapping[int, Excluded]] = field(default_factory=list)
    extras: list[Extras] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)


def load_reward(
    given: str | Mapping[str, Any],
    base_dir: Path | None = None,
    *,
    num_workers: int | None = 0,
    model_device: str = "auto",
    model_batch_size: int = 16,
) -> NamedReward:
    """Load the reward function, or model, that ``given`` names.

    A mapping has it as ``function``, with its arguments or those of a factory as ``kwargs``. A function that needs the
    main thread of a process gets one.

    A model is a directory or a hub id: a name with ``/`` other than ``FILE.py:FUNCTION``. All else is
    ``module.function`` or ``FILE.py:FUNCTION`` and has the function's name.

    Args:
        given: name or mapping.
        base_dir: for relative paths; the current directory if unset.
        num_workers: with processes to run it, a function is imported there and not here; ``None``: those of the
            user's functions that another process can import.
        model_device: of a model; ``auto`` takes a GPU if there is one.
        model_batch_size: conversations that a model judges at once.

    Raises:
        ConfigError: it cannot be found or imported, or the model does not return one number.
    """
    base_dir = (base_dir or Path()).resolve()
    spec = given if isinstance(given, str) else str(given["function"])
    arguments = {} if isinstance(given, str) else given.get("kwargs") or {}
    if (path := names_model(spec, base_dir)) is not None:
        model = load("rewards", "model")(path, device=model_device, batch_size=model_batch_size)
        return NamedReward(Path(path).name, model)
    name = spec.replace(":", ".").rpartition(".")[2]
    if num_workers and names_object(spec):
        raise ConfigError(
            f"rewards.num_workers is {num_workers}, but {name} is a function of this program, which other processes "
            "cannot import",
            remedy=f"move it to a file and name it as FILE.py:{name}, or leave out rewards.num_workers",
        )
    named = ImportPath(spec, base_dir, json.dumps(arguments))
    if num_workers or (num_workers is None and names_module(spec) and not names_object(spec)):
        return NamedReward(name, named)
    function = load_named(named)
    return NamedReward(name, named if needs_main_thread(function) and not names_object(spec) else function)


def load_rewards(
    specs: Sequence[str | Mapping[str, Any]],
    base_dir: Path | None = None,
    *,
    num_workers: int | None = 0,
    model_device: str = "auto",
    model_batch_size: int = 16,
) -> list[NamedReward]:
    """Load all functions of a configuration; functions with equal names are named by their whole spec."""
    rewards = [
        load_reward(
            spec,
            base_dir,
            num_workers=num_workers,
            model_device=model_device,
            model_batch_size=model_batch_size,
        )
        for spec in specs
    ]
    names = [reward.name for reward in rewards]
    return [
        dataclasses.replace(reward, name=_whole_name(spec)) if names.count(reward.name) > 1 else reward
        for spec, reward in zip(specs, rewards, strict=True)
    ]


def _whole_name(spec: str | Mapping[str, Any]) -> str:
    return spec if isinstance(spec, str) else f"{spec['function']} {json.dumps(spec.get('kwargs') or {})}"


class Rewarder:
    """Scorer of groups with several functions: a reward for each function, and their weighted sum.

    Each function is called once for all groups (or once in each process, with a part of the groups). When that
    fails it is called group by group, to name the culprit and, with ``drop_group``, to keep the others.
    """

    def __init__(
        self,
        functions: Sequence[NamedReward],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float = 60.0,
        on_error: OnError = "fail",
        num_workers: int | None = 0,
        max_steps: int = 0,
        text_completions: TextCompletions = "messages",
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set up the functions and their threads or processes.

        Args:
            functions: with their names.
            weights: one per function; all 1 if ``None``.
            timeout_s: deadline of one call of one function.
            on_error: ``fail`` raises, ``drop_group`` leaves out the groups that a function fails on.
            num_workers: processes for the functions that are import paths; at least one if there are any. ``None``:
                one, and a function whose values cannot go there runs on a thread of this process.
            max_steps: of the run, for functions that ask.
            text_completions: form of the completions of prompts that are texts.
            stop_requested: returns True once the run should stop; calls that then take long are given up.

        Raises:
            ConfigError: the weights do not fit the functions, or two functions have one name. A function that a process
                cannot import raises at its first use.
        """
        self.names = tuple(reward.name for reward in functions)
        self._weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        _check_setup(self.names, self._weights)
        self._thread = CallThread("rewards")
        self._watchdog = Watchdog()
        self._turn = threading.Lock()
        self._workers = _start_workers(functions, num_workers)
        attempts = partial(
            RewardAttempts,
            timeout_s=timeout_s,
            text_completions=text_completions,
            stop_check=StopCheck(stop_requested),
        )
        self._functions = tuple(
            attempts(reward.name, runner)
            for reward, runner in zip(functions, self._runners(functions, num_workers), strict=True)
        )
        self._on_error: OnError = on_error
        self._state = TrainerState(max_steps=max_steps)

    def check_early(self, columns: Iterable[str] | None, *, within_s: float) -> None:
        """Wait at most ``within_s`` seconds for the functions' imports, and check what is known by then.

        Args:
            columns: names of all columns that there will be; ``None`` if more come with the rollouts.
            within_s: of waiting.

        Raises:
            ConfigError: a function cannot be imported.
            RewardError: a process ended meanwhile, or a function needs a missing column.
        """
        ready = self._workers is None or self._workers.wait(within_s)
        if ready and columns is not None:
            self.check_columns(columns)

    @property
    def named_columns(self) -> frozenset[str]:
        """Return the columns that functions name as arguments; of a function that takes any, the required ones."""
        named = frozenset[str]()
        for function in self._functions:
            signature = function.runner.signature
            named |= frozenset(signature.required) | (signature.accepted or frozenset())
        return named - frozenset(GIVEN)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check, before generation, that each function gets its required arguments.

        Raises:
            RewardError: a function needs a column that the dataset does not have.
        """
        known = frozenset(columns)
        for function in self._functions:
            function.check_columns(known)

    def blanks(self, problems: Sequence[Prompt]) -> list[str]:
        """Return sentences about required columns that some of the problems lack.

        That is not an error: with mixed datasets, a function abstains on the problems of others.
        """
        return [words for function in self._functions for words in function.blanks(problems)]

    def report_step(self, step: int) -> None:
        """Note that training has done ``step`` optimizer steps, a number that functions may ask for."""
        self._state = dataclasses.replace(self._state, global_step=step)

    def score(
        self, groups: Sequence[Group], *, extras: Sequence[Extras] = (), on_error: OnError | None = None
    ) -> Scored:
        """Return the groups with ``Sample.rewards`` (one per function) and ``Sample.reward`` set.

        ``reward`` is Σ w_k·r_k over the functions that did not abstain, ``None`` if all did.

        Args:
            groups: without rewards.
            extras: for each group, further columns with a value per sample.
            on_error: overrides the rewarder's own.

        Raises:
            RewardError: a function failed and the policy is ``fail``; or it needs a missing column.
            StopRequested: the run was asked to stop, and the functions took too long after that.
        """
        if not groups:
            return Scored(groups=[], dropped=0, errors=[])
        with self._turn:  # groups that finish while others are scored, or an evaluation, wait
            return self._score(groups, extras=extras, on_error=on_error)

    def _score(self, groups: Sequence[Group], *, extras: Sequence[Extras], on_error: OnError | None) -> Scored:
        fail_fast = (on_error or self._on_error) == "fail"
        kept = [Item(group, given) for group, given in zip(groups, extras or [{}] * len(groups), strict=True)]
        self.check_columns({name for item in kept for name in (*item.group.prompt.columns, *item.extras)})
        places = list(range(len(groups)))
        tables: list[list[Judged]] = [[] for _ in kept]  # [group][function]
        errors: list[RewardError] = []
        metrics: dict[str, list[float]] = {}
        for function in self._functions:
            if not kept:
                break
            scores = function.score(kept, fail_fast=fail_fast, state=self._state)
            errors += scores.errors
            for name, numbers in scores.metrics.items():
                metrics.setdefault(name, []).extend(numbers)
            good = [(index, judged) for index, judged in enumerate(scores.judged) if judged is not None]
            tables = [[*tables[index], judged] for index, judged in good]
            kept = [kept[index] for index, _ in good]
            places = [places[index] for index, _ in good]
        dropped = len(groups) - len(kept)
        if errors:
            logger.warning("dropped %d of %d groups; first error: %s", dropped, len(groups), errors[0])
        return Scored(
            groups=[self._with_rewards(item.group, table) for item, table in zip(kept, tables, strict=True)],
            dropped=dropped,
            errors=errors,
            kept=places,
            excluded=[_excluded(table) for table in tables],
            extras=[_logged(table) for table in tables],
            metrics={name: sum(numbers) / len(numbers) for name, numbers in metrics.items()},
        )

    def close(self) -> None:
        """End the thread and the processes that functions run in. Idempotent."""
        self._thread.close()
        self._watchdog.close()
        if self._workers is not None:
            self._workers.close()

    def _runners(self, functions: Sequence[NamedReward], num_workers: int | None) -> list[RewardRunner]:
        specs = _remote_specs(functions)
        return [
            WorkerRunner(
                self._workers,
                specs.index(reward.function),
                here=partial(self._here, reward.function) if num_workers is None else None,
            )
            if isinstance(reward.function, ImportPath) and self._workers is not None
            else ThreadRunner(reward.function, self._thread, self._watchdog)  # type: ignore[arg-type]
            for reward in functions
        ]

    def _here(self, path: ImportPath) -> RewardRunner:
        return ThreadRunner(load_named(path), self._thread, self._watchdog)

    def _with_rewards(self, group: Group, table: Sequence[Judged]) -> Group:
        """Return the group with its rewards; ``table[k].rewards[i]`` is that of sample i by function k."""
        samples = [
            dataclasses.replace(sample, rewards=rewards, reward=_total(rewards, self._weights))
            for sample, given in zip(group.samples, zip(*(one.rewards for one in table), strict=True), strict=True)
            for rewards in [_unless_excluded(given)]
        ]
        return dataclasses.replace(group, samples=tuple(samples), logged=_logged(table))


def _excluded(table: Sequence[Judged]) -> dict[int, Excluded]:
    """Return why some samples of a group could not be judged: the reason of the first function that excluded each."""
    found: dict[int, Excluded] = {}
    for judged in table:
        for index, reward in enumerate(judged.rewards):
            if isinstance(reward, Excluded):
                found.setdefault(index, reward)
    return found


def _logged(table: Sequence[Judged]) -> dict[str, Sequence[Any]]:
    """Return everything that the functions logged about one group's samples."""
    return {name: values for judged in table for name, values in judged.extras.items()}


def _remote_specs(functions: Sequence[NamedReward]) -> list[ImportPath]:
    return [reward.function for reward in functions if isinstance(reward.function, ImportPath)]


def _start_workers(functions: Sequence[NamedReward], num_workers: int | None) -> RewardWorkers | None:
    remote = _remote_specs(functions)
    if not remote:
        return None
    if num_workers is None:  # it may use all processors and load a model slowly, as in this process
        return RewardWorkers(remote, count=1, start_s=_LONG_START_S, one_thread=False)
    return RewardWorkers(remote, count=max(1, num_workers))


def _unless_excluded(rewards: Sequence[float | Excluded | None]) -> tuple[float | None, ...]:
    """Return the rewards of one sample; all ``None`` if one function excludes it."""
    kept = tuple(reward for reward in rewards if not isinstance(reward, Excluded))
    return kept if len(kept) == len(rewards) else (None,) * len(rewards)


def _total(rewards: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return Σ w_k·r_k over the existing rewards; ``None`` if there are none."""
    parts = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
    return sum(parts) if parts else None


def _check_setup(names: Sequence[str], weights: Sequence[float]) -> None:
    if not names:
        raise ConfigError("rewards.functions names no function", remedy="name at least one reward function")
    if len(weights) != len(names):
        raise ConfigError(
            f"rewards.weights has {len(weights)} values for {len(names)} functions",
            remedy="give one weight per function, or leave out rewards.weights",
        )
    if bad := [weight for weight in weights if not math.isfinite(weight)]:
        raise ConfigError(f"rewards.weights has the weight {bad[0]}", remedy="give finite numbers")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two reward functions are called {twice[0]!r}", remedy="name each function once")
