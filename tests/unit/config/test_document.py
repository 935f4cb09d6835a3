from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.document import describe, dotted, parse_document, read_document, to_yaml


def parse(text: str):
    return parse_document(text, name="c.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0E+2", 100.0),
        (".5", 0.5),
        ("010", 10),
        ("-3", -3),
        ("on", "on"),
        ("No", "No"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        (".inf", ".inf"),
        ('"30"', "30"),
        ("[1, a, {b: 2.5}]", [1, "a", {"b": 2.5}]),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    found = parse(f"a: {text}").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_origins_are_lines_and_fall_back_to_what_is_around():
    document = parse("# comment\na:\n  b: 1\n  c:\n    - x\n    - y\n")
    assert document.at(("a", "b")) == " (line 3)"
    assert document.at(("a", "c", 1)) == " (line 6)"
    assert document.at(("a", "missing")) == " (line 2)"
    assert document.at(("nowhere",)) == ""


def test_duplicate_keys_are_named_with_both_lines():
    document = parse("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert document.repeated == ["a.b (line 4): written twice, first in line 2"]
    assert document.data["a"]["b"] == 3


def test_merged_keys_give_way_to_those_that_are_written():
    text = (
        "base: &base {path: a, split: train}\nother: &other {path: b, name: main}\n"
        "one:\n  split: test\n  <<: *base\nboth:\n  <<: [*base, *other]\n'<<': text\n"
    )
    document = parse_document(text, name="x.yaml")
    assert document.data["one"] == {"path": "a", "split": "test"}
    assert document.data["both"] == {"path": "a", "split": "train", "name": "main"}
    assert document.data["<<"] == "text"
    assert document.at(("one", "split")) == " (line 4)"
    assert document.at(("both", "path")) == " (line 1)"
    assert not document.problems


def test_aliases_of_aliases_are_bounded():
    """Nine lines stand for a billion values, and 2,000 brackets for more calls than Python allows."""
    bomb = "\n".join(
        ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    )
    for text in (bomb, bomb.replace("[", "{<<: [").replace("]", "]}")):
        with pytest.raises(ConfigError, match=r"aliases \(\*name\) expand to more than 100,000 values"):
            parse_document(text, name="bomb.yaml")
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_document("a: " + "[" * 2000 + "]" * 2000, name="deep.yaml")


def test_an_alias_used_twice_is_no_duplicate():
    document = parse("a: &x {b: 1}\nc: *x\n")
    assert (document.problems, document.repeated) == ([], [])
    assert document.data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x [*x]", "a[0] (line 1): an alias that contains itself"),
        ("a: &x\n  <<: *x", "a (line 1): an alias that contains itself"),
        ("a:\n  <<: 3", "a.<< (line 2): takes a mapping or a list of mappings"),
        ("1: x", "top level (line 1): a key that is not text"),
        ("a:\n  ? [b]\n  : 1", "a (line 2): a key that is not text"),
        ("a: !!python/object:os.system {}", "is not supported"),
        ("a: !!set {b: null}", "is not supported"),
        ("a: !!timestamp 2024-01-01", "cannot read '2024-01-01' as timestamp"),
        ("a: 1e999", "cannot read '1e999' as float"),
        ("a: !!int abc", "cannot read 'abc' as int"),
    ],
)
def test_what_yaml_allows_and_a_configuration_does_not(text, expected):
    assert expected in "\n".join(parse(text).problems)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "c.yaml is empty"),
        ("# only a comment\n", "c.yaml is empty"),
        ("just text", "c.yaml (line 1): expected a mapping of sections, got the text 'just text'"),
        ("- a\n- b\n", "expected a mapping of sections, got a list"),
        ("a: 1\nb: [1, 2\nc: 3\n", "c.yaml (line 3"),
        ("a:\n\tb: 1\n", "c.yaml (line 2"),
        ("a: 1\n---\nb: 2\n", "c.yaml (line 2"),
        ("a: \x01", "c.yaml: not valid YAML"),
    ],
)
def test_text_that_is_no_configuration_at_all(text, expected):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert expected in caught.value.message
    assert caught.value.remedy


def test_a_file_of_nearly_that_name_is_suggested(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"no configuration file .*confg\.yml") as missing:
        read_document(tmp_path / "confg.yml")
    assert missing.value.remedy == "did you mean config.yaml?"
    with pytest.raises(ConfigError, match="Is a directory") as folder:
        read_document(tmp_path)
    assert folder.value.remedy == f"give a readable file, such as {tmp_path / 'config.yaml'}"


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="no configuration file"):
        read_document(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        read_document(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_document(tmp_path / "latin.yaml")
    (tmp_path / "grpo.py").write_text("from trl import GRPOTrainer\n")
    with pytest.raises(ConfigError, match=r"is a Python script, .* -> run it .*from lachesis\.trl import"):
        read_document(tmp_path / "grpo.py")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path):
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(tmp_path / "bom.yaml").data == {"a": 1}


def test_text_that_looks_like_something_else_survives_the_way_through_yaml():
    texts = [
        "1e-6",
        "on",
        "no",
        "1:30",
        "010",
        "~",
        "",
        "true",
        "=",
        "2024-01-01",
        "a: b",
        "é",
        "x\ny",
        " # ",
    ]
    data = {"texts": texts, "numbers": [1e-6, 1.0, 3, -0.5], "none": None, "flag": False, "nested": {"a": []}}
    assert parse(to_yaml(data)).data == data


def test_the_same_object_twice_is_written_twice():
    shared = [1, 2]
    assert "&" not in to_yaml({"a": shared, "b": shared})


def test_describe_and_dotted():
    assert describe("x" * 200).endswith("...")
    assert [describe(value) for value in (None, True, 1.5)] == ["nothing (null)", "true", "the number 1.5"]
    assert dotted(("rewards", "weights", 1)) == "rewards.weights[1]"
