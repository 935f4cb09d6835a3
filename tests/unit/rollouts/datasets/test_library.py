from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from lachesis.common.errors import DataError
from lachesis.rollouts.datasets import Dataset
from lachesis.rollouts.datasets.library import is_hub_name, read_library, select
from lachesis.rollouts.datasets.problems import read_rows
from lachesis.rollouts.datasets.rows import Row

ROWS = [Row(f"line {n}", {"n": n}) for n in range(10)]


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
        assert numbers(select(ROWS, split, Path("a.jsonl"))) == list(kept)

    @pytest.mark.parametrize("split", ["test", "train[", "train[1]", "train+test", "train[:x]", "", "test[:3]"])
    def test_other_splits(self, split):
        with pytest.raises(DataError, match=r"a\.jsonl is a file"):
            select(ROWS, split, Path("a.jsonl"))

    def test_an_empty_part(self):
        with pytest.raises(DataError, match="10 rows"):
            select(ROWS, "train[10:]", Path("a.jsonl"))


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
