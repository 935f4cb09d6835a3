"""Groups of episodes: rollouts that an environment plays with the engine, which may fail and are then no rewards."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError, DeadlineExceeded, LachesisError, RewardError
from lachesis.common.types import (
    LARGEST_NUMBER,
    LOWEST_LOGPROB,
    EvalResult,
    Group,
    Prompt,
    Sample,
    SamplingParams,
)
from lachesis.metrics.meters import BusyTime
from lachesis.process.threads import LoopThread
from lachesis.rollouts.base import Done, Draw, GroupwiseSource
from lachesis.rollouts.call_batcher import Completer
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.failures import note_failure
from lachesis.rollouts.generation import SpecialTokens, nested_deadline, request_seed
from lachesis.rollouts.local import MOST_EMPTY_BATCHES
from lachesis.rollouts.partial_rollouts import KeptGroup, KeptRollout, KeptRollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# A group needs two rollouts: one has nothing to be measured against.
_FEWEST = 2
_FAILURES = "rollout_failures"


def why_unusable(sample: Sample) -> str:
    """The first number of a sample with which it would make a whole batch's gradient infinite; empty without one."""
    for reward in (sample.reward, *sample.rewards):
        if reward is not None and not abs(reward) <= LARGEST_NUMBER:
            return f"its reward is {reward:g}"
    for value in (sample.advantage or 0.0, *(sample.token_advantages or ())):
        if not abs(value) <= LARGEST_NUMBER:
            return f"it has an advantage of {value:g}"
    trained = compress(sample.logprobs, sample.loss_mask())
    impossible = next((value for value in trained if value < LOWEST_LOGPROB or value == math.inf), None)
    return "" if impossible is None else f"it has a logprob of {impossible:g}, which no sampled token has"


class RolloutFailed(LachesisError):
    """One rollout came to no end that could be scored. It is left out of its group and counted under ``cause``."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Played:
    """A rollout that was scored: one sample, or several where its turns do not continue each other.

    ``state`` is what :meth:`Players.finish` needs, where groups are scored together. Without one a rollout that is
    finished can be kept over a restart before its group is whole.
    """

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Any = None


class Players(ABC):
    """Plays episodes on one event loop, many at the same time.

    ``reward_names`` are those of the parts of a reward, as :attr:`Sample.rewards` has them.
    """

    reward_names: tuple[str, ...] = ("environment",)

    async def start(self) -> None:
        """Bring up what all episodes share. Called once, on the loop that they run on."""
        return None

    @abstractmethod
    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        """One scored rollout; cancelling it ends all that it began.

        Raises:
            RolloutFailed: it came to no end that could be scored.
            EngineError: the engine cannot serve, so no other rollout will go better.
        """

    async def finish(self, played: Sequence[Played]) -> Sequence[Played | RolloutFailed]:
        """All rollouts of a group that are there, with their rewards where these depend on each other.

        In the place of one that could not be scored is why.
        """
        return list(played)

    def report(self, deadline: Deadline) -> None:
        """The limit of what is generated from now on."""
        return None

    def report_version(self, version: int) -> None:
        """The policy moved on to ``version``."""
        return None

    async def stop(self) -> None:
        """The reverse of :meth:`start`. Idempotent."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAccess:
    """What players need of the model that plays.

    Args:
        calls: who samples its turns.
        model: its name, by which a library may know it.
        params: what is sampled with; ``max_tokens`` is the most of one turn, or of all, as the players say.
        max_context: most tokens of prompt and completion together.
        vocab_size: no token id reaches it.
        special_tokens: what becomes of them in the text that reward functions and environments get.
    """

    calls: Completer
    tokenizer: PreTrainedTokenizerBase
    model: str
    params: SamplingParams
    max_context: int
    vocab_size: int
    special_tokens: SpecialTokens = "remove"


class TaskPlayers(Players):
    """Players of one environment, which know its tasks. ``keep`` holds what they need while they play."""

    keep: object = None

    @abstractmethod
    def split(self) -> tuple[list[Prompt], list[Prompt]]:
        """Tasks to train on, and those that are held out. Raises DataError where nothing is left to train on."""


