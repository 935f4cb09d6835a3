"""Groups of episodes: rollouts of any length that players play with the engine, and that may fail."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from lachesis.common.contracts import contract
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError, DeadlineExceeded, EngineError, LachesisError, RewardError
from lachesis.common.types import LARGEST_NUMBER, LOWEST_LOGPROB, EvalResult, Group, Prompt, Sample, SamplingParams
from lachesis.config.section import Section
from lachesis.metrics.meters import BusyTime, Means, Tally
from lachesis.process.threads import LoopThread, fail, settle
from lachesis.rollouts.base import Done, Draw
from lachesis.rollouts.call_batcher import Completer
from lachesis.rollouts.failures import note_failure
from lachesis.rollouts.generation import SpecialTokens, request_seed
from lachesis.rollouts.judge import Judge
from lachesis.rollouts.prompt_source import PromptSource, fewest_rollouts, tell_all, too_few
from lachesis.rollouts.rewards.attempts import Item
from lachesis.rollouts.rewards.rewarder import Rewarder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Outcome: TypeAlias = Group | RewardError

logger = logging.getLogger(__name__)

_FAILURES = "rollout_failures"


def why_unusable(sample: Sample) -> str:
    """Describe a number of the sample that would make the whole batch's gradient infinite; empty if there is none."""
    for reward in (sample.reward, *sample.rewards):
        if reward is not None and not abs(reward) <= LARGEST_NUMBER:
            return f"its reward is {reward:g}"
    for value in (sample.advantage or 0.0, *(sample.token_advantages or ())):
        if not abs(value) <= LARGEST_NUMBER:
            return f"its advantage is {value:g}"
    trained = compress(sample.logprobs, sample.loss_mask())
    impossible = next((value for value in trained if value < LOWEST_LOGPROB or value == math.inf), None)
    return "" if impossible is None else f"it has a logprob of {impossible:g}, which no sampled token can have"


class RolloutFailed(LachesisError):
    """Error of a rollout that cannot be scored: it is left out of its group and counted under ``cause``."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Played:
    """A finished rollout: one sample, or several if its turns do not continue each other.

    Args:
        samples: with their rewards, unless reward functions give them.
        metrics: measurements of the rollout, by name.
        columns: columns for reward functions besides the dataset's, with a value per sample; JSON-serializable.
        state: data for :meth:`Players.finish`, if groups are scored together.
    """

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    state: Any = None


Play: TypeAlias = Callable[[], Awaitable[Played]]
"""A function that plays one rollout of a group to its end; raises as :meth:`Players.play`."""


class Players(ABC):
    """The contract of everything that plays rollouts; many are played at the same time on one event loop.

    A player only plays. :class:`Episodes` handles seeds, retries, limits, failures and their causes, records for a
    restart, and cancellation.

    ``reward_names`` name the parts of a reward, in the order of :attr:`Sample.rewards`; ``columns`` are the names
    of :attr:`Played.columns` (``None``: not known beforehand); ``stage`` names the awaited step in errors.
    """

    reward_names: tuple[str, ...] = ("environment",)
    columns: tuple[str, ...] | None = ()
    stage: str = "rollouts were still under way"

    async def start(self) -> None:
        """Start whatever all episodes share. Called once, on the loop that they run on."""
        return None

    async def begin(self, prompt: Prompt, *, seed: int, numbers: Sequence[int], greedy: bool = False) -> Sequence[Play]:
        """Do any work that these rollouts share, and return a function for each that plays it, in order.

        Args:
            prompt: of the group.
            seed: of the group; each rollout's own follows from it and its number.
            numbers: of the rollouts.
            greedy: sample greedily.
        """
        return [partial(self.play, prompt, seed=request_seed(seed, number), greedy=greedy) for number in numbers]

    @abstractmethod
    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        """Play one rollout; cancelling it ends everything that it started.

        Raises:
            RolloutFailed: the rollout cannot be scored.
            EngineError: the engine cannot serve, so other rollouts would fail too.
        """

    async def finish(self, played: Sequence[Played]) -> Sequence[Played | RolloutFailed]:
        """Return the rollouts of a group with the rewards that depend on each other.

        A rollout that could not be scored is replaced by the reason.
        """
        return list(played)

    def report(self, deadline: Deadline) -> None:
        """Note the deadline of generation from now on."""
        return None

    def report_version(self, version: int) -> None:
        """Note that the policy moved on to ``version``."""
        return None

    def take_counts(self) -> dict[str, float]:
        """Return the player's own counts since the last call, by metric."""
        return {}

    async def stop(self) -> None:
        """Undo :meth:`start`. Idempotent."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAccess:
    """Access to the model for players.

    Args:
        calls: samples its turns.
        tokenizer: of the model.
        model: its name, by which a library may know it.
        params: sampling parameters; ``max_tokens`` is the most of one turn, or of all, as the players say.
        max_context: most tokens of prompt and completion together.
        vocab_size: limit of token ids.
        special_tokens: how the text for reward functions and environments treats them.
    """

    calls: Completer
    tokenizer: PreTrainedTokenizerBase
    model: str
    params: SamplingParams
    max_context: int
    vocab_size: int
    special_tokens: SpecialTokens = "remove"


class TaskPlayers(Players):
    """Players of one environment, which know its tasks. ``keep`` holds their resources while they play."""

    keep: object = None

    @abstractmethod
    def split(self) -> tuple[list[Prompt], list[Prompt]]:
        """Return the tasks to train on, and those held out. Raises DataError where nothing is left to train on."""


class BuildsPlayers(Protocol):
    """Signature of the factory of an installed package's source, which builds the players of its tasks."""

    def __call__(
        self, policy: PolicyAccess, *, section: Section, rewarder: Rewarder | None, template_kwargs: Mapping[str, Any]
    ) -> TaskPlayers:
        """Return the players, which bring the rewards of their rollouts.

        ``policy`` samples turns, ``section`` is ``source`` of the configuration, ``rewarder`` calls
        ``rewards.functions`` where there are any, and ``template_kwargs`` are further variables of the chat template.
        """
        ...


