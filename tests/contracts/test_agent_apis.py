"""The clients of OpenAI and Anthropic against the recording proxy: what they get, and what is recorded."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import AgentSession, Recorder
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.tools.parsers import hermes
from tests.fakes import FakeEngine
from tests.threads import listening
from tests.tiny import EOS, tiny_tokenizer

TEMPLATE = """
{%- if tools %}{% for tool in tools %}({{ tool.function.name }}){% endfor %}{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.role == 'assistant' %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>
{%- else %}{{ message.content }}{% endif %};{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# Not as the template would write it: what is made anew from text would be other tokens.
CALL = '<tool_call>{"arguments":{"x":4},  "name":"double"}</tool_call>'
TOLD = ";[tool]8;[assistant]"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


class World:
    """A proxy in front of an engine that says ``answers`` one after the other."""

    def __init__(self) -> None:
        self.tokenizer: Any = tiny_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.answers: list[str] = []
        self.engine = FakeEngine(self.answer)
        recorder = Recorder(self.tokenizer, parse=hermes, template_kwargs={}, max_context=600)
        self.proxy = AgentProxy(CallBatcher(self.engine, at_once=1), recorder)
        self.key, self.session = self.proxy.open(seed=1, params=SamplingParams(max_tokens=200))

    def answer(self, request: GenerationRequest, index: int) -> Sequence[int]:
        return self.tokenizer(self.answers.pop(0))["input_ids"]

    def text(self, session: AgentSession, number: int = 0) -> str:
        return self.tokenizer.decode(session.trajectories[number].conversation.token_ids)


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    made = World()
    with listening(made.proxy):
        yield made


@pytest.fixture
def world(shared: World) -> World:
    shared.answers = []
    shared.engine.requests = []
    shared.key, shared.session = shared.proxy.open(seed=1, params=SamplingParams(max_tokens=200))
    return shared


def doubled(arguments: str) -> str:
    return str(2 * json.loads(arguments)["x"])


def gpt(world: World) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{world.proxy.url}/v1", api_key=world.key, max_retries=0)


def claude(world: World) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=world.proxy.url, api_key=world.key, max_retries=0)


def assert_one_trajectory(world: World, *, said: Sequence[str] = (CALL, "It is 8.")) -> None:
    """What was sampled, exactly, and what the template adds for the tool's answer."""
    (trajectory,) = world.session.trajectories
    call, last = said
    assert world.text(world.session) == f"{call}{EOS}{TOLD}{last}{EOS}"
    own = len(world.tokenizer(f"{call}{EOS}")["input_ids"])
    conversation = trajectory.conversation
    assert conversation.mask[:own] == [1] * own
    assert conversation.mask[own : own + len(TOLD)] == [0] * len(TOLD)
    assert world.engine.requests[-1][0].prompt_ids == conversation.prompt_ids + tuple(
        conversation.token_ids[: own + len(TOLD)]
    )
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool", "assistant"]
    assert (world.session.turns, world.session.calls) == (2, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_with_a_tool(world: World, stream: bool):
    world.answers = [f"{CALL}{EOS}", f"It is 8.{EOS}"]
    tools: Any = [{"type": "function", "function": {"name": "double", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "twice 4?"}]
    said = []
    for _ in range(2):
        if stream:
            with gpt(world).chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = gpt(world).chat.completions.create(model="m", messages=messages, tools=tools).choices[0]
        said.append((choice.finish_reason, choice.message.content or None))
        messages.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in choice.message.tool_calls or []:
            result = str(2 * json.loads(call.function.arguments)["x"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert said == [("tool_calls", None), ("stop", "It is 8.")]
    assert_one_trajectory(world)
    assert world.tokenizer.decode(world.session.trajectories[0].conversation.prompt_ids).startswith(
        "(double)[system]Be"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_a_tool(world: World, stream: bool, by_id: bool):
    world.answers = [f"{CALL}{EOS}", f"It is 8.{EOS}"]
    tools: Any = [{"type": "function", "name": "double", "parameters": SCHEMA, "strict": False}]
    history: list[Any] = [{"role": "user", "content": "twice 4?"}]
    earlier: str | None = None
    response: Any = None
    for _ in range(2):
        options: dict[str, Any] = {"model": "m", "input": history, "tools": tools, "instructions": "Be brief."}
        if by_id and earlier is not None:
            options["previous_response_id"] = earlier
        if stream:
            with gpt(world).responses.stream(**options) as events:
                response = events.get_final_response()
        else:
            response = gpt(world).responses.create(**options)
        earlier = response.id
        calls = [item for item in response.output if item.type == "function_call"]
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(2 * json.loads(call.arguments)["x"]),
            }
            for call in calls
        ]
        items = [item.model_dump(exclude_none=True) for item in response.output]
        history = results if by_id else [*history, *items, *results]
    assert (response.status, response.output_text) == ("completed", "It is 8.")
    assert_one_trajectory(world)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_with_a_tool(world: World, stream: bool):
    world.answers = [f"Wait. {CALL}{EOS}", f"It is 8.{EOS}"]
    options: dict[str, Any] = {
        "model": "m",
        "max_tokens": 200,
        "system": "Be brief.",
        "tools": [{"name": "double", "input_schema": SCHEMA}],
    }
    messages: list[Any] = [{"role": "user", "content": "twice 4?"}]
    said: Any = None
    for _ in range(2):
        if stream:
            with claude(world).messages.stream(messages=messages, **options) as events:
                said = events.get_final_message()
        else:
            said = claude(world).messages.create(messages=messages, **options)
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in said.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(2 * block.input["x"])}
            for block in said.content
            if block.type == "tool_use"
        ]
        if results:
            assert said.stop_reason == "tool_use"
            messages.append({"role": "user", "content": results})
    assert (said.stop_reason, said.content[0].text) == ("end_turn", "It is 8.")
    assert_one_trajectory(world, said=(f"Wait. {CALL}", "It is 8."))


def test_a_conversation_that_begins_anew_is_another_trajectory(world: World):
    world.answers = [f"a{EOS}", f"b{EOS}", f"c{EOS}"]
    first: list[Any] = [{"role": "user", "content": "one"}]
    client = gpt(world)
    client.chat.completions.create(model="m", messages=first)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "two"}])
    again: list[Any] = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "go on"}]
    client.chat.completions.create(model="m", messages=again)
    assert [world.text(world.session, number) for number in range(2)] == [
        f"a{EOS};[user]go on;[assistant]c{EOS}",
        f"b{EOS}",
    ]


