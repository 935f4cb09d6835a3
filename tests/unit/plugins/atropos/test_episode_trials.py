"""Trials of environments that play episodes: failures are counted by their cause, and arguments are JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from lachesis.common.errors import ConfigError, EngineError
from lachesis.common.types import Prompt, Sample, VersionSpan
from lachesis.plugins.atropos.environments.settings import describe, parse_options
from lachesis.plugins.atropos.episode_trials import EpisodeTrial, StepsConfig, StepsTrial, VerifiersConfig
from lachesis.rollouts.episodes import Played, PolicyAccess, RolloutFailed, TaskPlayers, held_out_last


def sample(reward: float, mask: tuple[int, ...] | None = None) -> Sample:
    return Sample(
        prompt_ids=(8, 9), completion_ids=(3, 7, 5), logprobs=(-0.5, 0.0 if mask else -0.1, -0.2),
        finish_reason="stop", versions=VersionSpan(4, 6), text="x", mask=mask, reward=reward, rewards=(reward,),
    )  # fmt: skip


@dataclass
class Scripted(TaskPlayers):
    """Every ``fails``-th rollout fails; the reward is its number. The first ``unscored`` of a group have none."""

    fails: int = 0
    unscored: int = 0
    count: int = 0
    stopped: bool = False
    seeds: list[int] = field(default_factory=list)

    def split(self) -> tuple[list[Prompt], list[Prompt]]:
        return held_out_last([Prompt(id=str(i), token_ids=(), text="") for i in range(4)], 1)

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        self.count += 1
        self.seeds.append(seed)
        if prompt.id == "9":
            raise EngineError("gone")
        if self.fails and self.count % self.fails == 0:
            raise RolloutFailed("lost", cause="sandbox")
        return Played((sample(float(self.count), (1, 0, 1)),), metrics={"turns": 2.0})

    async def finish(self, played: Sequence[Played]) -> list[Played | RolloutFailed]:
        return [*[RolloutFailed("?", cause="judge")] * self.unscored, *played[self.unscored :]]

    async def stop(self) -> None:
        self.stopped = True


@dataclass
class Slow(Scripted):
    """Rollouts without an end; ``most`` is how many of them were under way at the same time."""

    under_way: int = 0
    most: int = 0

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.Event().wait()
        finally:
            self.under_way -= 1
        raise AssertionError("nothing sets the event")


class Episodes(EpisodeTrial[StepsConfig]):
    name = "episodes"
    config_class = StepsConfig
    players: TaskPlayers

    def build(self, policy: PolicyAccess) -> TaskPlayers:
        return self.players


class Names:
    name_or_path = "somewhere"


def environment(players: TaskPlayers, **config: object) -> Episodes:
    settings = StepsConfig.model_validate({"environment": "x"} | config)
    made = Episodes(settings, client=None, tokenizer=Names())  # type: ignore[arg-type]
    made.players = players
    return made


def test_rollouts_have_seeds_of_their_own_and_players_are_stopped():
    async def whole() -> None:
        made = environment(Scripted())
        await made.setup()
        await made.attempts(made.problems()[0], params=made.sampling(), count=5)
        assert len(set(made.players.seeds)) == 5  # type: ignore[attr-defined]
        await made.close()
        assert made.players.stopped  # type: ignore[attr-defined]

    asyncio.run(whole())


def test_an_engine_that_is_gone_ends_it():
    async def whole() -> None:
        made = environment(Scripted())
        await made.setup()
        with pytest.raises(EngineError):
            await made.attempts(Prompt(id="9", token_ids=(), text=""), params=made.sampling(), count=2)

    asyncio.run(whole())


def test_episodes_that_cannot_be_scored_are_counted():
    async def whole() -> None:
        made = environment(Scripted(unscored=1))
        await made.setup()
        found = await made.attempts(made.problems()[0], params=made.sampling(), count=4)
        assert found.rewards == (2.0, 3.0, 4.0) and found.failures == {"judge": 1}

    asyncio.run(whole())


def test_those_that_take_too_long_are_counted_and_no_more_than_asked_play_at_once():
    async def whole() -> None:
        made = environment(Slow(), rollout_s=0.05, max_concurrent=2)
        await made.setup()
        found = await made.attempts(made.problems()[0], params=made.sampling(), count=3)
        assert found.rewards == () and found.failures == {"timeout": 3}
        assert made.players.most == 2  # type: ignore[attr-defined]

    asyncio.run(whole())


def test_held_out_tasks_are_tried_and_else_the_first():
    async def whole() -> None:
        made = environment(Scripted(fails=4))
        await made.setup()
        assert [one.id for one in made.problems()] == ["3"]
        found = await made.attempts(made.problems()[0], params=made.sampling(), count=4)
        assert found.rewards == (1.0, 2.0, 3.0) and found.failures == {"sandbox": 1}
        assert found.metrics == {"turns": [2.0, 2.0, 2.0]} and found.lengths == (2, 2, 2)
        greedy = await made.attempts(made.problems()[0], params=made.sampling(greedy=True), count=1)
        assert greedy.rewards == (5.0,)

    asyncio.run(whole())


def test_its_arguments_are_json_on_the_command_line():
    words = ["--env.args", '{"kind": "sum"}', "--env.renderer", '{"name": "auto", "tool_parser": "qwen3"}']
    env = parse_options([*words, "--env.environment=x.py"], env_class=VerifiersConfig).env
    assert isinstance(env, VerifiersConfig)
    assert (env.args, env.renderer) == ({"kind": "sum"}, {"name": "auto", "tool_parser": "qwen3"})
    with pytest.raises(ConfigError, match=r"env\.args"):
        parse_options(["--env.args", "{kind", "--env.environment=x.py"], env_class=StepsConfig)


def test_it_wants_to_know_which():
    with pytest.raises(ConfigError, match=r"--env.environment"):
        parse_options([], env_class=StepsTrial.config_class)


def test_flags_are_described_with_their_defaults():
    flags = {flag: default for flag, default, _ in describe(VerifiersConfig)}
    assert flags["--env.environment"] == "" and flags["--env.args"] == "{}" and flags["--env.rollout_s"] == "600.0"


@pytest.mark.parametrize("name", ["kind", "turn_advantage", "turns_apart", "refill_rounds"])
def test_what_does_nothing_in_a_trial_has_no_flag(name: str):
    assert f"--env.{name}" not in {flag for flag, _, _ in describe(StepsConfig)}
    with pytest.raises(ConfigError, match=name):
        parse_options([f"--env.{name}=1", "--env.environment=x.py"], env_class=StepsConfig)
