from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.rollouts.tools.parsers import ToolCall, hermes, load_parser


def test_a_text_without_calls_is_its_content():
    assert hermes("7 < 8").content == "7 < 8"
    assert hermes("7 < 8").calls == ()


def test_several_calls_and_what_is_said_before_them():
    turn = hermes(
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    assert turn.content == "Let me see."
    assert turn.calls == (ToolCall("add", {"a": 1}), ToolCall("now", {}))


def test_a_call_whose_end_is_missing():
    assert hermes('<tool_call>{"name": "now", "arguments": {}}').calls == (ToolCall("now", {}),)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{name: now}</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", 'the form {"name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "arguments are not JSON"),
    ],
)
def test_what_is_no_call_says_why(text: str, error: str):
    (call,) = hermes(text).calls
    assert error in call.error


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a":' + "[" * 200_000,
        '<tool_call>{"name": "f", "arguments": {"a":' + "[" * 200 + "]" * 200 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": "' + "[" * 200_000 + '"}</tool_call>',
    ],
    ids=["cut off", "whole", "in a text"],
)
def test_nesting_that_no_tool_could_take_is_no_json(text: str):
    (call,) = hermes(text).calls
    assert "not JSON: it is nested more than 100 deep" in call.error


def test_arguments_may_be_json_in_a_text():
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>').calls == (
        ToolCall("f", {"a": 2}),
    )


class TestLoading:
    def write(self, directory: Path, body: str) -> str:
        (directory / "mine.py").write_text(f"def find(text):\n    {body}\n")
        return "mine.py:find"

    def test_a_parser_of_ones_own(self, tmp_path: Path):
        spec = self.write(tmp_path, 'return "said", [{"name": text[5:], "arguments": {"a": 1}}]')
        turn = load_parser(spec, tmp_path)("CALL now")
        assert (turn.content, turn.calls) == ("said", (ToolCall("now", {"a": 1}),))

    def test_arguments_that_it_leaves_as_a_text_may_be_anything(self, tmp_path: Path):
        parse = load_parser(self.write(tmp_path, 'return [{"name": "now", "arguments": text}]'), tmp_path)
        (call,) = parse("[" * 200_000).calls
        assert (call.name, call.error) == ("now", "the arguments are not JSON: it is nested more than 100 deep")

    @pytest.mark.parametrize("body", ['return "now"', "raise ValueError('no')", "return [{}]"])
    def test_one_that_fails_is_named(self, tmp_path: Path, body: str):
        parse = load_parser(self.write(tmp_path, body), tmp_path)
        with pytest.raises(ConfigError, match=r"mine\.py:find"):
            parse("CALL now")

    def test_a_name_that_there_is_not(self):
        with pytest.raises(ConfigError, match=r"'xml' does not exist.*hermes"):
            load_parser("xml")
