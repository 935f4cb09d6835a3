"""Episodes as an environment over the rollout API: groups are whole, failures counted, masks those of samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from lachesis.common.errors import ConfigError, DataError, EngineError
from lachesis.common.types import Prompt, Sample, VersionSpan
from lachesis.plugins.atropos.environments.settings import parse_options
from lachesis.plugins.atropos.episode_environments import EpisodeEnvironment, EpisodesConfig, trajectory_of
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


class Episodes(EpisodeEnvironment):
    name = "episodes"
    players: TaskPlayers

    def build(self, policy: PolicyAccess) -> TaskPlayers:
        return self.players


class Names:
    name_or_path = "somewhere"


def environment(players: TaskPlayers, **config: object) -> Episodes:
    settings = EpisodesConfig.model_validate({"environment": "x", "group_size": 4} | config)
    made = Episodes(settings, client=None, tokenizer=Names())  # type: ignore[arg-type]
    made.players = players
    return made


def test_a_group_is_whole_although_rollouts_fail_and_they_are_counted():
    async def whole() -> None:
        made = environment(Scripted(fails=3))
        await made.setup()
        group = await made.collect_trajectories(await made.get_next_item())
        assert group is not None and len(group.tokens) == 4 and group.scores == [1.0, 2.0, 4.0, 5.0]
        assert group.masks[0] == [-100, -100, 3, -100, 5] and group.tokens[0] == [8, 9, 3, 7, 5]
        assert group.inference_logprobs is not None
        assert group.inference_logprobs[0] == [1.0, 1.0, -0.5, 1.0, -0.2]
        assert made.metrics() == {
            "rollout_failures": 1.0, "rollout_failures/sandbox": 1.0, "reward_metrics/turns": 2.0
        }  # fmt: skip
        assert made.metrics() == {"rollout_failures": 0.0}
        assert len(set(made.players.seeds)) == 5  # type: ignore[attr-defined]
        await made.close()
        assert made.players.stopped  # type: ignore[attr-defined]

    asyncio.run(whole())


def test_a_group_that_is_not_whole_is_none_and_an_engine_that_is_gone_ends_it():
    async def whole() -> None:
        made = environment(Scripted(fails=1))
        await made.setup()
        item = await made.get_next_item()
        with pytest.raises(DataError, match="of 4 episodes 0 came to an end"):
            await made.collect_trajectories(item)
        with pytest.raises(EngineError):
            await made.collect_trajectories(Prompt(id="9", token_ids=(), text=""))

    asyncio.run(whole())


def test_episodes_that_cannot_be_scored_are_counted_and_leave_no_whole_group():
    async def whole() -> None:
        made = environment(Scripted(unscored=1))
        await made.setup()
        item = await made.get_next_item()
        with pytest.raises(DataError, match="of 4 episodes 3 came to an end"):
            await made.collect_trajectories(item)
        assert made.metrics() == {"rollout_failures": 1.0, "rollout_failures/judge": 1.0}
        found = await made.attempts(item, params=made.sampling(), count=4)
        assert found.rewards == (6.0, 7.0, 8.0) and found.failures == {"judge": 1}

    asyncio.run(whole())


def test_held_out_tasks_are_tried_and_else_the_first():
    async def whole() -> None:
        made = environment(Scripted(fails=4))
        await made.setup()
        assert [one.id for one in made.problems()] == ["3"] and len(made.held_out()) == 1
        found = await made.attempts(made.problems()[0], params=made.sampling(), count=4)
        assert found.rewards == (1.0, 2.0, 3.0) and found.failures == {"sandbox": 1}
        assert found.metrics == {"turns": [2.0, 2.0, 2.0]} and found.lengths == (2, 2, 2)
        assert (await made.evaluate()).mean_reward == 5.0

    asyncio.run(whole())


def test_an_episode_of_several_sequences_has_no_place_in_the_protocol():
    with pytest.raises(DataError, match="2 sequences"):
        trajectory_of(Played((sample(1.0), sample(1.0))))


def test_its_arguments_are_json_on_the_command_line():
    options = parse_options(["--env.args", '{"kind": "sum"}', "--env.environment=x.py"], env_class=EpisodesConfig)
    assert options.env.args == {"kind": "sum"}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"env\.args"):
        parse_options(["--env.args", "{kind"], env_class=EpisodesConfig)


def test_it_wants_to_know_which():
    with pytest.raises(ConfigError, match=r"--env.environment"):
        asyncio.run(environment(Scripted(), environment="").setup())
