"""What the attempts at an environment's problems come to."""

from __future__ import annotations

import asyncio
from itertools import combinations

import pytest

from lachesis.common.errors import DataError, EngineError
from lachesis.common.types import SamplingParams
from lachesis.plugins.atropos.environments.base import Environment
from lachesis.plugins.atropos.environments.evaluation import Attempts, evaluate_environment, pass_at, sizes, summary
from lachesis.plugins.atropos.environments.records import Trajectory
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig


@pytest.mark.parametrize(("rewards", "k"), [((1, 0, 0, 1), 2), ((0, 0, 1), 1), ((1, 1), 2), ((0, 0), 2)])
def test_pass_at_k_is_the_share_of_choices_with_a_success(rewards: tuple[float, ...], k: int):
    choices = list(combinations(rewards, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(k, [Attempts(rewards, (1,) * len(rewards))]) == pytest.approx(expected)


def test_sizes_are_powers_of_two_and_the_whole():
    assert sizes(1) == [1] and sizes(6) == [1, 2, 4, 6] and sizes(8) == [1, 2, 4, 8]


def test_failed_rollouts_are_in_no_mean():
    found = [
        Attempts((1.0, 0.5), (3, 5), metrics={"turns": [1.0, 3.0]}, failures={"sandbox": 2}),
        Attempts((0.0,), (4,), metrics={"turns": [2.0]}, failures={"sandbox": 1, "timeout": 2}),
    ]
    result = summary("x", found, samples=4, seconds=1.0)
    assert (result.mean_reward, result.mean_length, result.rollouts, result.problems) == (0.5, 4.0, 3, 2)
    assert result.failures == {"sandbox": 3, "timeout": 2} and result.metrics == {"turns": 2.0}
    assert result.pass_at == {1: 0.25, 2: 1.0}, "a problem with fewer rollouts says nothing of more"
    with pytest.raises(DataError, match=r"finished \(timeout 3\)"):
        summary("x", [Attempts((), (), failures={"timeout": 3})], samples=3, seconds=1.0)


class Odd(Environment[int, EnvironmentConfig]):
    """Fails at odd numbers by turns; its score is the number's half."""

    name = "odd"

    async def get_next_item(self) -> int:
        return 0

    def held_out(self) -> list[int]:
        return [0, 1, 2]

    async def collect_trajectory(self, item: int, *, params: SamplingParams) -> Trajectory:
        self.calls = getattr(self, "calls", 0) + 1
        if item == 1 and self.calls % 2:
            raise ValueError("no odd ones")
        if item == 7:
            raise EngineError("gone")
        return Trajectory(tokens=[5, 6], masks=[-100, 6], logprobs=[1.0, -0.5])

    async def score(self, item: int, trajectories: list[Trajectory]) -> list[float]:
        return [item / 2 for _ in trajectories]


def test_an_environment_is_tried_and_what_raises_is_counted():
    environment = Odd(EnvironmentConfig(), client=None, tokenizer=None)  # type: ignore[arg-type]
    result = asyncio.run(evaluate_environment(environment, samples=4))
    assert result.failures == {"value": 2} and result.rollouts == 10
    assert result.mean_reward == pytest.approx((4 * 0.0 + 2 * 0.5 + 4 * 1.0) / 10)
    assert result.document()["pass_at"].keys() == {"1", "2", "4"}
    params = SamplingParams(max_tokens=1)
    with pytest.raises(EngineError):
        asyncio.run(environment.attempts(7, params=params, count=2))
