"""What in a text calls a tool, as Hermes, Llama and Mistral write it."""

from __future__ import annotations

import pytest

from lachesis.plugins.report.written_calls import written_calls

ADD, NOW = '{"name": "add", "arguments": {"a": {"b": [1, 2]}}}', '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{NOW}</tool_call>", (ADD, NOW)),
        (f"<tool_call>{ADD}", (ADD,)),
        (f"<|python_tag|>{NOW}<|eom_id|>", (NOW,)),
        (f"<|python_tag|>{NOW}; {ADD}<|eom_id|>", (NOW, ADD)),
        ('<|python_tag|>search.call(query="rain")', ('search.call(query="rain")',)),
        (f"{NOW}<|eot_id|>", (NOW,)),
        (f"[TOOL_CALLS] [{ADD}, {NOW}]</s>", (ADD, NOW)),
        (f"I look.[TOOL_CALLS]{ADD}", (ADD,)),
        (f"[{ADD}]", (ADD,)),
        ('[TOOL_CALLS]add{"a": {"b": 1}}[TOOL_CALLS]now[ARGS]{}</s>', ('add{"a": {"b": 1}}', "now[ARGS]{}")),
        ('[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}', ('add[CALL_ID]x1[ARGS]{"a": 1}',)),
        ('[TOOL_CALLS]add{"a": ', ('add{"a":',)),
    ],
)
def test_calls_are_found_in_the_forms_of_hermes_llama_and_mistral(text: str, calls: tuple[str, ...]):
    assert written_calls(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7 < 8",
        '{"answer": 7}',
        '{"name": "Ada"}',
        '{"name": "add", "arguments": {',
        f"It would be {ADD}",
        "[1, 2]",
        "<tool_call></tool_call>",
        "<|python_tag|>",
        '{"a":' * 100_000,
    ],
)
def test_what_calls_nothing(text: str):
    assert written_calls(text) == ()
