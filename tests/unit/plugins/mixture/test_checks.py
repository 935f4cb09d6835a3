"""`lachesis rewards check` and `lachesis plan` over several sources: each is told by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from transformers.utils import logging as transformers_logging

from lachesis.plugins.checks.commands import rewards_check
from lachesis.plugins.planning.commands import _share_lines
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.plugins.mixture.test_rules import GAME, MATH, build

REWARDS = """
def exact(completions, answer, **columns):
    return [float(str(wanted) in str(text)) for text, wanted in zip(completions, answer)]

def always(completions, **columns):
    return [1.0] * len(completions)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "game.py").write_text("class Game:\n    pass\n")
    for name in ("sums", "words"):
        rows = [{"prompt": f"{name} {letter}", "answer": f"{letter}{letter}"} for letter in "abcd"]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"name": "sums", "data": {"path": "sums.jsonl"}, "rewards": {"functions": ["rewards.exact"]}},
        {"name": "words", "data": {"path": "words.jsonl"}, "rewards": {"functions": ["rewards.always"]}},
        {"name": "game", "source": {"kind": "steps", "environment": "game.py:Game", "max_tasks": 10}},
    ]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"run": {"steps": 2}, "model": {"path": "model"}, "sources": sources}))
    return path


def test_the_rewards_of_each_source_are_checked_on_its_own_problems(config: Path, capsys: pytest.CaptureFixture[str]):
    transformers_logging.enable_progress_bar()
    with pytest.raises(typer.Exit):  # as one of them teaches nothing
        rewards_check(config, rows=3, gold="answer")
    assert not transformers_logging.is_progress_bar_enabled()
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}
    assert "source sums" in printed and "source words" in printed
    assert "source game: its environment gives the rewards" in printed
    exact = next(values for name, values in lines.items() if "exact" in name)
    always = next(values for name, values in lines.items() if "always" in name)
    assert exact[0] == "1" and "0" in exact, "right answers are told from others"
    assert set(always) == {"1"}
    assert "problem   source words: reward function 'always' gives 1 to every answer" in printed
    assert "problem   source sums" not in printed


def test_the_plan_tells_the_share_of_each_source():
    told = _share_lines(build({**MATH, "weight": 3}, GAME, batch={"prompts_per_step": 8}))
    assert told[0] == "sources"
    assert [line.split()[:4] for line in told[1:]] == [["math", "6", "of", "8"], ["game", "2", "of", "8"]]
    assert "75 %" in told[1] and "25 %" in told[2]
