from __future__ import annotations

import json
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from lachesis.common.errors import DataError
from lachesis.common.objects import NamedObjects
from lachesis.rollouts.datasets import Dataset
from lachesis.rollouts.datasets.problems import read_rows
from lachesis.rollouts.datasets.rows import Row, is_hub_name, read_file, read_library, read_object, select
from tests.ports import free_port

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
        pytest.param("a.json", '{"a":' * 100_000, "this JSON cannot be read", id="deep"),
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


TEN = [Row(f"line {n}", {"n": n}) for n in range(10)]


def numbers(rows: list[Row]) -> list[int]:
    return [row.columns["n"] for row in rows]


class TestPartsOfFiles:
    @pytest.mark.parametrize(
        ("split", "kept"),
        [
            ("train", range(10)),
            ("train[:3]", range(3)),
            ("train[8:]", range(8, 10)),
            ("train[-2:]", range(8, 10)),
            ("train[20%:50%]", range(2, 5)),
            ("train[:]", range(10)),
        ],
    )
    def test_slices(self, split, kept):
        assert numbers(select(TEN, split, Path("a.jsonl"))) == list(kept)

    @pytest.mark.parametrize("split", ["test", "train[", "train[1]", "train+test", "train[:x]", "", "test[:3]"])
    def test_other_splits(self, split):
        with pytest.raises(DataError, match=r"a\.jsonl is a file"):
            select(TEN, split, Path("a.jsonl"))

    def test_an_empty_part(self):
        with pytest.raises(DataError, match="10 rows"):
            select(TEN, "train[10:]", Path("a.jsonl"))


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("openai/gsm8k", True),
        ("gsm8k", True),
        ("data.jsonl", False),
        ("data/mine.parquet", False),
        ("./gsm8k", False),
        ("/gsm8k", False),
        ("a/b/c", False),
        ("~/x", False),
    ],
)
def test_names_on_the_hub(path, is_one):
    assert is_hub_name(path) is is_one


def test_what_is_on_the_disk_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("gsm8k")


class TestDirectories:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def test_files_of_data_with_splits(self, tmp_path):
        directory = tmp_path / "data"
        directory.mkdir()
        for split, count in (("train", 4), ("test", 2)):
            text = "\n".join(json.dumps({"prompt": f"{split} {n}"}) for n in range(count))
            (directory / f"{split}.jsonl").write_text(text)
        rows, digest = read_rows(Dataset(str(directory), split="test"))
        assert [row.columns["prompt"] for row in rows] == ["test 0", "test 1"]
        assert rows[1].place == f"{directory} (test), row 2"
        assert digest != read_rows(Dataset(str(directory), split="train[:2]"))[1]

    def test_what_was_saved_to_disk(self, tmp_path):
        parts = datasets.Dataset.from_list([{"n": n} for n in range(6)]).train_test_split(2, shuffle=False)
        parts.save_to_disk(tmp_path / "both")
        parts["train"].save_to_disk(tmp_path / "one")
        assert numbers(read_library(str(tmp_path / "both"), name=None, split="test")[0]) == [4, 5]
        assert numbers(read_library(str(tmp_path / "one"), name=None, split="train[1:3]")[0]) == [1, 2]
        with pytest.raises(DataError, match=r"no split 'dev' -> name one of: train, test"):
            read_library(str(tmp_path / "both"), name=None, split="dev")

    def test_a_directory_without_data(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match=r"cannot read the dataset .*empty") as caught:
            read_library(str(tmp_path / "empty"), name=None, split="train")
        assert "path" in caught.value.remedy


class TestHub:
    def test_name_and_split_are_handed_on(self, monkeypatch):
        asked = []

        def load(path, name, *, split):
            asked.append((path, name, split))
            return datasets.Dataset.from_list([{"prompt": "1"}])

        monkeypatch.setattr(datasets, "load_dataset", load)
        rows, digest = read_library("openai/gsm8k", name="main", split="train[:1]")
        assert asked == [("openai/gsm8k", "main", "train[:1]")]
        assert rows[0].place == "openai/gsm8k (train[:1]), row 1"
        assert digest

    def test_offline_is_said(self, monkeypatch):
        def load(path, name, *, split):
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

        monkeypatch.setattr(datasets, "load_dataset", load)
        with pytest.raises(DataError, match="openai/gsm8k, main, split 'train' is not in the cache") as caught:
            read_library("openai/gsm8k", name="main", split="train")
        assert "go online" in caught.value.remedy

    def test_a_hub_that_is_away_is_asked_once(self, monkeypatch):
        """The library by itself tries again for half a minute, also for a wrong path."""
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s to try again"))
        with pytest.raises(DataError, match="data/problems is not a file or directory here, the dataset") as caught:
            read_library("data/problems", name=None, split="train")
        assert caught.value.remedy.startswith("correct the path; or")
        assert not datasets.config.HF_HUB_OFFLINE, "later calls find the hub where it is back"

    def test_other_errors_are_told_as_they_are(self, monkeypatch):
        def load(path, name, *, split):
            raise ValueError('Unknown split "dev"')

        monkeypatch.setattr(datasets, "load_dataset", load)
        with pytest.raises(DataError, match='ValueError: Unknown split "dev"') as caught:
            read_library("openai/gsm8k", name=None, split="dev")
        assert "data.split" in caught.value.remedy

    def test_an_empty_split(self, monkeypatch):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"n": []}))
        with pytest.raises(DataError, match="'train' of the dataset openai/gsm8k is empty"):
            read_library("openai/gsm8k", name=None, split="train")


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"function": {"name": name, "arguments": arguments}}


CHAT = [
    {"prompt": [{"role": "user", "content": "hi"}], "info": {"a": None, "b": 1}},
    {
        "prompt": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call("f", x=1), call("g", y=[2])]},
        ],
        "info": {"a": 2, "b": None},
    },
]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}}
    for name in "fg"
]


@pytest.mark.parametrize("read", ["parquet", "library", "object"])
def test_messages_and_tools_have_no_keys_that_arrow_has_added(tmp_path, read: str):
    """Elsewhere a null may be what a reward looks for."""
    rows = [row | {"tools": TOOLS, "dialogues": [{"turns": row["prompt"], "note": None}]} for row in CHAT]
    if read == "object":
        found = read_object(datasets.Dataset.from_list(rows), name="data")[0]
    else:
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        path = str(tmp_path)
        found = (
            read_library(path, name=None, split="train")[0] if read == "library" else read_file(Path(path, "a.parquet"))
        )
    assert [row.columns for row in found] == rows


def test_an_object_is_one_split_whatever_its_name():
    giving = NamedObjects()
    name = giving.give("eval_data", [{"prompt": "a"}, {"prompt": "b"}])
    assert [len(read_rows(Dataset(name, split=split))[0]) for split in ("train", "test", "train[:1]")] == [2, 2, 1]
