"""The GPU guide, the page on scale and the table of results are what plan and the measured steps say now."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from lachesis.cli import app
from tests.paths import DOCS, ROOT


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def guide() -> ModuleType:
    return generator("generate_gpu_guide")


@pytest.mark.parametrize("name", ["generate_gpu_guide", "generate_scale"])
def test_pages_do_not_drift(name: str):
    made = generator(name)
    assert made.TARGET.read_text() == made.render(), f"run: python docs/{name}.py"


def test_the_page_of_measured_rows_does_not_drift(guide: ModuleType):
    assert guide.ROWS.read_text() == guide.render_measured(), "run: python docs/generate_gpu_guide.py"


def test_plan_is_within_a_tenth_of_what_was_measured(guide: ModuleType):
    assert guide.largest_error(row for one in guide.kept() for row in one.rows) < 0.1


class TestSeveralFiles:
    """Beside what is kept, a run over two GPUs on another day whose figures plan misses by a half."""

    @pytest.fixture
    def measurements(self, guide: ModuleType, tmp_path: Path) -> list[Any]:
        for file in ("memory.json", "memory_two_gpus.json"):
            (tmp_path / file).write_text((ROOT / "benchmarks" / "raw" / "memory.json").read_text())
        record = json.loads((tmp_path / file).read_text())
        (row,) = (row for row in record["rows"] if row["name"] == "8B, LoRA, 8192")
        two = row | {"devices": 2}
        two["measured"] = row["measured"] | {"peak": guide.plan_of(two).peak("trainer") * 2, "reserved": 99 * 10**9}
        record |= {"date": "2026-11-30", "torch": "2.12", "context_bytes": 10**9, "rows": [two]}
        (tmp_path / file).write_text(json.dumps(record))
        return guide.kept(tmp_path)

    def test_each_says_where_and_when_and_the_error_is_that_of_all(self, guide: ModuleType, measurements: list[Any]):
        first, second, error = guide.sources(measurements, directory="../")
        assert first.startswith("1. [memory.json](../memory.json): NVIDIA H200, torch 2.11") and "2026-11-22" in first
        assert "[memory_two_gpus.json]" in second and "torch 2.12" in second and "2026-11-30, rows: 1" in second
        assert "19 rows is 50.0%" in error

    def test_the_table_has_the_devices_and_each_files_own_context(self, guide: ModuleType, measurements: list[Any]):
        rows = [row.split(" | ") for row in guide.measured_rows(measurements) if "8B | LoRA | " in row]
        assert [(row[2], row[3], row[-1]) for row in rows] == [
            ("1", "1,024", "1 |"), ("1", "8,192", "1 |"), ("2", "8,192", "2 |")
        ]  # fmt: skip
        assert rows[-1][7:9] == ["-50.0%", "100.0 GB"]

    def test_what_has_no_row_is_said_to_be_planned(self, guide: ModuleType, measurements: list[Any]):
        *_, before, _ = guide.not_measured(measurements[:1])
        *_, after, four = guide.not_measured(measurements)
        assert before == "- two: all" and four == "- four: all"
        assert after == "- two: 1.5B, 3B, 8B full, 14B, 24B, 32B"

    def test_a_file_that_does_not_say_when_is_refused(self, guide: ModuleType, tmp_path: Path):
        (tmp_path / "memory.json").write_text(
            json.dumps({"gpu": "H200", "torch": "2", "transformers": "5", "rows": []})
        )
        with pytest.raises(ValueError, match=r"memory\.json lacks date, context_bytes"):
            guide.kept(tmp_path)


@pytest.mark.parametrize("page", ["one-gpu", "eight-gpus"])
def test_what_plan_says_on_a_page_of_an_audience_is_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Files of the page are written, its `lachesis plan` run, and the text block after each is in what it says."""
    monkeypatch.chdir(tmp_path)
    said, compared = "", 0
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", (DOCS / "start" / f"{page}.md").read_text(), re.M | re.S):
        if language == "yaml":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "bash" and text.startswith("lachesis plan") and "config.yaml" not in text:
            result = CliRunner().invoke(app, shlex.split(text.splitlines()[0])[1:])
            assert result.exit_code == 0, result.output
            said = result.output
        elif language == "text":
            compared += 1
            assert [line for line in text.splitlines() if line not in said.splitlines()] == []
    assert compared


def test_the_catalogue_of_recipes_has_the_memory_that_plan_counts():
    recipes = ROOT / "recipes"
    rows = re.findall(r"\]\((gsm8k/\S+)\) \| \S+ GPUs? of (\d+) GB \| (\S+) GB", (recipes / "README.md").read_text())
    assert len(rows) == 5
    for file, card, memory in rows:
        flags = ["--gpus", "8", "--card", card] if "8x" in file else ["--fit", card]
        result = CliRunner().invoke(app, ["plan", str(recipes / file), "--device", "cuda", *flags])
        assert f"it fits unchanged: {memory} GB of {card}" in result.output or f" {memory} GB: fits" in result.output
