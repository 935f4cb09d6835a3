from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DataError
from lachesis.config.schema import LachesisConfig
from lachesis.rollouts.datasets.rows import Row
from lachesis.rollouts.datasets.transforms import (
    ConfigView,
    TransformSpec,
    axolotl_names,
    load_transform,
    source_digest,
    transform_rows,
)

DOCUMENTED = """
def prompt_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        label = example["answer"].split("####")[-1].strip().replace(",", "")
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": label}
    return transform_fn, {"remove_columns": ["question"]}
"""


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch: pytest.MonkeyPatch):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def spec(tmp_path):
    def spec(text: str, name: str = "f", config: dict[str, Any] | None = None, index: int = 0) -> TransformSpec:
        (tmp_path / "mine.py").write_text(text)
        return TransformSpec(f"mine.py:{name}", tmp_path, config or {}, index)

    return spec


def apply(named: TransformSpec, *rows: dict[str, Any], tokenizer: Any = None) -> list[dict[str, Any]]:
    made = transform_rows([Row(f"line {n}", row) for n, row in enumerate(rows, start=1)], named, tokenizer)
    return [dict(row.columns) for row in made]


class TestKinds:
    def test_the_documented_one(self, spec):
        (row,) = apply(spec(DOCUMENTED, "prompt_transform"), {"question": "q", "answer": "so\n#### 1,234", "level": 1})
        assert row == {"prompt": [{"role": "user", "content": "q"}], "answer": "1234", "level": 1}

    def test_a_plain_function_of_a_row(self, spec):
        named = spec("def f(sample): return {'instruction': sample['a'], 'response': sample['b']}")
        assert apply(named, {"a": "1", "b": "2"}) == [{"a": "1", "b": "2", "instruction": "1", "response": "2"}]

    def test_a_plain_function_that_takes_the_tokenizer(self, spec):
        named = spec("def f(sample, tokenizer): return {'prompt': tokenizer(sample['a'])}")
        assert apply(named, {"a": "x"}, tokenizer=str.upper)[0]["prompt"] == "X"

    @pytest.mark.parametrize("head", ["cfg", "config", "*args", "_cfg, dataset_idx"])
    def test_functions_of_the_configuration_are_known_by_their_arguments(self, spec, head):
        named = spec(f"def f({head}): return (lambda row: {{'prompt': 'p'}}), {{}}")
        assert apply(named, {"a": 1}) == [{"a": 1, "prompt": "p"}]

    def test_the_configuration_and_the_number_of_the_dataset_get_there(self, spec):
        text = (
            "def f(cfg, *args, dataset_idx=None, **kwargs):\n"
            "    return lambda row: {'prompt': [cfg.sequence_len, cfg['trl'].num_generations, cfg.none, dataset_idx]}"
        )
        named = spec(text, config={"sequence_len": 512, "trl": {"num_generations": 8}}, index=3)
        assert apply(named, {})[0]["prompt"] == [512, 8, None, 3]

    def test_a_removed_column_that_is_made_anew_stays(self, spec):
        named = spec("def f(cfg): return (lambda row: {'a': row['a'] + 1}), {'remove_columns': ['a', 'b', 'gone']}")
        assert apply(named, {"a": 1, "b": 2, "c": 3}) == [{"c": 3, "a": 2}]

    def test_what_a_function_does_to_its_row_stays_there(self, spec):
        rows = [Row("line 1", {"a": 1})]
        transform_rows(rows, spec("def f(row):\n    row.clear()\n    return {'prompt': 'p'}"), None)  # type: ignore[arg-type]
        assert rows[0].columns == {"a": 1}


class TestErrors:
    def test_one_that_raises_names_the_row_and_the_line(self, spec):
        with pytest.raises(DataError, match=r"line 2: the transform 'mine.py:f' raised KeyError: 'q' \(mine\.py:2\)"):
            apply(spec("def f(row):\n    return {'prompt': row['q']}"), {"q": "1"}, {"p": "2"})

    @pytest.mark.parametrize("value", ["None", "'p'", "['p']"])
    def test_one_that_returns_no_columns(self, spec, value):
        with pytest.raises(DataError, match=r"line 1: .*not the row's new columns"):
            apply(spec(f"def f(row): return {value}"), {"q": "1"})

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("def f(cfg): return 3", "returned a number when given the configuration"),
            ("def f(cfg): return (lambda r: r), ['a']", "returned"),
            ("def f(cfg): return cfg.missing.name", "raised AttributeError"),
            ("def f(cfg): return (lambda r: r), {'batched': True}", "returns the option batched"),
            ("def f(cfg): return (lambda r: r), {'filter': 1}", "returns the option filter"),
            ("f = 3", "no function"),
        ],
    )
    def test_one_that_is_none(self, spec, text, message):
        with pytest.raises(ConfigError, match=message):
            load_transform(spec(text))

    def test_options_that_change_nothing_are_let_pass(self, spec):
        named = spec("def f(cfg): return (lambda r: {}), {'batched': False, 'num_proc': 4, 'remove_columns': 'a'}")
        assert apply(named, {"a": 1, "b": 2}) == [{"b": 2}]


