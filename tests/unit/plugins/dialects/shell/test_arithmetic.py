from __future__ import annotations

import pytest

from lachesis.plugins.dialects.shell.arithmetic import computed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 / -2", -3),
        ("-7 % 4", -3),
        ("010 + 1", 9),
        ("(1 + 2) * 3", 9),
        ("2 ** 3", None),
        ("1 / 0", None),
        ("A", None),
    ],
)
def test_a_sum_is_what_bash_computes(text: str, expected: int | None):
    assert computed(text) == expected
