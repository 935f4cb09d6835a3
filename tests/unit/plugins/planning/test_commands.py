"""What is expected of a model's packing before it is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from lachesis.config.schema import ModelConfig
from lachesis.plugins.planning.commands import way_line

MODELS = Path(__file__).parents[4] / "benchmarks" / "raw" / "models.md"


def test_what_is_expected_is_what_was_found_of_each_model_type():
    """The table of models is written by a benchmark, which runs the trainer's own probe on each of them."""
    found = re.findall(r"^\| ([\w-]+) \| (packed|padded) \|", MODELS.read_text(), re.MULTILINE)
    assert len(found) > 60
    words = {"packed": "packed, a group's prompt computed once", "padded": "on padded rows, prompts not shared"}
    for kind, way in found:
        assert f"{kind} is expected to train {words[way]};" in str(way_line(ModelConfig(path="m"), kind=kind))


def test_padded_rows_can_be_asked_for():
    assert "padded rows" in str(way_line(ModelConfig(path="m", packing="padded"), kind="qwen3"))


def test_nothing_is_said_of_models_that_transformers_lacks():
    assert way_line(ModelConfig(path="m"), kind="of_their_own_code") is None
