"""Groups of rollouts that may fail: what failed is left out and counted, and changes nothing about the others."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, RewardError
from lachesis.common.types import GenerationRequest, Group, Prompt, Sample, SamplingParams, VersionSpan
from lachesis.config.schema import AlgorithmConfig
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeSource, Played, Players, RolloutFailed
from lachesis.train.losses.advantage import advantage_function, assign_advantages
from tests.fakes import FakeEngine
from tests.waiting import LONG_S

TASKS, SIZE = 12, 8


class Dice(Players):
    """A rollout's tokens and reward follow from its task and seed. ``fails`` says which end otherwise."""

    def __init__(self, fails: Callable[[Prompt, int], Exception | None] = lambda prompt, seed: None) -> None:
        self.fails = fails
        self.seeds: list[int] = []
        self.under_way = self.most = 0
        self.stopped = False

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        self.seeds.append(seed)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0)
            if (error := self.fails(prompt, seed)) is not None:
                if isinstance(error, TimeoutError):
                    await asyncio.sleep(60)
                raise error
            return Played((sample(prompt, seed),), metrics={"turns": 2.0})
        finally:
            self.under_way -= 1

    async def stop(self) -> None:
        self.stopped = True


def sample(prompt: Prompt, seed: int) -> Sample:
    reward = random.Random(f"{prompt.id}:{seed}").random()
    return Sample((int(prompt.id),), (5, 6), (-1.0, -2.0), "stop", VersionSpan(0, 0), rewards=(reward,), reward=reward)


def source(players: Players, **changes: object) -> EpisodeSource:
    prompts = [Prompt(id=str(number), token_ids=(), text="") for number in range(TASKS)]
    options: dict = {"num_generations": SIZE, "max_concurrent": 64, "refill_rounds": 0, "rollout_s": 0.05, "seed": 3}
    return EpisodeSource(stream=PromptStream(prompts, seed=1), players=players, **(options | changes))


def groups(episodes: EpisodeSource, count: int = TASKS) -> list[Group]:
    try:
        return episodes.next_groups(count, deadline=Deadline("a test", 20.0))
    finally:
        episodes.close()


def killed(prompt: Prompt, seed: int) -> Exception | None:
    """15 % of all rollouts: some crash, some lose their sandbox, some hang."""
    draw = random.Random(f"kill:{prompt.id}:{seed}").random()
    if draw < 0.06:
        return RolloutFailed("it crashed", cause="harness")
    if draw < 0.11:
        return RolloutFailed("the sandbox is gone", cause="sandbox")
    return TimeoutError() if draw < 0.15 else None


def advantages(found: list[Group]) -> list[list[float | None]]:
    compute = advantage_function(AlgorithmConfig(), weights=None)
    return [[one.advantage for one in group.samples] for group in assign_advantages(found, compute=compute)]


def test_with_15_percent_of_rollouts_killed_advantages_are_as_if_these_had_never_been():
    episodes = source(Dice(killed))
    found = groups(episodes)
    counts = episodes.counters()
    lost = {name: count for name, count in counts.items() if name.startswith("rollout_failures/")}
    assert set(lost) == {f"rollout_failures/{cause}" for cause in ("harness", "sandbox", "timeout")}
    assert 0.08 < sum(lost.values()) / (TASKS * SIZE) < 0.25
    whole = groups(source(Dice()))
    survivors = [
        Group(group.prompt, tuple(one for one in group.samples if one in found[place].samples))
        for place, group in enumerate(whole)
    ]
    assert [len(group.samples) for group in found] == [len(group.samples) for group in survivors]
    assert found == survivors, "a rollout that failed changes nothing about the others"
    assert advantages(found) == advantages(survivors)
    assert sum(lost.values()) == TASKS * SIZE - sum(len(group.samples) for group in found)


POISON: dict[str, dict[str, Any]] = {
    "an infinite reward": {"reward": math.inf, "rewards": (math.inf,)},
    "no number": {"reward": math.nan, "rewards": (math.nan,)},
    "a reward beyond squares": {"reward": -1e308, "rewards": (-1e308,)},
    "a part beyond squares": {"rewards": (0.5, 1e308)},
    "an advantage": {"advantage": 1e38},
    "an advantage of a token": {"token_advantages": (0.0, -1e38)},
    "a logprob": {"logprobs": (-1.0, -1e308)},
    "an infinite logprob": {"logprobs": (-math.inf, -1.0)},
}


class Poisoned(Dice):
    """The first rollout of each group has such numbers, as soon as it is played or once its group is scored."""

    def __init__(self, changes: dict[str, Any], *, at_the_end: bool) -> None:
        super().__init__()
        self.changes, self.at_the_end = changes, at_the_end
        self.met: set[str] = set()

    def poisoned(self, played: Played) -> Played:
        return replace(played, samples=tuple(replace(one, **self.changes) for one in played.samples))

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        played = await super().play(prompt, seed=seed)
        first = prompt.id not in self.met
        self.met.add(prompt.id)
        return self.poisoned(played) if first and not self.at_the_end else played

    async def finish(self, played: Sequence[Played]) -> list[Played]:
        return [self.poisoned(played[0]), *played[1:]] if self.at_the_end else list(played)


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("what", POISON)
def test_numbers_that_no_trainer_can_compute_with_are_left_out_with_their_reason(
    what: str, at_the_end: bool, caplog: pytest.LogCaptureFixture
):
    episodes = source(Poisoned(POISON[what], at_the_end=at_the_end))
    found = groups(episodes, 2)
    assert [len(group.samples) for group in found] == [SIZE - 1] * 2
    assert episodes.counters()["rollout_failures/number"] == 2
    (said,) = [message for message in caplog.messages if "is left out of its group" in message]
    assert any(word in said for word in ("its reward is", "its advantage is", "a logprob of"))


