"""Which interface an environment has, which tasks there are, and what cannot be played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DataError
from lachesis.plugins.environments.section import StepsSourceConfig
from lachesis.plugins.environments.steps.build import interface_of, task_rows
from tests.fakes import FakeEngine
from tests.unit.plugins.environments.steps.games import Count, Tools, players


def test_the_interface_is_that_of_the_methods():
    assert interface_of(Count()) == "gymnasium"
    assert interface_of(Tools()) == "trl"
    with pytest.raises(ConfigError, match=r"a \w*Path cannot be stepped"):
        interface_of(Path())


def test_tasks_are_numbers_or_rows(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"word": "a"}\n{"word": "b", "seed": 9}\n{"word": "c"}\n')
    assert task_rows(StepsSourceConfig(environment="x", max_tasks=2)) == [{"seed": 0}, {"seed": 1}]
    rows = task_rows(StepsSourceConfig(environment="x", tasks=str(file), max_tasks=2))
    assert rows == [{"seed": 0, "word": "a"}, {"seed": 9, "word": "b"}]
    with pytest.raises(DataError, match="unlimited tasks"):
        task_rows(StepsSourceConfig(environment="x"))


def test_the_last_tasks_are_held_out():
    training, held_out = players(Count, FakeEngine(), max_tasks=5, eval_tasks=2).split()
    assert [prompt.id for prompt in training] == ["0", "1", "2"] and held_out[0].columns == {"seed": 3}


def test_the_maker_gets_what_it_names():
    made: list[Any] = []

    def make(seed: int, tokenizer: Any, size: int) -> Count:
        made.append((seed, len(tokenizer("ab")["input_ids"]), size))
        return Count()

    players(make, FakeEngine(), args={"size": 4})
    assert made == [(0, 2, 4)]


class NoReward(Tools):
    get_reward = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        (lambda: 1 / 0, {}, "cannot be made: ZeroDivisionError"),
        (lambda: 3, {}, "a int cannot be stepped"),
        (NoReward, {}, "has no get_reward"),
        (Count, {"tool_parser": "a.b"}, "is only for TRL's interface"),
        (Count, {"args": {"size": 3}}, "cannot be made: TypeError"),
    ],
)
def test_what_cannot_be_played_is_said_before_the_run(env: Any, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        players(env, FakeEngine(), **settings)
