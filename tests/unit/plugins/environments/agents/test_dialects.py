"""What is read of bodies, in the format of chat templates, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lachesis.plugins.environments.agents import chat, google, messages, responses
from lachesis.plugins.environments.agents.requests import Asked, AssistantCall, AssistantTurn, BadRequest

CALL = AssistantCall("call00000", "add", {"a": 1})
ASKED = {
    "role": "assistant",
    "content": "Wait.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
DEEP = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "[" * 200_000}}
ANSWERED = {"role": "tool", "content": "2", "tool_call_id": "c1"}


def turn(**fields: Any) -> AssistantTurn:
    options: dict[str, Any] = {
        "content": "Wait.",
        "calls": (CALL,),
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "tokens": 3,
    }
    return AssistantTurn(**(options | fields))


def test_chat_is_read_as_templates_have_it():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = chat.read(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
            ],
            "max_tokens": 9,
            "stop": "END",
            "tools": [{"type": "function", "function": {"name": "add"}}],
            "temperature": 0.1,
        }
    )
    assert asked == Asked(
        messages=({"role": "system", "content": "Be brief."}, ASKED, ANSWERED),
        tools=({"type": "function", "function": {"name": "add"}},),
        max_tokens=9,
        stop=("END",),
    )


def test_responses_are_read_so_that_calls_belong_to_what_was_said_before_them():
    asked = responses.read(
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "1+1"}]},
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", "name": "add", "parameters": {}, "strict": True}],
        }
    )
    user = {"role": "user", "content": "1+1"}
    assert asked.messages == ({"role": "system", "content": "Be brief."}, user, ASKED, ANSWERED)
    assert asked.tools == ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def test_messages_are_read_with_the_answers_of_tools_before_what_else_is_said():
    asked = messages.read(
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "max_tokens": 5,
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm"},
                        {"type": "text", "text": "Wait."},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Go on."},
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                    ],
                },
            ],
        }
    )
    said = {"role": "user", "content": "Go on."}
    assert asked.messages == ({"role": "system", "content": "Be brief."}, ASKED, ANSWERED, said)


@pytest.mark.parametrize(
    ("read", "body", "why"),
    [
        (chat.read, {"messages": "hello"}, "messages is not a list"),
        (chat.read, {"messages": [{"role": "critic", "content": ""}]}, "the role 'critic'"),
        (chat.read, {"messages": [], "max_tokens": 0}, "0 is not a number of tokens"),
        (chat.read, {"messages": [], "stop": [1]}, "stop is neither"),
        (chat.read, {"messages": [], "stop": [""]}, "an empty one"),
        (chat.read, {"messages": [], "stop": ["x" * 1001]}, "over 1000 characters"),
        (messages.read, {"messages": [], "max_tokens": 8, "stop_sequences": ["x"] * 65}, "over 64 strings"),
        (chat.read, {"messages": [], "tools": [{"type": "retrieval"}]}, "a tool is not a function"),
        (responses.read, {"input": "a", "tools": [{"type": "web_search"}]}, "of type 'web_search'"),
        (responses.read, {"input": [{"type": "item_reference", "id": "x"}]}, "of type 'item_reference'"),
        (responses.read, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "nor json_schema with a schema"),
        (chat.read, {"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "not JSON: it is nested"),
        (messages.read, {"messages": [{"role": "system", "content": "a"}]}, "the role 'system'"),
        (
            messages.read,
            {"messages": [], "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "only functions are supported",
        ),
        (messages.read, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads only text"),
    ],
)
def test_what_cannot_be_done_is_refused(read: Callable[[Mapping[str, Any]], Asked], body: dict[str, Any], why: str):
    with pytest.raises(BadRequest, match=why):
        read(body)


@pytest.mark.parametrize(
    ("made", "reasons"),
    [
        (turn(), ("tool_calls", "completed", "tool_use")),
        (turn(calls=()), ("stop", "completed", "end_turn")),
        (turn(calls=(), finish_reason="length"), ("length", "incomplete", "max_tokens")),
    ],
)
def test_each_api_says_in_its_own_words_why_a_turn_ended(made: AssistantTurn, reasons: tuple[str, str, str]):
    found = (
        chat.answer(made)["choices"][0]["finish_reason"],
        responses.answer(made)["status"],
        messages.answer(made)["stop_reason"],
    )
    assert found == reasons
    assert chat.answer(made)["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_streams_end_with_the_whole_answer():
    made = turn()
    names = [name for name, _ in responses.events(made)]
    assert names[0] == "response.created"
    assert names[-1] == "response.completed"
    last = list(responses.events(made))[-1][1]
    assert last["sequence_number"] == len(names) - 1
    assert last["response"]["output"] == responses.answer(made)["output"]
    assert [name for name, _ in messages.events(made)].count("content_block_stop") == 2
    assert [data["choices"][0]["finish_reason"] for _, data in chat.events(made) if data["choices"]][-1] == "tool_calls"


CALLED = {"function": {"name": "f", "arguments": ""}}
MANY: dict[str, Callable[[int], object]] = {
    "calls in one turn of Responses": lambda count: responses.read(
        {"input": [{"type": "function_call", "arguments": ""}] * count}
    ),
    "functions that Google's choice names": lambda count: google.read(
        {
            "tools": [{"functionDeclarations": [{"name": f"a{number}"} for number in range(count)]}],
            "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": [f"b{n}" for n in range(count)]}},
        },
        model="m",
        stream=False,
    ),
    "calls of Chat": lambda count: chat.read({"messages": [{"role": "assistant", "tool_calls": [CALLED] * count}]}),
    "blocks of Messages": lambda count: messages.read(
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}, {"type": "text", "text": ""}] * count}]}
    ),
}


@pytest.mark.parametrize("what", MANY)
def test_a_body_takes_time_in_proportion_to_its_length(what: str):
    """While one is read, all other agents wait."""

    def seconds(count: int) -> float:
        """The shortest of three tries, as a collection of garbage can fall into one."""
        tries = []
        for _ in range(3):
            started = time.thread_time()
            MANY[what](count)
            tries.append(time.thread_time() - started)
        return min(tries)

    assert seconds(8000) < 30 * seconds(1000) + 0.05
