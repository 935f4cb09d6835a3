from __future__ import annotations

import time

import pytest

from lachesis.api.json_position import path_at


@pytest.mark.parametrize(
    ("text", "column", "path"),
    [
        (b'{"a": [1, [2, x', 15, ["a", 1, 1]),
        (b'{"a": 1, "b": {"c": x', 21, ["b", "c"]),
        (b'{"a, b": [x', 11, ["a, b", 0]),
        (b'{"a\\"]": [[], [x', 16, ['a\\"]', 1, 0]),
        (b"[{}, {}, x", 10, [2]),
        (b"x", 1, []),
    ],
)
def test_path(text: bytes, column: int, path: list):
    assert path_at(text, f"expected value at line 1 column {column}") == path


def test_lines_depth_and_reach():
    assert path_at(b'{"a":\n[1,\nx', "oops at line 3 column 1") == ["a", 1]
    assert len(path_at(b"[" * 300, "too deep at line 1 column 250")) == 16
    assert path_at(b"[" + b"1," * 2_000_000, "oops at line 1 column 4000001") == []
    assert path_at(b"[", "no place named") == []


def test_unfinished_strings_take_one_pass():
    start = time.thread_time()
    path_at(b'["' + b'\\"' * 500_000, "oops at line 1 column 1000003")
    assert time.thread_time() - start < 10  # seconds of work; a pass per quote would take hours