def held_out_last(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """All but the last ``count``, and these. Raises DataError where nothing would be left to train on."""
    if count >= len(prompts):
        raise DataError(f"source.eval_tasks is {count}, and there are {len(prompts)} tasks", remedy="lower it")
    return prompts[: len(prompts) - count], prompts[len(prompts) - count :]


def cause_of(error_type: str) -> str:
    """The name under which an error is counted: ``SandboxError`` is ``sandbox``."""
    return error_type.removesuffix("Error").lower() or "error"


@dataclass(kw_only=True, eq=False)
class EpisodeSource(GroupwiseSource):
    """Groups of ``num_generations`` rollouts of the same task.

    A rollout that fails is left out of its group, as if it had never been, and counted by its cause. Others are played
    in its place, ``refill_rounds`` times; a group that has fewer than two rollouts then is dropped, and the next task
    comes in its place. The seeds of rollouts depend on the run's seed, the number of the group and their place in it,
    so those of the others are what they would have been.

    Args:
        players: the environment.
        max_concurrent: most rollouts at the same time.
        refill_rounds: how often what failed in a group is played anew.
        rollout_s: limit of one rollout, in seconds.
        generation_s: limit of all rollouts of one call, in seconds, within the deadline of the caller.
    """

    stream: PromptStream
    players: Players
    num_generations: int
    max_concurrent: int
    refill_rounds: int
    rollout_s: float | None
    seed: int
    generation_s: float | None = None

    def __post_init__(self) -> None:
        self._requests = 0
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, list[float]] = {}
        self._playing = BusyTime()
        self._slots = asyncio.Semaphore(self.max_concurrent)
        self._loop = LoopThread("lachesis-episodes", what="the source")
        self._started = False
        self._kept: KeptRollouts | None = None

    def keep(self, kept: KeptRollouts) -> None:
        """Of rollouts that are scored by themselves: those that are compared with others are whole with their group."""
        self._kept = kept

    def draw(self, count: int) -> list[Draw]:
        first = self._requests
        self._requests += count
        return [Draw(prompt, first + i) for i, prompt in enumerate(self.stream.take(count))]

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Groups of the next ``count`` tasks, less those that were dropped; where all were, of the tasks after them.

        Raises:
            RewardError: all groups of several calls in a row failed; the message has the causes.
        """
        first_request, taken = self._requests, list[Prompt]()
        try:
            for _ in range(MOST_EMPTY_BATCHES):
                draws = self.draw(count)
                taken += [draw.prompt for draw in draws]
                outcomes: dict[int, Group | RewardError] = {}
                self.roll_out(draws, deadline=deadline, done=outcomes.__setitem__)
                groups = [one for _, one in sorted(outcomes.items()) if isinstance(one, Group)]
                if groups:
                    return groups
                deadline.check("every group so far was dropped because its rollouts failed")
            raise RewardError(
                f"the rollouts of {len(taken)} groups in a row failed ({self._causes()})",
                remedy="look at the log for the first of each; mend the environment, or give rollouts more time",
            )
        except BaseException:
            self.stream.put_back(taken)
            self._requests = first_request
            raise

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        name = f"{len(draws)} groups of {self.num_generations} rollouts"
        limit = nested_deadline(name, deadline, self.generation_s, "deadlines.generation_s")
        with limit.waiting(), self._playing.span():
            self._loop.run(self._within(limit, self._groups(draws, done)))

    async def _within(self, limit: Deadline, work: Any) -> Any:
        """``work`` within the limit; where that passes, all rollouts are cancelled and have ended when this raises."""
        if limit.remaining_s() == 0.0:
            work.close()
            limit.check("nothing was begun")
        if not self._started:
            await self._start()
        self.players.report(limit)
        task = asyncio.ensure_future(work)
        await asyncio.wait([task], timeout=limit.remaining_s())
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            limit.check("rollouts were still under way")
            raise DeadlineExceeded(f"{limit.name} took too long")
        return task.result()

    async def _start(self) -> None:
        try:
            await self.players.start()
        except SystemExit as error:  # how libraries of command lines say that something is missing
            raise RewardError(f"the environment cannot be started: {error}", remedy="see what it asks for") from error
        self._started = True

    async def _groups(self, draws: Sequence[Draw], done: Done) -> None:
        async def one(place: int, draw: Draw) -> None:
            kept = KeptGroup() if self._kept is None else self._kept.of(draw.request)
            seed = request_seed(self.seed, draw.request)
            done(place, await self._group(self.stream.own(draw.prompt), seed, kept))

        async with _Together() as together:
            await together.results([together.begin(one(place, draw)) for place, draw in enumerate(draws)])

    async def _group(self, prompt: Prompt, seed: int, kept: KeptGroup) -> Group | RewardError:
        of_before = [_of_before(one) for _, one in sorted(kept.rollouts.items())]
        played = self._usable(of_before, prompt)[: self.num_generations]
        for round_number in range(self.refill_rounds + 1):
            missing = self.num_generations - len(played)
            if missing == 0:
                break
            first = self.num_generations * round_number
            numbers = [n for n in range(first, first + self.num_generations) if n not in kept.rollouts][:missing]
            self._counts["refilled_rollouts"] += len(numbers) * (round_number > 0)
            async with _Together() as together:
                tasks = [
                    together.begin(self._rollout(prompt, request_seed(seed, n), note=partial(_note, kept, n)))
                    for n in numbers
                ]
                found = [one for one in await together.results(tasks) if one is not None]
            played += self._usable(found, prompt)
        if len(played) < _FEWEST:
            self._counts["dropped_groups"] += 1
            return RewardError(f"task {prompt.id}: of {self.num_generations} rollouts {len(played)} came to an end")
        # Rubrics that compare the rollouts of a group give rewards only here.
        played = self._usable(self._scored(await self.players.finish(played), prompt), prompt)
        if len(played) < _FEWEST:
            self._counts["dropped_groups"] += 1
            return RewardError(f"task {prompt.id}: of {self.num_generations} rollouts {len(played)} can be trained on")
        samples = tuple(sample for one in played for sample in one.samples)
        self._counts["tokens_generated"] += sum(sample.num_learned for sample in samples)
        for one in played:
            for name, value in one.metrics.items():
                self._logged.setdefault(name, []).append(value)
        return Group(prompt, samples)

    async def _rollout(
        self, prompt: Prompt, seed: int, *, greedy: bool = False, note: Callable[[Played], None] = lambda played: None
    ) -> Played | None:
        async with self._slots:
            try:
                async with asyncio.timeout(self.rollout_s):
                    played = await self.players.play(prompt, seed=seed, greedy=greedy)
                note(played)
                return played
            except TimeoutError:
                late = f"task {prompt.id} was not done after {self.rollout_s:g} s"
                self._note(RolloutFailed(late, cause="timeout"), prompt)
            except RolloutFailed as failure:
                self._note(failure, prompt)
            return None

    def _scored(self, finished: Sequence[Played | RolloutFailed], prompt: Prompt) -> list[Played]:
        for one in finished:
            if isinstance(one, RolloutFailed):
                self._note(one, prompt)
        return [one for one in finished if isinstance(one, Played)]

    def _usable(self, played: Sequence[Played], prompt: Prompt) -> list[Played]:
        """Without those with a number that no trainer could compute with, which are noted as failures."""
        kept: list[Played] = []
        for one in played:
            reason = next(filter(None, map(why_unusable, one.samples)), "")
            if reason:
                self._note(RolloutFailed(f"task {prompt.id}: {reason}", cause="number"), prompt)
            else:
                kept.append(one)
        return kept

    def _note(self, failure: RolloutFailed, prompt: Prompt) -> None:
        note_failure(failure.message, cause=failure.cause, prompt_id=prompt.id)
        name = f"{_FAILURES}/{failure.cause}"
        if not self._counts[name]:
            logger.warning("a rollout failed (%s) and is left out of its group: %s", failure.cause, failure.message)
        self._counts[name] += 1
        self._counts[_FAILURES] += 1

    def _causes(self) -> str:
        prefix = f"{_FAILURES}/"
        found = {name.removeprefix(prefix): n for name, n in self._counts.items() if name.startswith(prefix)}
        return ", ".join(f"{cause} {count}" for cause, count in sorted(found.items()))

    def evaluate(self, prompts: Sequence[Prompt], *, seed: int, deadline: Deadline) -> list[Played]:
        """One greedy rollout of each task, without those that failed."""

        async def all_of_them() -> list[Played]:
            async with _Together() as together:
                tasks = [
                    together.begin(self._rollout(prompt, request_seed(seed, number), greedy=True))
                    for number, prompt in enumerate(prompts)
                ]
                return [played for played in await together.results(tasks) if played is not None]

        with deadline.waiting():
            return self._loop.run(self._within(deadline, all_of_them()))

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        """Make these tasks the next ones."""
        self.stream.put_back(prompts)
        return True

    def report_version(self, version: int) -> None:
        """Nothing is throttled: rollouts begin when they are asked for."""
        self.players.report_version(version)

    def counters(self) -> dict[str, float]:
        """Since the last call: ``generation_time`` in seconds, ``tokens_generated``, ``dropped_groups``,
        ``reward_errors`` (none: a rollout without a reward is a failure), ``refilled_rollouts``, ``rollout_failures``
        (and of these each ``rollout_failures/CAUSE``), and ``reward_metrics/NAME``, means over the rollouts."""
        counts, self._counts = self._counts, Counter()
        logged, self._logged = self._logged, {}
        names = ("tokens_generated", "dropped_groups", "reward_errors", "refilled_rollouts", _FAILURES)
        causes = [name for name in counts if name.startswith(f"{_FAILURES}/")]
        means = {f"reward_metrics/{name}": sum(values) / len(values) for name, values in logged.items()}
        seconds = {"generation_time": self._playing.take()}
        return seconds | {name: float(counts[name]) for name in (*names, *causes)} | means

    def state_dict(self) -> dict[str, Any]:
        """The place among the tasks, those put back, and the number of groups so far."""
        return {"stream": self.stream.state_dict(), "requests": self._requests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError where the tasks are others."""
        self.stream.load_state_dict(state["stream"])
        self._requests = int(state["requests"])

    def close(self) -> None:
        """Cancel what is under way and stop the environment. Idempotent."""
        self._loop.close(self.players.stop)