class Unscored(Dice):
    """Rubrics that have no reward for all rollouts of a group but the first ``scored``."""

    def __init__(self, scored: int) -> None:
        super().__init__()
        self.scored = scored

    async def finish(self, played: Sequence[Played]) -> list[Played | RolloutFailed]:
        lost = RolloutFailed("the rubric raised", cause="rubric")
        return [one if n < self.scored else lost for n, one in enumerate(played)]


@pytest.mark.parametrize(("scored", "found"), [(2, 2), (1, 0)])
def test_a_group_with_one_reward_of_its_rubrics_is_dropped(scored: int, found: int):
    episodes = source(Unscored(scored))
    kept = groups(episodes, 2) if found else []
    if not found:
        with pytest.raises(RewardError, match=r"rollouts of 20 groups in a row failed \(rubric 140\)"):
            groups(episodes, 2)
    assert [len(group.samples) for group in kept] == [scored] * found


def test_masked_and_unknown_logprobs_are_no_poison():
    masked = {"logprobs": (-1e308, -1.0), "mask": (0, 1)}
    for changes in (masked, {"logprobs": (math.nan, -79.0)}):
        assert [len(group.samples) for group in groups(source(Poisoned(changes, at_the_end=True)), 2)] == [SIZE] * 2


def test_what_failed_is_played_anew_with_seeds_of_its_own():
    dice = Dice(killed)
    episodes = source(dice, refill_rounds=4)
    found = groups(episodes)
    assert [len(group.samples) for group in found] == [SIZE] * TASKS
    assert len(set(dice.seeds)) == len(dice.seeds) > TASKS * SIZE
    assert episodes.counters()["refilled_rollouts"] == len(dice.seeds) - TASKS * SIZE


def test_a_group_that_stays_too_small_gives_way_to_the_next_task():
    dead = {"0", "1", "2"}
    episodes = source(Dice(lambda prompt, seed: RolloutFailed("x", cause="task") if prompt.id in dead else None))
    found = groups(episodes, TASKS)
    assert not dead & {group.prompt.id for group in found}
    assert episodes.counters()["dropped_groups"] == len(dead)


def test_an_environment_whose_rollouts_all_fail_is_an_error_that_counts_the_causes():
    episodes = source(Dice(lambda prompt, seed: RolloutFailed("no disk", cause="sandbox")))
    with pytest.raises(RewardError, match="sandbox 80"):
        groups(episodes, 1)


def test_an_engine_that_fails_is_no_fault_of_a_rollout_and_nothing_is_lost():
    failing = [True]
    dice = Dice(lambda prompt, seed: EngineError("dead") if failing[0] else None)
    episodes = source(dice)
    with pytest.raises(EngineError, match="dead"):
        episodes.next_groups(3, deadline=Deadline("a test", 20.0))
    assert dice.under_way == 0
    failing[0] = False
    assert groups(episodes, 3) == groups(source(Dice()), 3)


def test_a_deadline_cancels_all_rollouts_before_it_is_told():
    dice = Dice(lambda prompt, seed: TimeoutError())
    episodes = source(dice, rollout_s=None)
    with pytest.raises(DeadlineExceeded, match="rollouts"):
        episodes.next_groups(2, deadline=Deadline("a test", 0.1))
    assert dice.under_way == 0
    episodes.close()
    assert dice.stopped


def test_players_that_never_played_are_stopped_too():
    dice = Dice()
    episodes = source(dice)
    episodes.close()
    episodes.close()
    assert dice.stopped


def test_no_more_rollouts_than_are_allowed_run_at_once():
    dice = Dice()
    groups(source(dice, max_concurrent=5))
    assert dice.most == 5


def test_a_saved_state_goes_on_exactly():
    first, second = source(Dice()), source(Dice())
    first.next_groups(5, deadline=Deadline("a test", 20.0))
    second.load_state_dict(first.state_dict())
    assert groups(first, 4) == groups(second, 4)


class Turns(Dice):
    """Each rollout asks an engine three times, by calls that several share."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self.engine = engine

    async def start(self) -> None:
        self.calls = CallBatcher(self.engine, at_once=2)

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for turn in range(3):
            await self.calls.complete(GenerationRequest((1, turn), SamplingParams(2), seed=seed))
        self.under_way -= 1
        return Played((sample(prompt, seed),))

    async def stop(self) -> None:
        await self.calls.stop()


@pytest.mark.parametrize("at_once", [2000, 100])
def test_two_thousand_episodes_share_one_loop_and_the_calls_of_the_engine(at_once: int):
    """All at once in few calls; or so many at a time, and the others wait without a task of the engine."""
    engine = FakeEngine()
    players = Turns(engine)
    episodes = source(players, num_generations=250, max_concurrent=at_once, rollout_s=LONG_S)
    found = episodes.next_groups(8, deadline=Deadline("a test", LONG_S))
    episodes.close()
    assert [len(group.samples) for group in found] == [250] * 8
    assert players.most == at_once
    assert sum(map(len, engine.requests)) == 6000 and len(engine.requests) < 10 * 6000 / at_once
    assert max(map(len, engine.requests)) <= at_once