SOURCE = contract("source", BuildsPlayers, error=EngineError, makes=TaskPlayers)


def held_out_last(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return all but the last ``count`` prompts, and the last ones. Raise DataError if none is left to train on."""
    if count >= len(prompts):
        message = f"source.eval_tasks is {count}, but there are only {len(prompts)} tasks"
        raise DataError(message, remedy="lower it, so that some are left to train on")
    return prompts[: len(prompts) - count], prompts[len(prompts) - count :]


def cause_of(error_type: str) -> str:
    """Return the name under which an error is counted: ``SandboxError`` is ``sandbox``."""
    return error_type.removesuffix("Error").lower() or "error"


class Episodes:
    """Runner of players for groups: seeds, limits, retries, failures by cause and cancellation.

    A rollout that fails is left out of its group and counted by its cause. Another is played
    in its place, ``refill_rounds`` times. The seeds depend on the group's seed and the rollout's number, so failures do
    not change those of the others.

    Args:
        max_concurrent: most rollouts at the same time; ``None``: any number.
        refill_rounds: how often a failed rollout is replayed.
        rollout_s: limit of one rollout, in seconds.
    """

    def __init__(
        self, players: Players, *, max_concurrent: int | None = None, refill_rounds: int = 0,
        rollout_s: float | None = None,
    ) -> None:  # fmt: skip
        self.players = players
        self.counts = Tally()
        self._refill_rounds = refill_rounds
        self._rollout_s = rollout_s
        self._slots = asyncio.Semaphore(max_concurrent or 1 << 30)
        self._loop = LoopThread("lachesis-episodes", what="the source")
        self._starting = asyncio.Lock()
        self._started = self._closed = False
        self._under_way: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, T], *, deadline: Deadline) -> T:
        """Return the result of ``work`` on the players' loop, from any other thread. Raises as :meth:`within`."""
        with deadline.waiting():
            return self._loop.run(self._begun(deadline, work))

    async def _begun(self, deadline: Deadline, work: Coroutine[Any, Any, T]) -> T:
        if deadline.remaining_s() == 0.0:
            work.close()
            deadline.check("no rollout was started")
        try:
            async with self._starting:
                if not self._started:
                    await self.players.start()
                    self._started = True
        except SystemExit as error:  # command-line libraries exit if something is missing
            work.close()
            message = f"the environment exited at its start: {error}"
            raise RewardError(message, remedy="provide what it asks for") from error
        except BaseException:
            work.close()
            raise
        self.players.report(deadline)
        return await self.within(deadline, work)

    async def within(self, limit: Deadline, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``.

        Raises:
            DeadlineExceeded: the limit passed; all rollouts are cancelled and have ended.
            EngineError: the source was closed meanwhile.
        """
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        try:
            while not task.done() and limit.remaining_s() != 0.0:  # progress may extend the limit
                await asyncio.wait([task], timeout=limit.remaining_s())
        finally:
            self._under_way.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            return task.result()
        if self._closed:
            raise EngineError("the source was closed while rollouts were under way", remedy="create a new source")
        limit.check(self.players.stage)
        raise DeadlineExceeded(f"{limit.name} took too long; {self.players.stage}")

    async def group(
        self, prompt: Prompt, *, seed: int, count: int, greedy: bool = False, refill: bool = True
    ) -> list[Played]:
        """Return the finished rollouts of a group, in the order of their numbers.

        Args:
            refill: play others in place of rollouts that fail.
        """
        rounds = self._refill_rounds if refill else 0

        async def chain(number: int, play: Play) -> tuple[int, Played] | None:
            for again in range(rounds + 1):
                if again:
                    number += count
                    self.counts.add(refilled_rollouts=1)
                    (play,) = await self.players.begin(prompt, seed=seed, numbers=[number], greedy=greedy)
                if (played := await self._rollout(prompt, play)) is not None:
                    return number, played
            return None

        plays = await self.players.begin(prompt, seed=seed, numbers=range(count), greedy=greedy)
        async with _Together() as together:
            chains = [together.begin(chain(number, play)) for number, play in enumerate(plays)]
            found = [one for one in await together.results(chains) if one is not None]
        return [played for _, played in sorted(found, key=lambda one: one[0])]

    async def finished(self, prompt: Prompt, played: Sequence[Played], *, fewest: int) -> list[Played]:
        """Return the rollouts of a group that can be trained on, once rubrics that compare them have scored them."""
        found = await self.players.finish(played) if len(played) >= fewest else played
        for one in found:
            if isinstance(one, RolloutFailed):
                self._note(one, prompt)
        return [one for one in found if isinstance(one, Played) and self._usable(one, prompt)]

    async def _rollout(self, prompt: Prompt, play: Play) -> Played | None:
        async with self._slots:
            try:
                async with asyncio.timeout(self._rollout_s):
                    played = await play()
                return played if self._usable(played, prompt) else None
            except TimeoutError:
                limit = "in time" if self._rollout_s is None else f"after {self._rollout_s:g} s"
                self._note(RolloutFailed(f"task {prompt.id} was not finished {limit}", cause="timeout"), prompt)
            except RolloutFailed as failure:
                self._note(failure, prompt)
            return None

    def _usable(self, played: Played, prompt: Prompt) -> bool:
        """Return False, and note a failure, if a sample has a number that no trainer could compute with."""
        if reason := next(filter(None, map(why_unusable, played.samples)), ""):
            self._note(RolloutFailed(f"task {prompt.id}: {reason}", cause="number"), prompt)
        return not reason

    def _note(self, failure: RolloutFailed, prompt: Prompt) -> None:
        note_failure(failure.message, cause=failure.cause, prompt_id=prompt.id)
        name = f"{_FAILURES}/{failure.cause}"
        if not self.counts[name]:
            logger.warning("a rollout failed (%s) and is left out of its group: %s", failure.cause, failure.message)
        self.counts.add(**{name: 1, _FAILURES: 1})

    def play_all(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], count: int, deadline: Deadline, greedy: bool = False,
        refill: bool = True,
    ) -> list[list[Played]]:  # fmt: skip
        """Return ``count`` rollouts of each prompt, without the failed ones. Called from any other thread.

        Raises:
            EngineError, DeadlineExceeded.
        """

        async def all_of_them() -> list[list[Played]]:
            async with _Together() as together:
                groups = [self.group(prompt, seed=seed, count=count, greedy=greedy, refill=refill)
                          for prompt, seed in zip(prompts, seeds, strict=True)]  # fmt: skip
                return await together.results([together.begin(group) for group in groups])

        return self.run(all_of_them(), deadline=deadline)

    def close(self) -> None:
        """Cancel running rollouts and stop the players, which may hold servers before they play. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.submit(asyncio.sleep(0))  # starts the loop, if it is not running, to stop the players on it
            self._loop.close(self._stop)

    async def _stop(self) -> None:
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.players.stop()


@dataclass(kw_only=True, eq=False)
class EpisodeSource(PromptSource):
    """Source of groups of rollouts that players play: groups are independent, so a slow one delays no other.

    A group that is left with too few rollouts is dropped.

    Args:
        players: the players; they also give the rewards, unless there is a ``rewarder``.
        max_concurrent, refill_rounds, rollout_s: those of :class:`Episodes`.
        rewarder: scores the groups once they are played.
        together: score all groups of a call in one call of each reward function, as without players; otherwise score
            finished groups while others are still being played.
    """

    queues = True
    players: Players
    max_concurrent: int | None = None
    refill_rounds: int = 0
    rollout_s: float | None = None
    rewarder: Rewarder | None = None
    together: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.episodes = Episodes(
            self.players, max_concurrent=self.max_concurrent, refill_rounds=self.refill_rounds, rollout_s=self.rollout_s
        )
        self._counts = self.episodes.counts
        self._fewest = fewest_rollouts(self.num_generations)
        self._metrics = Means()
        self._scoring: Scoring | None = None
        if self.rewarder is not None:
            if self.players.columns is not None:
                self.rewarder.check_columns({*self.stream.columns, *self.players.columns})
            self._scoring = Scoring(Judge(self.rewarder, fewest=self._fewest, counts=self._counts))

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        limit = self._generation(draws, deadline)
        self.episodes.run(self._groups(draws, limit, done), deadline=limit if self._scoring is None else deadline)

    async def _groups(self, draws: Sequence[Draw], limit: Deadline, done: Done) -> None:
        self.players.report(limit)

        async def played(draw: Draw) -> Item | RewardError:
            if self._scoring is None:
                return await self._group(draw)
            return await self.episodes.within(limit, self._group(draw))

        async def one(place: int, draw: Draw) -> None:
            item = await played(draw)
            done(place, await self._scored(item))

        async with _Together() as together:
            if self._scoring is None or not self.together:
                await together.results([together.begin(one(place, draw)) for place, draw in enumerate(draws)])
                return
            items = await together.results([together.begin(played(draw)) for draw in draws])
            outcomes = await together.results([together.begin(self._scored(item)) for item in items])
        tell_all(done, dict(enumerate(outcomes)))

    async def _scored(self, item: Item | RewardError) -> Outcome:
        if isinstance(item, RewardError):
            return item
        outcome = item.group if self._scoring is None else await self._scoring.score(item)
        self._note_pass_rates([item], [outcome])
        return outcome

    async def _group(self, draw: Draw) -> Item | RewardError:
        with self._generating.span():
            prompt = self.stream.own(draw.prompt)
            played = await self.episodes.group(prompt, seed=self._request_seed(draw), count=self.num_generations)
            played = await self.episodes.finished(prompt, played, fewest=self._fewest)
        if len(played) < self._fewest:
            self._counts.add(dropped_groups=1)
            return too_few(prompt, len(played))
        for one in played:
            self._metrics.add(one.metrics)
        item = item_of(prompt, played)
        if self._scoring is None:
            self._counts.add(tokens_generated=sum(sample.num_learned for sample in item.group.samples))
        return item

    def _all_failed(self, count: int, last: RewardError) -> RewardError:
        found = self._counts.named(f"{_FAILURES}/")
        causes = ", ".join(f"{cause} {number:g}" for cause, number in sorted(found.items()))
        if not causes:
            return super()._all_failed(count, last)
        return RewardError(
            f"the rollouts of {count} groups in a row failed ({causes}); the last: {last.message}",
            remedy="see the log for the first failure of each kind; fix the environment, or give rollouts more time",
        )

    def report_version(self, version: int) -> None:
        super().report_version(version)
        self.players.report_version(version)
        if self.rewarder is not None:
            self.rewarder.report_step(version)

    def counters(self) -> dict[str, float]:
        """Return the counts since the last call.

        These are ``generation_time`` in seconds (that overlap counts once), ``tokens_generated``, ``dropped_groups``,
        ``reward_errors``, ``refilled_rollouts``, ``rollout_failures`` (and of these each ``rollout_failures/CAUSE``),
        with a rewarder ``reward_time`` in seconds, what the players count, and ``reward_metrics/NAME``: means over
        the rollouts, or over the groups where reward functions logged them.
        """
        names = ("tokens_generated", "dropped_groups", "reward_errors", "refilled_rollouts", _FAILURES)
        seconds = {"generation_time": self._generating.take()}
        means = self._metrics.take()
        if self._scoring is not None:
            seconds["reward_time"] = self._scoring.seconds.take()
            means |= self._scoring.judge.take_means()
        return seconds | self._counts.take(*names) | self.players.take_counts() | means

    def close(self) -> None:
        """Cancel running rollouts and stop the players. Idempotent."""
        self.episodes.close()
        if self._scoring is not None:
            self._scoring.close()


class Scoring:
    """Scorer of groups on one thread while others are played: each call takes all groups finished by then."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.seconds = BusyTime()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lachesis-scoring")
        self._waiting: deque[tuple[Item, asyncio.Future[Outcome]]] = deque()

    async def score(self, item: Item) -> Outcome:
        """Return the group with its rewards, or why it was dropped. Raises as :meth:`Judge.score`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.append((item, future))
        loop.call_soon(lambda: self._thread.submit(self._score, loop))  # after all groups that finish together
        return await future

    def _score(self, loop: asyncio.AbstractEventLoop) -> None:
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not taken:
            return
        try:
            with self.seconds.span():
                outcomes = self.judge.score([item for item, _ in taken])
        except BaseException as error:  # raised again where it is waited for
            for _, future in taken:
                loop.call_soon_threadsafe(fail, future, error)
        else:
            for (_, future), outcome in zip(taken, outcomes, strict=True):
                loop.call_soon_threadsafe(settle, future, outcome)

    def close(self) -> None:
        """Begin no further call. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def item_of(prompt: Prompt, played: Sequence[Played]) -> Item:
    """Return the group of some rollouts, with the columns that all of them have."""
    names = set(played[0].columns).intersection(*(one.columns for one in played)) if played else set[str]()
    columns = {name: [value for one in played for value in one.columns[name]] for name in sorted(names)}
    return Item(Group(prompt, tuple(sample for one in played for sample in one.samples)), columns)


class _Together:
    """Tasks that end together: if one raises, or at the end of the block, the others are cancelled and awaited."""

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
    """Evaluator that plays every held-out task once, greedily.

    Args:
        success_reward: a rollout with at least this reward is a success.
    """

    source: EpisodeSource
    prompts: Sequence[Prompt]
    success_reward: float
    seed: int
    generation_s: float | None

    def run(self, step: int) -> EvalResult:
        """Evaluate the engine's current weights. A failed rollout is neither a success nor in any mean.

        Raises:
            RewardError: every rollout failed.
            EngineError, DeadlineExceeded.
        """
        started = time.monotonic()
        name = f"evaluation at step {step}: {len(self.prompts)} rollouts"
        deadline = Deadline(name, self.generation_s, "deadlines.generation_s")
        seeds = [request_seed(self.seed, number) for number in range(len(self.prompts))]
        episodes, options = self.source.episodes, {"count": 1, "greedy": True, "refill": False}
        groups = episodes.play_all(self.prompts, seeds=seeds, deadline=deadline, **options)
        played = [one for group in groups for one in group]
        if not played:
            message = f"evaluation at step {step}: all {len(self.prompts)} rollouts failed"
            raise RewardError(message, remedy="look in the log for the causes")
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
