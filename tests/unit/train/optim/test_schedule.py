from __future__ import annotations

import pytest

from lachesis.train.optim.schedule import Schedule, schedule_factor, warmup_length


def course(schedule: Schedule, *, warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> list[float]:
    return [
        schedule_factor(step, schedule=schedule, total_steps=8, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
        for step in range(9)
    ]


@pytest.mark.parametrize(
    ("steps", "ratio", "length"), [(0, 0.0, 0), (5, 0.0, 5), (0, 0.1, 3), (0, 0.11, 4), (0, 0.001, 1), (0, 1.0, 30)]
)
def test_warm_up_is_given_in_steps_or_as_a_share_rounded_up(steps: int, ratio: float, length: int) -> None:
    assert warmup_length(steps=steps, ratio=ratio, total_steps=30) == length


def test_constant() -> None:
    assert course("constant") == [1.0] * 9


def test_first_step_of_warm_up_already_learns() -> None:
    assert course("constant", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1])


def test_linear_reaches_its_end_after_the_last_step() -> None:
    assert course("linear") == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])


def test_linear_after_warm_up_ends_at_its_share_of_the_peak() -> None:
    expected = [0.25, 0.5, 0.75, 1, 1, 0.775, 0.55, 0.325, 0.1]
    assert course("linear", warmup_steps=4, min_lr_ratio=0.1) == pytest.approx(expected)


def test_cosine_is_half_a_period() -> None:
    factors = course("cosine", min_lr_ratio=0.2)
    assert factors[0] == pytest.approx(1.0)
    assert factors[2] == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
    assert factors[4] == pytest.approx(0.6)
    assert factors[8] == pytest.approx(0.2)


def test_steps_beyond_the_end_stay_at_the_minimum() -> None:
    for schedule in ("linear", "cosine"):
        assert schedule_factor(99, schedule=schedule, total_steps=8, min_lr_ratio=0.3) == pytest.approx(0.3)


def test_warm_up_longer_than_the_run() -> None:
    assert schedule_factor(8, schedule="linear", total_steps=4, warmup_steps=10) == pytest.approx(0.9)
