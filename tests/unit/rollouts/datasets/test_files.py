from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from lachesis.common.errors import DataError
from lachesis.rollouts.datasets.files import read_file

ROWS = [{"prompt": "1", "answer": "2"}, {"prompt": "3", "answer": None}]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def columns(path: Path) -> list[dict]:
    return [dict(row.columns) for row in read_file(path)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, ROWS))),
        ("a.ndjson", "\n".join(map(json.dumps, ROWS))),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json", json.dumps({"version": 1, "data": ROWS}, indent=2)),
        ("a.json", json.dumps({"data": ROWS})),
        ("a.json", "\n".join(map(json.dumps, ROWS))),
        ("a.csv", "prompt,answer\n1,2\n3,\n"),
        ("a.tsv", "prompt\tanswer\r\n1\t2\r\n3\t\r\n"),
    ],
)
def test_the_same_rows_from_all_kinds(tmp_path, name, text):
    assert columns(write(tmp_path / name, text)) == ROWS


def test_parquet(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert columns(tmp_path / "a.parquet") == ROWS
    assert read_file(tmp_path / "a.parquet")[1].place.endswith("a.parquet, row 2")


def test_places_in_csv_are_lines_also_after_values_of_several_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'prompt,answer\n"1\n2",3\n4,5\n')
    first, second = read_file(path)
    assert first.columns == {"prompt": "1\n2", "answer": "3"}
    assert second.place == f"{path}, line 4"


def test_a_cell_of_any_length_in_csv(tmp_path):
    tests = "1" * 200_000
    assert columns(write(tmp_path / "a.csv", f"prompt,tests\n1,{tests}\n")) == [{"prompt": "1", "tests": tests}]


def test_a_single_line_named_json_is_a_row(tmp_path):
    assert columns(write(tmp_path / "a.json", '{"prompt": "1"}')) == [{"prompt": "1"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"prompt": "1"},\n {"prompt": }]', r"malformed JSON: Expecting value at line 2, column 13"),
        ("a.json", '{\n"prompt": "1"}', r'an object without a list under "data"'),
        ("a.json", '"text"', "a string, not a list of objects"),
        ("a.json", '[{"prompt": "1"}, 3]', "entry 2: a number, not an object"),
        ("a.json", "  ", "is empty"),
        ("a.json", "[]", "is empty"),
        ("a.csv", "prompt,answer\n1,2,3\n", "line 2: more values than the header has"),
        ("a.csv", "prompt,answer\n1\n", "line 2: fewer values than the header has"),
        ("a.csv", 'prompt\n1\n"2\n3\n', "line 3: malformed CSV: unexpected end of data"),
        ("a.csv", 'prompt\n1\n"2"3\n', "line 3: malformed CSV: ',' expected after"),
        ("a.csv", "prompt,a,a\n1,2,3\n", "the header has two columns called 'a'"),
        ("a.csv", "prompt,answer\n", "is empty"),
        ("a.parquet", "no such thing", "not a readable Parquet file"),
    ],
)
def test_bad_files_are_named_with_the_place(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message) as caught:
        read_file(write(tmp_path / name, text))
    assert name in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.parquet", "a.jsonl", "a"])
def test_missing_files_of_all_kinds(tmp_path, name):
    with pytest.raises(DataError, match="No such file"):
        read_file(tmp_path / name)


def test_csv_that_is_not_utf8(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"prompt\n\xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_file(tmp_path / "a.csv")
