"""Several runs on one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lachesis.common.errors import DataError
from lachesis.plugins.report.compare import compare_values, run_names, write_compare
from tests.unit.plugins.report.test_watch import write_run


def test_seeds_are_a_mean_with_a_band(tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1), write_run(tmp_path / "c", rate=1e-4)]
    values = compare_values(runs)
    assert values["groups"] == [("a and 1 more", ["a", "b"]), ("c", ["c"])]
    (reward,) = [chart for chart in values["data"]["charts"] if chart["id"] == "reward"]
    mean, alone = reward["series"]
    assert (mean["x"], mean["y"]) == ([1, 2], [0.75, 1.0])
    assert mean["band"] == [pytest.approx(0.5**0.5)] * 2
    assert "band" not in alone and alone["y"] == [0.25, 0.5]


def test_what_reward_functions_log_is_compared_too(tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rate=1e-4)]
    own = {"type": "step", "step": 3, "time": 1.0, "values": {"reward": 0.5, "reward_metrics/only_b": 7.0}}
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(own) + "\n")
    charts = {chart["title"]: chart["series"] for chart in compare_values(runs)["data"]["charts"]}
    assert [(line["label"], line["y"]) for line in charts["tools"]] == [("a", [3.0, 3.0]), ("b", [3.0, 3.0])]
    assert [(line["label"], line["x"], line["y"]) for line in charts["only_b"]] == [("b", [3], [7.0])]


def test_only_what_differs_is_listed(tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rate=1e-4)]
    (runs[1] / "config.yaml").write_text(
        (runs[1] / "config.yaml").read_text().replace("{", '{"model": {"path": "m"}, ', 1)
    )
    found = dict(compare_values(runs)["differences"])
    assert found["optimizer.learning_rate"] == ["1e-06", "0.0001"]
    assert found["model.path"] == ["–", "m"]
    assert "run.seed" not in found


def test_the_same_prompt_side_by_side(tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=1)]
    (entry,) = compare_values(runs)["prompts"]
    assert entry["prompt"] == "2+2="
    assert [(answer["step"], answer["reward"], answer["best"]) for answer in entry["answers"]] == [
        (2, "0.5", "4"),
        (1, "0.5", "4"),
    ]


def test_the_page_is_written_whole(tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rate=1e-4)]
    text = write_compare(runs, tmp_path / "compare.html").read_text()
    assert "optimizer.learning_rate" in text and "https:" not in text
    with pytest.raises(DataError, match="a comparison needs two runs"):
        write_compare(runs[:1], tmp_path / "one.html")


def test_names_that_are_alike_have_their_parents(tmp_path: Path):
    assert run_names([tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "z"]) == ["x/run", "y/run", "z"]
