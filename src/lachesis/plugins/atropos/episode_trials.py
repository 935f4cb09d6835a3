"""Trials of environments that play episodes (verifiers and stepped ones): ``lachesis env eval`` and ``env try``."""

from __future__ import annotations

import asyncio
import json
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from pydantic import field_validator

from lachesis.common.deadline import Deadline
from lachesis.common.types import Completion, GenerationRequest, Prompt, SamplingParams
from lachesis.config.section import EpisodesSourceConfig
from lachesis.plugins.atropos.environments.base import Evaluable
from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.evaluation import Attempts
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from lachesis.plugins.environments.section import StepsSourceConfig, VerifiersSourceConfig
from lachesis.plugins.environments.steps.build import step_players
from lachesis.plugins.environments.verifiers.build import verifiers_players
from lachesis.process.tasks import together
from lachesis.rollouts.episodes import Played, PolicyAccess, RolloutFailed, TaskPlayers

# The server itself knows its model's vocabulary and refuses other tokens.
_ANY_TOKEN = 1 << 31


class EpisodesConfig(EnvironmentConfig, EpisodesSourceConfig):
    """``--env.*`` of environments that play episodes: the keys of ``source`` too, with mappings as JSON.

    A trial does not train, and counts failures instead of replacing them.
    """

    NO_FLAGS: ClassVar[frozenset[str]] = frozenset({"kind", "turn_advantage", "turns_apart", "refill_rounds"})

    @field_validator("args", "renderer", mode="before", check_fields=False)
    @classmethod
    def _read(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value


class VerifiersConfig(EpisodesConfig, VerifiersSourceConfig):
    """``--env.*`` of environments of verifiers."""


class StepsConfig(EpisodesConfig, StepsSourceConfig):
    """``--env.*`` of environments that are stepped."""


EpisodesT = TypeVar("EpisodesT", bound=EpisodesConfig)


class ClientCalls:
    """Sampler of turns: it requests them from inference servers one by one."""

    def __init__(self, client: InferenceClient) -> None:
        self.deadline = Deadline("single turns", None)
        self._client = client

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return one completion. Raises EngineError, DeadlineExceeded as the client does."""
        asked = self._client.generate(request.prompt_ids, params=request.params, n=1, seed=request.seed)
        return (await asked)[0]

    async def stop(self) -> None:
        """Do nothing: waiting tasks were cancelled, and the client's maker closes it."""


class EpisodeTrial(Evaluable[Prompt, EpisodesT]):
    """Trial whose attempts are episodes, played as the trainer plays them; failed ones are counted by their cause."""

    @abstractmethod
    def build(self, policy: PolicyAccess) -> TaskPlayers:
        """Build the players of the environment that ``config.environment`` names."""

    async def setup(self) -> None:
        config = self.config
        self._draws = random.Random(config.seed)
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._players = self.build(
            PolicyAccess(
                calls=ClientCalls(self.client),
                tokenizer=self.tokenizer,
                model=str(self.tokenizer.name_or_path),
                params=self.sampling(),
                max_context=config.max_token_length,
                vocab_size=_ANY_TOKEN,
            )
        )
        self._training, self._held_out = self._players.split()
        self._players.report(Deadline("episodes", None))
        await self._players.start()
        self._started = True

    async def close(self) -> None:
        if getattr(self, "_started", False):
            await self._players.stop()

    def problems(self) -> Sequence[Prompt]:
        """Return the held-out problems, or else the first ones."""
        return (self._held_out or self._training)[: self.config.eval_num]

    async def attempts(self, item: Prompt, *, params: SamplingParams, count: int) -> Attempts:
        """Attempt a problem as any environment does, with the players' causes of failures."""
        failures: Counter[str] = Counter()
        done = await self._play(item, count=count, greedy=params.greedy, failures=failures)
        if not params.greedy:
            found = await self._players.finish(done)
            failures.update(one.cause for one in found if isinstance(one, RolloutFailed))
            done = [one for one in found if isinstance(one, Played)]
        names = {name for one in done for name in one.metrics}
        return Attempts(
            rewards=tuple(map(reward_of, done)),
            lengths=tuple(sum(sample.num_learned for sample in one.samples) for one in done),
            metrics={name: [one.metrics[name] for one in done if name in one.metrics] for name in names},
            failures=failures,
        )

    async def _play(self, item: Prompt, *, count: int, greedy: bool, failures: Counter[str]) -> list[Played]:
        """Play ``count`` episodes at the same time; return the finished ones and count the others by cause."""

        async def one(seed: int) -> Played | None:
            try:
                async with self._slots, asyncio.timeout(self.config.rollout_s):
                    return await self._players.play(item, seed=seed, greedy=greedy)
            except TimeoutError:
                failures["timeout"] += 1
            except RolloutFailed as failure:
                failures[failure.cause] += 1
            return None

        found = await together(one(self._draws.getrandbits(62)) for _ in range(count))
        return [played for played in found if played is not None]


class VerifiersTrial(EpisodeTrial[VerifiersConfig]):
    """Environments of the library verifiers, unchanged."""

    name = "verifiers"
    config_class = VerifiersConfig

    def build(self, policy: PolicyAccess) -> TaskPlayers:
        return verifiers_players(policy, self.config)


class StepsTrial(EpisodeTrial[StepsConfig]):
    """Environments that are stepped turn by turn, and give an episode's reward themselves."""

    name = "steps"
    config_class = StepsConfig

    def build(self, policy: PolicyAccess) -> TaskPlayers:
        return step_players(policy, self.config)


def reward_of(played: Played) -> float:
    """Return the reward of an episode: that of its last sample."""
    reward = played.samples[-1].reward
    assert reward is not None, "players give every episode its reward, or raise"
    return reward
