from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.common.types import Finding
from lachesis.plugins.checks.data import check_data
from lachesis.rollouts.datasets import Dataset
from tests.tiny import tiny_tokenizer

ROW = {"instruction": "Add", "response": "def add(a, b):\n    return a + b"}


@pytest.fixture
def check(tmp_path):
    def check(*rows: Any, name: str = "a.jsonl", dataset: dict[str, Any] | None = None, **options: Any):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return check_data(Dataset(str(path), **(dataset or {})), base_dir=tmp_path, **options)

    return check


def of_rule(findings: list[Finding], rule: str) -> list[str]:
    return [finding.message for finding in findings if finding.rule == rule]


def test_a_good_dataset_gets_notes_alone(check):
    findings = check(*({"instruction": f"Add {n}", "response": "def f(): ..."} for n in range(1000)))
    assert {finding.level for finding in findings} == {"note"}
    assert of_rule(findings, "format") == ["1000 rows of the format instruction_response: instruction, response"]
    assert "1,000 problems, enough for a prototype" in of_rule(findings, "size")[0]


def test_every_bad_line_is_told_and_the_others_are_looked_at(check):
    findings = check(ROW, '{"instruction": ', ROW | {"instruction": "Sub"}, "[1]")
    unreadable = of_rule(findings, "unreadable")
    assert "line 2: malformed JSON" in unreadable[0]
    assert "line 4: a list, not an object" in unreadable[1]
    assert of_rule(findings, "size")[0].startswith("2 problems")


def test_problems_come_first_and_many_of_a_kind_are_counted(check):
    findings = check(*[{"instruction": "", "response": "x"}] * 9, ROW)
    assert findings[0].level == "problem"
    missing = of_rule(findings, "missing")
    assert len(missing) == 6
    assert "line 1: column 'instruction' is empty" in missing[0]
    assert missing[-1] == "4 more of this kind (missing)"
    assert [finding.level for finding in findings] == sorted(
        (finding.level for finding in findings), key=["problem", "warning", "note"].index
    )


def test_answers_that_are_missing(check):
    assert "line 2: column 'response' is empty" in of_rule(check(ROW, {"instruction": "b"}), "no answer")[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"response": "def add(a, b:\n    return a"}, "column 'response' does not parse: .* in line 1 of it"),
        (ROW | {"response": "Sure:\n```python\ndef f(:\n```", "test_cases": ["f()"]}, "column 'response'"),
        (ROW | {"test_cases": ["assert add(1, 2 == 3"]}, "column 'test_cases' does not parse"),
    ],
)
def test_code_that_does_not_parse(check, row, message):
    (found,) = of_rule(check(row), "syntax")
    assert re.search(f"line 1: the code in {message}", found)


def test_prose_is_not_taken_for_code(check):
    assert not of_rule(check(ROW | {"response": "The answer is 3, of course (see above."}), "syntax")


def test_tests_that_are_none(check):
    assert "line 1: test_cases must be a list of strings" in of_rule(check(ROW | {"test_cases": [3]}), "tests")[0]


def test_duplicates_are_told_apart(check):
    same, other = of_rule(check(ROW, ROW, ROW | {"response": "x = 1"}), "duplicate")
    assert "line 2: repeats the question of" in same
    assert same.endswith("line 1, with the same answer")
    assert "line 3: " in other
    assert other.endswith("with another answer")


def test_lengths_in_tokens(check):
    rows = [{"prompt": "1" * n, "answer": "2" * n} for n in (1, 2, 3, 20)]
    findings = check(*rows, tokenizer=tiny_tokenizer(), max_prompt_length=10)
    assert of_rule(findings, "length") == ["prompts have 2.5 (median), 20 (95 % are shorter), at most 20 tokens"]
    assert "line 4: the prompt has 20 tokens, but only 10 are allowed" in of_rule(findings, "too long")[0]
    assert "answers have 2.5" in of_rule(findings, "answer length")[0]


def test_a_conversation_without_a_template(check):
    row = {"prompt": [{"role": "user", "content": "1"}]}
    assert "no chat template" in of_rule(check(row, tokenizer=tiny_tokenizer()), "template")[0]


def test_transforms_that_fail_on_some_rows(check, tmp_path):
    (tmp_path / "mine.py").write_text("def f(row): return {'prompt': row['q'].strip()}")
    findings = check({"q": "1"}, {"q": None}, dataset={"transform": "mine.py:f"})
    assert "line 2: the transform 'mine.py:f' raised AttributeError" in of_rule(findings, "transform")[0]
    with pytest.raises(ConfigError, match="no function 'g'"):
        check({"q": "1"}, dataset={"transform": "mine.py:g"})


def test_columns_that_fit_several_formats(check):
    assert "several ways" in of_rule(check(ROW | {"input": "a", "output": "b"}), "format")[0]


@pytest.mark.parametrize("rows", [[], ["{"]])
def test_nothing_that_remains_is_a_problem(check, rows):
    findings = check(*rows)
    assert Finding("problem", "size", "no problem to train on remains") in findings


def test_files_of_other_kinds_and_missing_ones(check, tmp_path):
    assert "malformed JSON" in of_rule(check('[{"prompt": }]', name="a.json"), "unreadable")[0]
    (found,) = of_rule(check_data(Dataset(str(Path(tmp_path, "none.jsonl")))), "unreadable")
    assert "No such file" in found


def test_few_problems_are_warned_of(check):
    (finding,) = [finding for finding in check(ROW) if finding.rule == "size"]
    assert finding.level == "warning"
