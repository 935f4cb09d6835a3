"""Tensors that an engine takes, against those that its model has."""

from __future__ import annotations

import pytest

from lachesis.engines.serving.backend import Refused, check_fits

WANTED = {"a": (2, 3), "b": (4,), "lm_head.weight": (5, 3)}


@pytest.mark.parametrize(
    ("offered", "tied", "problem"),
    [
        (WANTED, (), ""),
        ({"a": (2, 3), "b": (4,)}, ("lm_head.weight",), ""),
        ({"a": (2, 3), "b": (4,)}, (), "lacks 1"),
        ({"a": (2, 3), "lm_head.weight": (5, 3)}, (), "lacks 1 of the model's 3 tensors, such as 'b'"),
        ({**WANTED, "c": (1,)}, (), "'c'"),
        ({**WANTED, "b": (5,)}, (), r"'b' of shape \[5\], but the model's has shape \[4\]"),
    ],
)
def test_what_fits(offered, tied, problem):
    if not problem:
        check_fits(offered, WANTED, tied=tied, what="it")
        return
    with pytest.raises(Refused, match=problem) as caught:
        check_fits(offered, WANTED, tied=tied, what="it")
    assert caught.value.status == 422
