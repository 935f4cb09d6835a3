"""The best evaluation is kept, and a run that does not improve ends."""

from __future__ import annotations

import pytest

from lachesis.common.types import EvalResult
from lachesis.train.best import BestModel


def evaluation(step: int, reward: float) -> EvalResult:
    return EvalResult(step=step, accuracy=0.0, mean_reward=reward, problems=4, mean_length=1.0, seconds=0.1)


@pytest.mark.parametrize(
    ("rewards", "saved", "ended_after"),
    [
        ([0.1, 0.2, 0.3, 0.4], [1, 2, 3], None),
        ([0.1, 0.2, 0.1, 0.2, 0.9], [1], 3),
        ([0.5, 0.4, 0.4], [], 2),
        ([0.1, 0.0, 0.2, 0.1, 0.3], [2, 4], None),
    ],
)
def test_the_best_is_saved_and_two_without_a_better_one_end_it(
    rewards: list[float], saved: list[int], ended_after: int | None
):
    found: list[int] = []
    best = BestModel(found.append, patience=2)
    ended = next((step for step, reward in enumerate(rewards) if best.take(evaluation(step, reward))), None)
    assert (found, ended, best.ended) == (saved, ended_after, ended_after is not None)


def test_a_resumed_run_goes_on_from_its_earlier_evaluations():
    found: list[int] = []
    best = BestModel(found.append, patience=2)
    best.recall([evaluation(0, 0.1), evaluation(2, 0.5), evaluation(4, 0.4)])
    assert (found, best.ended) == ([], False), "that model is there already"
    assert best.take(evaluation(6, 0.5)), "the second in a row"


def test_without_patience_it_never_ends():
    best = BestModel(None, patience=None)
    assert not any(best.take(evaluation(step, -step)) for step in range(20))
