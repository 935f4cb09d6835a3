"""Every example is a configuration that can run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lachesis.common.imports import load_function
from lachesis.config.keys import find_section
from lachesis.config.load import load_argv, load_config
from lachesis.config.rules import check
from tests.paths import EXAMPLES, ROOT

RECIPES = ROOT / "recipes"
FILES = sorted(
    path
    for folder in (EXAMPLES, RECIPES)
    for path in folder.rglob("*.yaml")
    if ".cache" not in path.parts and "runs" not in path.parts
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example(path: Path, monkeypatch):
    monkeypatch.chdir(path.parent)
    loaded = load_config(path)
    findings = [*loaded.findings, *check(loaded.config)]
    said = [finding.message for finding in findings if finding.level != "note"]
    assert [message for message in said if "is not built yet" not in message] == []
    for spec in loaded.config.rewards.functions:
        file, colon, function = spec.rpartition(":")
        if not colon:
            assert spec.startswith(("grpo_code.", "lachesis."))
            continue
        assert f"def {function}(" in Path(file).read_text()


def test_there_is_one_for_each_bridge():
    kinds = {load_config(path).config.bridge.kind for path in EXAMPLES.glob("bridges/*.yaml")}
    section = find_section("bridge")
    assert section is not None and kinds == set(section.kinds)


def test_the_flags_of_the_atropos_trainer():
    loaded = load_argv(shlex.split((EXAMPLES / "atropos" / "trainer.flags").read_text()))
    check(loaded.config)
    assert loaded.config.source.kind == "atropos"
    assert loaded.config.source.batch_size == 16
    assert loaded.config.bridge.kind == "lora_only"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("7 + 5 = 12", 1.0), ("The answer is 12.", 1.0), ("012", 1.0), ("12 + 5 is 17", 0.0), ("112", 0.0), ("", 0.0)],
)
def test_the_reward_of_smollm2_takes_the_last_number(text: str, reward: float):
    right_sum = load_function("rewards.right_sum", EXAMPLES / "smollm2")
    assert right_sum([[{"role": "assistant", "content": text}]], answer=["12"]) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7 + 5 = 12", 1.0),
        (" 7 + 5 = 12\n", 1.0),
        ("7 + 5 = 13", 0.2),
        ("5 + 7 = 12", 0.0),
        ("7 + 5 = 12.", 0.0),
        ("", 0.0),
    ],
)
def test_the_bare_equation_of_smollm2_is_right_and_alone(text: str, reward: float):
    bare_equation = load_function("rewards.bare_equation", EXAMPLES / "smollm2")
    prompt = [{"role": "user", "content": "What is 7 + 5?"}]
    assert bare_equation([prompt], [[{"role": "assistant", "content": text}]], answer=["12"]) == [reward]


def test_smollm2_is_tested_on_problems_that_it_does_not_train_on():
    train, held_out = load_function("setup.py:problems", EXAMPLES / "smollm2")(seed=0)
    questions = [{row["prompt"][0]["content"] for row in rows} for rows in (train, held_out)]
    assert [len(part) for part in questions] == [300, 100] and not questions[0] & questions[1]


def test_each_recipe_is_in_the_catalogue():
    listed = re.findall(r"\]\((gsm8k/[^)]+)\)", (RECIPES / "README.md").read_text())
    assert sorted(listed) == sorted(str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.yaml"))


def test_gsm8k_is_asked_as_a_conversation_and_scored_by_its_last_number():
    problem, right = (load_function(f"gsm8k.{name}", RECIPES / "gsm8k") for name in ("problem", "right"))
    row = problem({"question": "How many?", "answer": "6 * 205 = 1,230\n#### 1,230"})
    assert row["answer"] == "1230" and row["prompt"][0]["content"].startswith("How many?")
    texts = ["It is 1,230.", "1230.00", "First 1230, then 7.", "none"]
    assert right([[{"role": "assistant", "content": text}] for text in texts], answer=["1230"] * 4) == [1, 1, 0, 0]
