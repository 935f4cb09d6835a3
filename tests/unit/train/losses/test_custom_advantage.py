"""Advantages by import path: what they are given, and what they may return."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.contracts import load_part
from lachesis.common.errors import RewardError, TrainingError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import AlgorithmConfig
from lachesis.train.losses.custom_advantage import ADVANTAGE, custom_assigner


def group(number: int, *rewards: tuple[float | None, ...]) -> Group:
    samples = tuple(Sample((1,), (2, 3), (-0.5, -0.5), "stop", VersionSpan(0, 0), rewards=row) for row in rewards)
    return Group(Prompt(id=str(number), token_ids=(1,), text="q"), samples)


GROUPS = [group(0, (1.0, None), (0.0, 2.0)), group(1, (None, None), (3.0, 4.0), (5.0, 6.0))]


def assigned(directory: Path, body: str, groups: list[Group] = GROUPS) -> list[float]:
    (directory / "mine.py").write_text(
        f"import torch\nseen = []\ndef f(rewards, *, group, weights, groups, options):\n{body}"
    )
    part = load_part(f"{directory / 'mine.py'}:f", ADVANTAGE)
    assign = custom_assigner(part, options=AlgorithmConfig(epsilon=0.3), weights=[1.0, 0.5])
    return [sample.advantage for one in assign(groups) for sample in one.samples]


def test_it_sees_all_groups_of_the_step(tmp_path: Path):
    checks = (
        "    assert rewards.shape == (5, 2) and rewards.dtype == torch.float64 and rewards.isnan().sum() == 3\n"
        "    assert group.tolist() == [0, 0, 1, 1, 1] and weights.tolist() == [1.0, 0.5]\n"
        "    assert [len(one.samples) for one in groups] == [2, 3] and options.epsilon == 0.3\n"
        "    return (rewards * weights).nansum(dim=1) - group\n"
    )
    assert assigned(tmp_path, checks) == [1.0, 1.0, 0.0, 4.0, 7.0]


def test_what_is_returned_for_a_completion_nobody_judged_does_not_count(tmp_path: Path):
    assert assigned(tmp_path, "    return [1, 2, float('nan'), 4, 5]\n") == [1.0, 2.0, 0.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0]", r"returned shape \(1,\) for 5 completions"),
        ("None", "returned a NoneType"),
        ("rewards[:, 0] / 0", "returned 4 values that are not finite, of 5"),
    ],
)
def test_anything_but_a_number_for_each_is_refused(tmp_path: Path, returned: str, message: str):
    with pytest.raises(TrainingError, match=rf"the advantage \S*mine.py:f {message}"):
        assigned(tmp_path, f"    return {returned}\n")


def test_a_step_that_nobody_judged_is_the_rewards_fault(tmp_path: Path):
    with pytest.raises(RewardError, match="abstained on all 1"):
        assigned(tmp_path, "    return [0.0]\n", [group(0, (None,))])
