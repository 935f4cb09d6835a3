"""Tasks of reasoning-gym: how they are named, made and scored. The library itself is imported, which takes seconds."""

from __future__ import annotations

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
from lachesis.rollouts.rewards.reasoning_gym import score

from lachesis.common.errors import ConfigError
from lachesis.plugins.environments import reasoning_gym as procedural
from lachesis.plugins.environments.reasoning_gym import Task
from lachesis.rollouts.datasets.problems import Dataset, read_rows

SMALL = "chain_sum?size=3&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def test_tasks_have_options_of_their_own():
    assert procedural.parse_tasks("reasoning_gym:chain_sum?size=5&max_terms=3,leg_counting,gcd?seed=2") == [
        Task("chain_sum", 5, 0, {"max_terms": 3}),
        Task("leg_counting", 1000, 0, {}),
        Task("gcd", 1000, 2, {}),
    ]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("chain_sums", "did you mean chain_sum"),
        ("chain_sum?size=many", "size and seed must be whole numbers"),
        ("chain_sum?size=0", "size and seed must be whole numbers"),
        ("chain_sum?terms=3", "cannot make 'chain_sum'"),
        ("chain_sum?min_terms=5&max_terms=2", "cannot make 'chain_sum'"),
    ],
)
def test_what_there_is_not_is_named(spec: str, said: str):
    with pytest.raises(ConfigError) as caught:
        for task in procedural.parse_tasks(spec):
            list(procedural.entries(task))
    assert said in str(caught.value)


def test_rows_are_questions_with_all_that_scoring_needs():
    rows, digest = read_rows(Dataset(f"reasoning_gym:{SMALL},gcd?size=2"))
    assert [row.columns["entry"]["metadata"]["source_dataset"] for row in rows] == ["chain_sum"] * 3 + ["gcd"] * 2
    for row in rows:
        columns = row.columns
        assert score([f"<answer> {columns['solution']} </answer>", columns["solution"]], [columns["entry"]] * 2) == [
            1,
            1,
        ]
        assert score([[{"role": "assistant", "content": "no idea"}]], [columns["entry"]])[0] < 0.1
    again, same = read_rows(Dataset(f"reasoning_gym:{SMALL},gcd?size=2"))
    assert (again, same) == (rows, digest)
    part, other = read_rows(Dataset(f"reasoning_gym:{SMALL.replace('seed=1', 'seed=2')}", split="train[:2]"))
    assert len(part) == 2 and other != digest


def test_problems_of_another_seed_are_others():
    """The library makes each problem from its seed and number added up: of the next seed all but one would be known."""
    shown, held_out = (
        [entry["question"] for entry in procedural.entries(Task("chain_sum", 200, seed, {}))] for seed in (0, 1)
    )
    assert len(set(shown) & set(held_out)) < 10