def _note(kept: KeptGroup, number: int, played: Played) -> None:
    if played.state is None and not any(map(why_unusable, played.samples)):
        kept.note(KeptRollout(number, played.samples, {"metrics": dict(played.metrics)}))


def _of_before(rollout: KeptRollout) -> Played:
    return Played(rollout.samples, metrics=rollout.extras["metrics"])


class _Together:
    """Tasks that end together: where one raises, or this is left, the others are cancelled and have ended."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> _Together:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def results(self, tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
        return await asyncio.gather(*tasks)


@dataclass(kw_only=True)
class EpisodeEvaluator:
    """Plays every held-out task once, greedily.

    Args:
        success_reward: a rollout with at least this reward is a success.
    """

    source: EpisodeSource
    prompts: Sequence[Prompt]
    success_reward: float
    seed: int
    generation_s: float | None

    def run(self, step: int) -> EvalResult:
        """Evaluate the engine's current weights. A rollout that failed is no success, and in no mean.

        Raises:
            RewardError: every rollout failed.
            EngineError, DeadlineExceeded.
        """
        started = time.monotonic()
        name = f"evaluation at step {step}: {len(self.prompts)} rollouts"
        deadline = Deadline(name, self.generation_s, "deadlines.generation_s")
        played = self.source.evaluate(self.prompts, seed=self.seed, deadline=deadline)
        if not played:
            message = f"evaluation at step {step}: all {len(self.prompts)} rollouts failed"
            raise RewardError(message, remedy="look into the log")
        rewards = [one.samples[-1].reward or 0.0 for one in played]
        lengths = [sum(sample.num_learned for sample in one.samples) for one in played]
        return EvalResult(
            step=step,
            accuracy=sum(reward >= self.success_reward for reward in rewards) / len(self.prompts),
            mean_reward=sum(rewards) / len(rewards),
            problems=len(self.prompts),
            mean_length=sum(lengths) / len(lengths),
            seconds=time.monotonic() - started,
        )