def test_a_turn_that_the_agent_changed_is_not_taken_for_the_models(world: World):
    world.answers = [f"a{EOS}", f"b{EOS}"]
    first: list[Any] = [{"role": "user", "content": "one"}]
    client = gpt(world)
    client.chat.completions.create(model="m", messages=first)
    changed: list[Any] = [*first, {"role": "assistant", "content": "A!"}, {"role": "user", "content": "go on"}]
    client.chat.completions.create(model="m", messages=changed)
    assert len(world.session.trajectories) == 2
    prompt = world.session.trajectories[1].conversation.prompt_ids
    assert world.tokenizer.decode(prompt) == f"[user]one;[assistant]A!{EOS};[user]go on;[assistant]"


def test_keys_tell_rollouts_apart_and_end_with_them(world: World):
    world.answers = [f"a{EOS}", f"b{EOS}"]
    other_key, other = world.proxy.open(seed=2, params=SamplingParams(max_tokens=10))
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
    gpt(world).chat.completions.create(**ask)
    openai.OpenAI(base_url=f"{world.proxy.url}/v1", api_key=other_key).chat.completions.create(**ask)
    assert (world.text(world.session), world.text(other)) == (f"a{EOS}", f"b{EOS}")
    assert [request.params.max_tokens for (request,) in world.engine.requests] == [200, 10]
    world.proxy.close(world.key)
    with pytest.raises(openai.AuthenticationError, match="no rollout that is under way"):
        gpt(world).chat.completions.create(**ask)
    with pytest.raises(anthropic.AuthenticationError, match="no rollout that is under way"):
        claude(world).messages.create(max_tokens=5, **ask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n is not 1"),
        ({"response_format": {"type": "json_object"}}, "response_format is not text"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, "maximum context length is 600"),
        ({"messages": []}, "no messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
            "reads text only",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(world: World, options: dict[str, Any], message: str):
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one"}], **options}
    with pytest.raises(openai.BadRequestError, match=message):
        gpt(world).chat.completions.create(**asked)
    assert world.session.trajectories == []


BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "max_tokens": 3,
        "stop": ["a"],
        "response_format": {"type": "text"},
    },
    "messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 3,
    },
    "responses": {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ],
        "text": {"format": {"type": "text"}},
        "previous_response_id": None,
    },
}
WRONG: tuple[Any, ...] = (None, 0, -1, 1.5, "x", [], {}, [None], [[]], {"a": None}, 10**30, "\ud800", {"type": 3}, [1])


def spoiled(value: Any, chance: random.Random) -> Any:
    """The value with some of its parts left out or of another kind."""
    if chance.random() < 0.25:
        return chance.choice(WRONG)
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if chance.random() > 0.08}
        return {name: spoiled(part, chance) if chance.random() < 0.5 else part for name, part in kept.items()}
    if isinstance(value, list):
        return [spoiled(part, chance) if chance.random() < 0.5 else part for part in value]
    return value


@pytest.mark.parametrize("path", BODIES)
def test_whatever_a_body_has_the_answer_is_no_fault_of_the_server(world: World, path: str):
    """Half of them are answered, as they are still sound: the engine says the same to all."""
    world.answers = [f"a{EOS}"] * 1000
    chance, seen = random.Random(8), Counter[int]()
    with httpx.Client(base_url=f"{world.proxy.url}/v1", headers={"x-api-key": world.key}) as http:
        for _ in range(50):
            body = json.dumps(spoiled(BODIES[path], chance)).encode()
            seen[http.post(path, content=body).status_code] += 1
        for body in (b"", b"{", b"[" * 100_000, b'{"messages": "\xff"}', b"null"):
            seen[http.post(path, content=body).status_code] += 1
        assert http.post(path, content=b" " * ((32 << 20) + 1)).status_code == 413
        parts = (b" " * (1 << 20) for _ in range(40))  # without a length
        assert http.post(path, content=parts).status_code == 413
    assert set(seen) <= {200, 400, 404} and seen[400] > 8, seen
    assert world.proxy.failure is None


def test_an_engine_that_fails_is_no_fault_of_the_agents(world: World):
    world.engine.pause()
    world.engine.health = lambda: type("Health", (), {"paused": False})()  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(openai.InternalServerError, match="the engine is paused"):
            gpt(world).chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
        assert "the engine is paused" in str(world.proxy.failure)
    finally:
        world.proxy.failure = None
        world.engine.resume()
        del world.engine.health


def test_tokens_are_counted_and_models_listed(world: World):
    counted = claude(world).messages.count_tokens(model="m", messages=[{"role": "user", "content": "one"}])
    assert counted.input_tokens == len("[user]one;[assistant]")
    assert [model.id for model in gpt(world).models.list()] == ["policy"]