class TestDigest:
    def test_it_changes_with_the_code_and_the_name_and_nothing_else(self, spec):
        first = source_digest(spec("def f(row): return {}\ndef g(row): return {}"))
        assert source_digest(spec("def f(row): return {}\ndef g(row): return {}", "g")) != first
        assert source_digest(spec("def f(row): return {}\ndef g(row): return {}")) == first
        assert source_digest(spec("def f(row): return {'a': 1}\ndef g(row): return {}")) != first

    def test_it_covers_what_is_imported_from_beside(self, tmp_path, spec):
        (tmp_path / "lachesis_help.py").write_text("import lachesis_deep\nTEXT = 'a'")
        (tmp_path / "lachesis_deep.py").write_text("TEXT = 'a'")
        named = spec("from lachesis_help import TEXT\ndef f(row): return {}")
        digests = [source_digest(named)]
        for name in ("help", "deep"):
            with (tmp_path / f"lachesis_{name}.py").open("a") as file:
                file.write("\nMORE = 1")
            digests.append(source_digest(named))
        assert len(set(digests)) == 3

    def test_it_covers_the_modules_of_a_package(self, tmp_path):
        package = tmp_path / "lachesis_package"
        package.mkdir()
        (package / "__init__.py").write_text("from .custom import f")
        (package / "custom.py").write_text("from . import words\ndef f(row): return {}")
        (package / "words.py").write_text("A = 1")
        named = TransformSpec("lachesis_package.f", tmp_path, {})
        first = source_digest(named)
        (package / "words.py").write_text("A = 2")
        assert source_digest(named) != first


def test_ours_stand_in_for_a_package_that_is_not_there(tmp_path):
    named = TransformSpec("grpo_code.instruction_response_transform", tmp_path, {})
    (row,) = apply(named, {"instruction": "sort", "response": "def f(): ..."})
    assert row["instruction"].startswith("sort\n\nAnswer with Python code")


def test_the_users_own_package_of_that_name_comes_first(tmp_path):
    (tmp_path / "grpo_code").mkdir()
    (tmp_path / "grpo_code" / "__init__.py").write_text("def instruction_response_transform(row): return {'mine': 1}")
    named = TransformSpec("grpo_code.instruction_response_transform", tmp_path, {})
    assert apply(named, {}) == [{"mine": 1}]


def test_what_the_users_package_does_not_have_is_found_in_ours(tmp_path):
    (tmp_path / "grpo_code").mkdir()
    (tmp_path / "grpo_code" / "__init__.py").write_text("def mine(row): return row")
    named = TransformSpec("grpo_code.instruction_response_transform", tmp_path, {})
    (row,) = apply(named, {"instruction": "sort", "response": "def f(): ..."})
    assert row["instruction"].startswith("sort")


class TestConfigView:
    VIEW = ConfigView({"a": {"b": 1}, "n": 2})

    def test_keys_are_attributes_and_nested(self):
        assert (self.VIEW.a.b, self.VIEW["a"]["b"], self.VIEW.n) == (1, 1, 2)
        assert dict(self.VIEW).keys() == {"a", "n"}

    def test_what_is_not_there_is_none(self):
        assert (self.VIEW.x, self.VIEW["x"], self.VIEW.get("x", 3), "x" in self.VIEW) == (None, None, 3, False)

    def test_it_cannot_be_changed(self):
        with pytest.raises(TypeError):
            self.VIEW["n"] = 3  # type: ignore[index]


def test_the_names_that_axolotl_has():
    config = LachesisConfig.model_validate(
        {
            "run": {"steps": 5},
            "model": {"path": "m"},
            "data": {"path": "a", "max_prompt_length": 512, "more": [{"path": "b", "split": "test"}]},
            "sampling": {"num_generations": 4},
        }
    )
    view = ConfigView(axolotl_names(config))
    assert (view.base_model, view.sequence_len, view.trl.num_generations, view.max_steps) == ("m", 512, 4, 5)
    assert [one["path"] for one in view.datasets] == ["a", "b"]
    assert json.loads(json.dumps(dict(axolotl_names(config)))) == axolotl_names(config)


def test_modules_are_looked_for_beside_the_configuration(tmp_path: Path):
    (tmp_path / "lachesis_custom.py").write_text(DOCUMENTED)
    named = TransformSpec("lachesis_custom.prompt_transform", tmp_path, {})
    assert apply(named, {"question": "q", "answer": "#### 3"})[0]["answer"] == "3"
