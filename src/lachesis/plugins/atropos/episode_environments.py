"""Environments that play episodes, over the rollout API: ``lachesis env verifiers serve``, ``lachesis env steps``."""

from __future__ import annotations

import asyncio
import json
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DataError
from lachesis.common.types import Completion, GenerationRequest, Prompt, Sample, SamplingParams
from lachesis.plugins.atropos.api.scored_group import NO_LOGPROB, UNTRAINED
from lachesis.plugins.atropos.environments.base import Environment, endless, together
from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.evaluation import Attempts
from lachesis.plugins.atropos.environments.records import Trajectory, UsableGroup
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from lachesis.plugins.environments.section import StepsSourceConfig, VerifiersSourceConfig
from lachesis.plugins.environments.steps.build import step_players
from lachesis.plugins.environments.verifiers.build import verifiers_players
from lachesis.rollouts.episodes import Played, PolicyAccess, RolloutFailed, TaskPlayers

# The server itself knows its model's vocabulary and refuses other tokens.
_ANY_TOKEN = 1 << 31


class EpisodesConfig(EnvironmentConfig):
    """``--env.*`` of environments that play episodes."""

    environment: str = Field("", description="which one: an id, or a FILE.py")
    args: dict[str, Any] = Field(default_factory=dict, description="its arguments, as JSON")
    max_tasks: int | None = Field(None, ge=1, description="number of tasks; needed if they are unlimited")
    eval_tasks: int = Field(0, ge=0, description="tasks that are held out")
    refill_rounds: int = Field(1, ge=0, description="how often rollouts that failed are played anew")
    rollout_s: float = Field(600.0, gt=0, description="limit of one rollout, in seconds")

    @field_validator("args", mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value


class ClientCalls:
    """Turns by inference servers, which are asked for them one by one."""

    def __init__(self, client: InferenceClient) -> None:
        self.deadline = Deadline("single turns", None)
        self._client = client

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return one completion. Raises EngineError, DeadlineExceeded as the client does."""
        asked = self._client.generate(request.prompt_ids, params=request.params, n=1, seed=request.seed)
        return (await asked)[0]

    async def stop(self) -> None:
        """Do nothing: those who wait were cancelled, and the client is closed by who made it."""


class EpisodeEnvironment(Environment[Prompt, EpisodesConfig]):
    """Environment whose groups are ``group_size`` episodes of one task; failed ones are counted and replayed.

    A group that is still incomplete is given up, and so is one with an episode of several sequences, for which the
    protocol has no place.
    """

    config_class = EpisodesConfig
    to_hold_out = "set --env.eval_tasks"

    @abstractmethod
    def build(self, policy: PolicyAccess) -> TaskPlayers:
        """Build the players of the environment that ``config.environment`` names."""

    async def setup(self) -> None:
        config = self.config
        if not config.environment:
            raise ConfigError(f"the environment {self.name} needs --env.environment", remedy="name an id or a file")
        self._failures: Counter[str] = Counter()
        self._logged: dict[str, list[float]] = {}
        self._draws = random.Random(config.seed)
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
        self._order = endless(self._training[: config.max_num], seed=config.seed)
        self._players.report(Deadline("episodes", None))
        await self._players.start()
        self._started = True

    async def close(self) -> None:
        if getattr(self, "_started", False):
            await self._players.stop()

    async def get_next_item(self) -> Prompt:
        return next(self._order)

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out[: self.config.eval_num]

    def problems(self) -> Sequence[Prompt]:
        """Return the held-out problems, or else the first ones."""
        return (self._held_out or self._training)[: self.config.eval_num]

    async def collect_trajectories(self, item: Prompt) -> UsableGroup | None:
        """Collect a whole group. Raises DataError if too many of its episodes failed."""
        played: list[Played] = []
        for _ in range(self.config.refill_rounds + 1):
            played += (await self._play(item, count=self.config.group_size - len(played)))[0]
            if len(played) == self.config.group_size:
                played = (await self._finished(played))[0]
                break
        if len(played) < self.config.group_size:
            raise DataError(
                f"task {item.id}: of {self.config.group_size} episodes {len(played)} came to an end",
                remedy="correct the environment, or give episodes more time (--env.rollout_s)",
            )
        for one in played:
            for name, value in one.metrics.items():
                self._logged.setdefault(name, []).append(value)
        return self.group_of([trajectory_of(one) for one in played], [reward_of(one) for one in played])

    async def attempts(self, item: Prompt, *, params: SamplingParams, count: int) -> Attempts:
        """Attempt a problem as any environment does, with the causes that the players give."""
        done, failures = await self._play(item, count=count, greedy=params.greedy)
        if not params.greedy:
            done, unscored = await self._finished(done)
            failures.update(unscored)
        names = {name for one in done for name in one.metrics}
        return Attempts(
            rewards=tuple(map(reward_of, done)),
            lengths=tuple(sum(sample.num_learned for sample in one.samples) for one in done),
            metrics={name: [one.metrics[name] for one in done if name in one.metrics] for name in names},
            failures=failures,
        )

    async def collect_trajectory(self, item: Prompt, *, params: SamplingParams) -> Trajectory:
        """Return the trajectory of one episode. Raises DataError where it fails."""
        done, failures = await self._play(item, count=1, greedy=params.greedy)
        if not done:
            raise DataError(f"task {item.id} failed ({', '.join(failures)})", remedy="look into the log")
        return trajectory_of(done[0])

    async def score(self, item: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """Episodes bring their rewards with them."""
        raise DataError("an episode brings its reward with it", remedy="ask for collect_trajectories")

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of failed rollouts, also by cause, and means of the environment's metrics."""
        failures, self._failures = self._failures, Counter()
        logged, self._logged = self._logged, {}
        counted = {f"rollout_failures/{cause}": float(count) for cause, count in failures.items()}
        means = {f"reward_metrics/{name}": sum(values) / len(values) for name, values in logged.items()}
        return {"rollout_failures": float(failures.total())} | counted | means

    async def _play(self, item: Prompt, *, count: int, greedy: bool = False) -> tuple[list[Played], Counter[str]]:
        """``count`` episodes at the same time: those that came to an end, and why the others did not."""
        failures: Counter[str] = Counter()

        async def one(seed: int) -> Played | None:
            try:
                async with asyncio.timeout(self.config.rollout_s):
                    return await self._players.play(item, seed=seed, greedy=greedy)
            except TimeoutError:
                failures["timeout"] += 1
            except RolloutFailed as failure:
                failures[failure.cause] += 1
            return None

        found = await together(one(self._draws.getrandbits(62)) for _ in range(count))
        self._failures.update(failures)
        return [played for played in found if played is not None], failures

    async def _finished(self, played: Sequence[Played]) -> tuple[list[Played], Counter[str]]:
        """Episodes of a group with their rewards, and why others could not be scored."""
        found = await self._players.finish(played)
        failures = Counter(one.cause for one in found if isinstance(one, RolloutFailed))
        self._failures.update(failures)
        return [one for one in found if isinstance(one, Played)], failures


class VerifiersEnvironment(EpisodeEnvironment):
    """Environments of the library verifiers, unchanged."""

    name = "verifiers"

    def build(self, policy: PolicyAccess) -> TaskPlayers:
        return verifiers_players(policy, VerifiersSourceConfig(**_keys_of(self.config, VerifiersSourceConfig)))


class StepsConfig(EpisodesConfig):
    """``--env.*`` of environments that are stepped."""

    environment: str = Field(
        "", description="FILE.py:NAME or module.NAME of a class or function, or an OpenEnv server's URL"
    )
    interface: Literal["auto", "gymnasium", "trl", "openenv"] = Field("auto", description="how it is stepped")
    tasks: str | None = Field(None, description="file with a row for each task; numbers (--env.max_tasks) if unset")
    max_turns: int = Field(8, ge=1, description="most turns of the model in a rollout")
    turn_tokens: int | None = Field(None, ge=1, description="most tokens of a turn")
    tool_parser: str = Field("hermes", description="how the model writes a call, with methods that are tools")


class StepsEnvironment(EpisodeEnvironment):
    """Environments that are stepped turn by turn, and give an episode's reward themselves."""

    name = "steps"
    config_class = StepsConfig

    def build(self, policy: PolicyAccess) -> TaskPlayers:
        config = self.config
        assert isinstance(config, StepsConfig), "the class that this one names"
        return step_players(policy, StepsSourceConfig(**_keys_of(config, StepsSourceConfig)))


EPISODES: Mapping[str, type[EpisodeEnvironment]] = {"verifiers": VerifiersEnvironment, "steps": StepsEnvironment}


def _keys_of(config: EpisodesConfig, section: type[BaseModel]) -> dict[str, Any]:
    """Return the values that a section ``source`` has keys for."""
    return {name: value for name, value in config if name in section.model_fields}


def reward_of(played: Played) -> float:
    """Return the reward of an episode: that of its last sample."""
    reward = played.samples[-1].reward
    assert reward is not None, "players give every episode its reward, or raise"
    return reward


def trajectory_of(played: Played) -> Trajectory:
    """Return the one sequence of an episode in the protocol's form. Raises DataError if it is several."""
    if len(played.samples) != 1:
        raise DataError(
            f"an episode is {len(played.samples)} sequences, for its turns do not continue each other",
            remedy="train on it with source.kind in the trainer's configuration, which takes such episodes",
        )
    return _trajectory(played.samples[0])


def _trajectory(sample: Sample) -> Trajectory:
    places = list(zip(sample.completion_ids, sample.logprobs, sample.loss_mask(), strict=True))
    before = len(sample.prompt_ids)
    return Trajectory(
        tokens=[*sample.prompt_ids, *sample.completion_ids],
        masks=[UNTRAINED] * before + [token if trains else UNTRAINED for token, _, trains in places],
        logprobs=[NO_LOGPROB] * before + [logprob if trains else NO_LOGPROB for _, logprob, trains in places],
        messages=[{"role": "assistant", "content": sample.text}],
        finish_reason=sample.finish_reason,
        versions=sample.versions,
    )
