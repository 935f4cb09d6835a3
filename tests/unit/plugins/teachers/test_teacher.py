"""Environments that a teacher's weights name have to be those of the problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DataError, LachesisError
from lachesis.run.sources import load_data

TEACHER = {"model": "teacher", "column": "subject"}


@pytest.fixture
def load(config: Any, tmp_path: Path) -> Any:
    """The problems of a run with a teacher whose options are changed; the rows are of math and of chat."""
    rows = [{"prompt": "1=", "subject": "math"}, {"prompt": "2=", "subject": "chat"}, {"prompt": "3="}]
    for name, some in (("named", rows[:2]), ("silent", rows)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in some))

    def loaded(file: str, **options: Any) -> int:
        teacher = TEACHER | options
        return len(load_data(config({"path": f"{file}.jsonl"}, algorithm={"teacher": teacher}))[0])

    return loaded


@pytest.mark.parametrize("options", [{"weights": {"math": 0.0}}, {"reward_weights": {"math": 0.0, "chat": 0.5}}])
def test_weights_of_environments_that_are_there(load: Any, options: dict[str, Any]):
    assert load("named", **options) == 2


def test_without_weights_no_problem_has_to_say_where_it_is_from(load: Any):
    assert load("silent") == 3


@pytest.mark.parametrize(
    ("file", "options", "kind", "said"),
    [
        (
            "named",
            {"weights": {"math": 0.0, "chatt": 1.0}},
            ConfigError,
            "algorithm.teacher.weights names chatt, but no problem has that value in the column subject",
        ),
        ("named", {"reward_weights": {"maths": 0.0}}, ConfigError, "algorithm.teacher.reward_weights names maths"),
        (
            "silent",
            {"weights": {"math": 0.0}},
            DataError,
            "problem 2 has no value in the column subject, which algorithm.teacher.column names; it has prompt, sub",
        ),
        (
            "named",
            {"weights": {"math": 0.0}, "column": "topic"},
            DataError,
            "problem 0 has no value in the column topic",
        ),
    ],
)
def test_what_would_weigh_nothing_is_refused(
    load: Any, file: str, options: dict[str, Any], kind: type[LachesisError], said: str
):
    with pytest.raises(kind, match=said) as refused:
        load(file, **options)
    assert refused.value.remedy
