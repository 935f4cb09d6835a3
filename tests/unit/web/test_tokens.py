from __future__ import annotations

import math

import pytest

from lachesis.web.tokens import best_and_worst, colour, token_spans


@pytest.mark.parametrize(
    ("probability", "name"), [(1.0, "p0"), (0.9, "p0"), (0.89, "p1"), (0.2, "p4"), (0.01, "p6"), (0.009, "p7")]
)
def test_a_colour_is_of_a_range_of_probabilities(probability: float, name: str):
    assert colour(math.log(probability)) == name


def test_a_logprob_above_zero_by_rounding_is_certain():
    assert colour(1e-6) == "p0"


def test_spans_know_what_was_given_and_what_is_unknown():
    spans = token_spans(["a", "b", "c", "d"], [1.0, -0.12345, None], given=[True, False], after=2)
    assert spans == {
        "pieces": ["a", "b", "c", "d"],
        "logprobs": [None, -0.123, None, None],
        "given": [0],
        "after": 2,
    }


def test_of_many_the_best_and_the_worst_are_shown():
    scores = [3.0, None, 5.0, 1.0, 5.0, 2.0]
    places = range(len(scores))
    assert best_and_worst(places, score=scores.__getitem__, limit=6) == [2, 4, 0, 5, 3, 1]
    assert best_and_worst(places, score=scores.__getitem__, limit=3) == [2, 4, 1]
