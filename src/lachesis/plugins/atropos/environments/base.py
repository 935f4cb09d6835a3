"""Interface of an environment: problems, rollouts on them, and scores."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from lachesis.common.errors import ConfigError, DataError, DeadlineExceeded, DependencyError, EngineError
from lachesis.common.types import EvalResult, Message, SamplingParams
from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.evaluation import Attempts, causes_in_words, evaluate_environment
from lachesis.plugins.atropos.environments.records import Trajectory, UsableGroup, scored_group
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from lachesis.plugins.atropos.environments.tokenizer import text_of
from lachesis.process.tasks import together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("lachesis.plugins.atropos.environments")

# Errors that the next problem would meet again.
FATAL = (ConfigError, DeadlineExceeded, DependencyError, EngineError)

T = TypeVar("T")
Item = TypeVar("Item")
ConfigT = TypeVar("ConfigT", bound=EnvironmentConfig)


class Evaluable(ABC, Generic[Item, ConfigT]):
    """Problems for ``lachesis env eval``, and attempts at them. ``config_class`` is its section ``env``.

    Args:
        config: the section ``env``.
        client: the inference servers.
        tokenizer: the served model's tokenizer.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig

    def __init__(self, config: ConfigT, *, client: InferenceClient, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer

    async def setup(self) -> None:
        """Load resources before the first item is requested."""
        return None

    async def close(self) -> None:
        """Release the resources of :meth:`setup`. Called once, also after errors."""
        return None

    @abstractmethod
    def problems(self) -> Sequence[Item]:
        """Return the problems to try, at most ``eval_num``."""

    @abstractmethod
    async def attempts(self, item: Item, *, params: SamplingParams, count: int) -> Attempts:
        """Play ``count`` rollouts on a problem and score them together; failures are counted by cause.

        Raises:
            ConfigError, DeadlineExceeded, DependencyError, EngineError: every further rollout would fail too.
        """

    def sampling(self, *, greedy: bool = False) -> SamplingParams:
        """Return the sampling parameters of rollouts, without truncation, so that logprobs are those of the model."""
        return SamplingParams(
            max_tokens=self.config.max_new_tokens or self.config.max_token_length,
            temperature=0.0 if greedy else self.config.temperature,
        )


class Environment(Evaluable[Item, ConfigT]):
    """Maker of scored groups. Runs on an event loop, which it must not block.

    A subclass gives problems (:meth:`get_next_item`), a rollout on one (:meth:`collect_trajectory`), and scores
    (:meth:`score`); it may override more.
    """

    def __init__(self, config: ConfigT, *, client: InferenceClient, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, client=client, tokenizer=tokenizer)
        self.step = 0
        """The trainer's step, kept up to date while serving."""

    @abstractmethod
    async def get_next_item(self) -> Item | None:
        """Return the next problem; ``None`` if there are no more, which ends the environment."""

    @abstractmethod
    async def collect_trajectory(self, item: Item, *, params: SamplingParams) -> Trajectory:
        """Return one rollout on a problem, sampled with ``params`` (their ``max_tokens`` is for each turn)."""

    @abstractmethod
    async def score(self, item: Item, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """Return the score of each rollout on a problem."""

    async def collect_trajectories(self, item: Item) -> UsableGroup | None:
        """Collect and score a group of rollouts on a problem; ``None`` if this problem gives none."""
        trajectories = await self.sample_group(item)
        scores = await self.score(item, trajectories)
        return self.group_of(trajectories, scores)

    async def sample_group(self, item: Item) -> list[Trajectory]:
        """Play ``group_size`` rollouts on a problem, each by :meth:`collect_trajectory`."""
        params = self.sampling()
        rollouts = (self.collect_trajectory(item, params=params) for _ in range(self.config.group_size))
        return await together(rollouts)

    def held_out(self) -> Sequence[Item]:
        """Return problems that are never trained on, at most ``eval_num``; none without evaluation."""
        return ()

    def problems(self) -> Sequence[Item]:
        """Return the held-out problems."""
        return self.held_out()

    async def attempts(self, item: Item, *, params: SamplingParams, count: int) -> Attempts:
        """Play ``count`` rollouts on a problem; those that raise are counted by their error."""
        rollouts = (self.collect_trajectory(item, params=params) for _ in range(count))
        found = await asyncio.gather(*rollouts, return_exceptions=True)
        failures = Counter(failure_cause(one) for one in found if isinstance(one, BaseException))
        done = [one for one in found if not isinstance(one, BaseException)]
        scores = await self.score(item, done) if done else []
        return Attempts(tuple(scores), tuple(one.sampled_length for one in done), failures=failures)

    async def evaluate(self) -> EvalResult:
        """Play greedy rollouts on the held-out problems; a score of 1 or above is a success.

        A failed rollout is neither a success nor in any mean; the log has its cause.

        Raises:
            ConfigError: there are no held-out problems.
            DataError: every rollout failed.
        """
        step = self.step
        if not self.held_out():
            raise ConfigError(f"the environment {self.name} has no held-out problems", remedy="do not evaluate it")
        found = await evaluate_environment(self, samples=1, greedy=True)
        if found.failures:
            logger.warning("rollouts on held-out problems failed: %s", causes_in_words(found.failures))
        return EvalResult(
            step=step,
            accuracy=found.pass_at[1] * found.rollouts / found.problems,
            mean_reward=found.mean_reward,
            problems=found.problems,
            mean_length=found.mean_length,
            seconds=found.seconds,
        )

    def metrics(self) -> Mapping[str, float]:
        """Return this environment's own metrics since the last call, which are logged beside the usual ones."""
        return {}

    def group_of(
        self,
        trajectories: Sequence[Trajectory],
        scores: Sequence[float],
        *,
        group_overrides: Mapping[str, Any] | None = None,
    ) -> UsableGroup:
        """Make a group for the trainer. Raises DataError if no trainer could use it."""
        return scored_group(
            trajectories,
            scores,
            temperature=self.config.temperature,
            include_messages=self.config.include_messages,
            group_overrides=group_overrides,
        )

    def room(self, length: int, params: SamplingParams) -> int:
        """Return the number of tokens that may be sampled after ``length`` tokens.

        Raises:
            DataError: the prompt leaves no room for a completion.
        """
        left = self.config.max_token_length - length
        if left < 1:
            raise DataError(
                f"a prompt of {length} tokens leaves no room in rollouts of at most {self.config.max_token_length}",
                remedy="raise --env.max_token_length",
            )
        return min(params.max_tokens, left)


class SingleTurn(Environment[Item, ConfigT]):
    """An environment whose rollouts are one completion of a prompt; a group is one request."""

    @abstractmethod
    def prompt(self, item: Item) -> tuple[Sequence[int], Sequence[Message]]:
        """Return the token ids of a problem's prompt, and the same as a conversation."""

    async def collect_trajectory(self, item: Item, *, params: SamplingParams) -> Trajectory:
        """Return one completion."""
        (trajectory,) = await self._sample(item, params=params, n=1)
        return trajectory

    async def sample_group(self, item: Item) -> list[Trajectory]:
        """Sample ``group_size`` completions in one request."""
        return await self._sample(item, params=self.sampling(), n=self.config.group_size)

    async def _sample(self, item: Item, *, params: SamplingParams, n: int) -> list[Trajectory]:
        prompt_ids, messages = self.prompt(item)
        params = replace(params, max_tokens=self.room(len(prompt_ids), params))
        trajectories = []
        for sampled in await self.client.generate(prompt_ids, params=params, n=n):
            trajectory = Trajectory()
            trajectory.give(prompt_ids)
            trajectory.sample(sampled)
            answer = {"role": "assistant", "content": self.text(sampled.token_ids)}
            trajectory.messages = [*messages, answer]
            trajectories.append(trajectory)
        return trajectories

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        return text_of(self.tokenizer, token_ids)


def failure_cause(error: BaseException) -> str:
    """Return the name under which a rollout's error is counted; raise the error if it is not the rollout's fault."""
    if not isinstance(error, Exception) or isinstance(error, FATAL):
        raise error
    return type(error).__name__.removesuffix("Error").lower() or "error"


def endless(items: Sequence[Item], *, seed: int) -> Iterator[Item]:
    """Yield all items over and over, in another order each time; equal seeds give equal orders."""
    order = random.Random(seed)
    while items:
        yield from order.sample(items, len(items))
