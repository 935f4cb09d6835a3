from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import DataError
from lachesis.common.types import Prompt
from lachesis.rollouts.datasets import PromptStream, keep_matching, ranks


def problems(*columns: dict[str, Any]) -> list[Prompt]:
    return [Prompt(id=str(i), token_ids=(i,), text=f"{i}", columns=row) for i, row in enumerate(columns)]


ROWS = problems(
    {"difficulty": "easy", "tags": ["search", "arrays"], "length": 3},
    {"difficulty": "Hard", "tags": ["graphs"], "length": 9},
    {"difficulty": "medium", "tags": [], "length": 5},
    {"difficulty": None, "tags": None, "length": None},
)


class TestFilter:
    @pytest.mark.parametrize(
        ("wanted", "kept"),
        [
            ({"difficulty": "easy"}, [0]),
            ({"difficulty": ["easy", "medium"]}, [0, 2]),
            ({"tags": ["arrays", "graphs"]}, [0, 1]),
            ({"tags": "search"}, [0]),
            ({"length": {"min": 5}}, [1, 2]),
            ({"length": {"min": 3, "max": 5}}, [0, 2]),
            ({"length": {"max": 5}, "tags": ["search", "graphs"]}, [0]),
        ],
    )
    def test_what_matches_is_kept(self, wanted: dict[str, Any], kept: list[int]):
        assert [int(one.id) for one in keep_matching(ROWS, wanted)] == kept

    def test_numbers_of_files_that_have_texts_only(self):
        rows = problems({"level": "1"}, {"level": "2"})
        assert [one.id for one in keep_matching(rows, {"level": 2})] == ["1"]
        assert [one.id for one in keep_matching(rows, {"level": {"max": 1}})] == ["0"]

    def test_a_column_that_there_is_not(self):
        with pytest.raises(DataError, match="did you mean difficulty"):
            keep_matching(ROWS, {"dificulty": "easy"})

    def test_nothing_remains(self):
        with pytest.raises(DataError, match=r"none of 4 problems.*difficulty is 'easy', 'Hard', 'medium', None"):
            keep_matching(ROWS, {"difficulty": "impossible"})

    def test_a_text_is_not_between_two_numbers(self):
        with pytest.raises(DataError, match=r"problem 0.*'easy'"):
            keep_matching(ROWS, {"difficulty": {"min": 1}})


class TestRanks:
    def test_texts_of_difficulty_and_numbers(self):
        found = ranks(ROWS, "difficulty")
        assert found[0] < found[2] < found[1] < found[3]
        assert ranks(ROWS, "length") == [3, 9, 5, float("inf")]

    def test_a_value_without_a_place(self):
        with pytest.raises(DataError, match=r"problem 0.*'b' there cannot be ordered.*data\.transform can write them"):
            ranks(problems({"stage": "b"}), "stage")


class TestOrder:
    def test_low_ranks_come_first_and_equal_ones_are_shuffled(self):
        rows = problems(*({"difficulty": i % 3} for i in range(30)))
        stream = PromptStream(rows, seed=1, ranks=ranks(rows, "difficulty"))
        first, second = stream.take(30), stream.take(30)
        for epoch in (first, second):
            assert [one.columns["difficulty"] for one in epoch] == [0] * 10 + [1] * 10 + [2] * 10
        assert [one.id for one in first] != [one.id for one in second]

    def test_it_resumes_in_the_middle(self):
        rows = problems(*({"difficulty": i % 3} for i in range(30)))
        stream = PromptStream(rows, seed=1, ranks=ranks(rows, "difficulty"))
        stream.take(13)
        state = stream.state_dict()
        again = PromptStream(rows, seed=1, ranks=ranks(rows, "difficulty"))
        again.load_state_dict(state)
        assert again.take(40) == stream.take(40)
