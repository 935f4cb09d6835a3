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
from lachesis.train.packing import Row, trees
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


def gemini(world: World, method: str, body: Any, *, key: str = "", query: str = "") -> httpx.Response:
    url = f"{world.proxy.url}/v1beta/models/gemini-pro:{method}{query}"
    return httpx.post(url, json=body, headers={"x-goog-api-key": key or world.key})


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


@pytest.mark.parametrize("stream", [False, True])
def test_google_with_a_tool(world: World, stream: bool):
    world.answers = [f"{CALL}{EOS}", f"It is 8.{EOS}"]
    declared = {"name": "double", "parameters": {"type": "OBJECT", "properties": {"x": {"type": "INTEGER"}}}}
    body: dict[str, Any] = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [{"role": "user", "parts": [{"text": "twice 4?"}]}],
        "tools": [{"functionDeclarations": [declared]}],
        "generationConfig": {"temperature": 0.1, "maxOutputTokens": 100},
    }
    found: Any = None
    for _ in range(2):
        if stream:
            reply = gemini(world, "streamGenerateContent", body, query="?alt=sse").text
            found = json.loads(reply.removeprefix("data: "))
        else:
            found = gemini(world, "generateContent", body).json()
        content = found["candidates"][0]["content"]
        body["contents"].append(content)
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        results = [
            {"functionResponse": {"name": call["name"], "response": {"result": doubled(json.dumps(call["args"]))}}}
            for call in calls
        ]
        body["contents"] += [{"role": "user", "parts": results}] if results else []
    assert found["candidates"][0]["content"]["parts"] == [{"text": "It is 8."}]
    assert found["candidates"][0]["finishReason"] == "STOP"
    assert found["usageMetadata"]["candidatesTokenCount"] == len(world.tokenizer(f"It is 8.{EOS}")["input_ids"])
    assert_one_trajectory(world)


def test_google_counts_and_refuses_in_its_own_form(world: World):
    body = {"contents": [{"parts": [{"text": "one"}]}]}
    assert gemini(world, "countTokens", body).json() == {"totalTokens": len("[user]one;[assistant]")}
    refused = [
        (gemini(world, "embedContent", body), 404, "NOT_FOUND", "there is no method 'embedContent'"),
        (gemini(world, "generateContent", body, key="sk-other"), 401, "UNAUTHENTICATED", "no running rollout"),
        (
            gemini(world, "generateContent", body | {"tools": [{"googleSearch": {}}]}),
            400, "INVALID_ARGUMENT", "'googleSearch'; only functions are supported",
        ),
        (
            gemini(world, "generateContent", {"contents": [{"parts": [{"inlineData": {}}]}]}),
            400, "INVALID_ARGUMENT", "reads only text",
        ),
    ]  # fmt: skip
    for reply, status, kind, message in refused:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["status"]) == (status, status, kind)
        assert message in error["message"]
    assert world.session.trajectories == []


def whole_text(world: World, number: int) -> str:
    conversation = world.session.trajectories[number].conversation
    return world.tokenizer.decode((*conversation.prompt_ids, *conversation.token_ids))


def learned(world: World, number: int) -> list[int]:
    conversation = world.session.trajectories[number].conversation
    return [one for one, own in zip(conversation.token_ids, conversation.mask, strict=True) if own]


def learned_text(world: World, number: int) -> str:
    return world.tokenizer.decode(learned(world, number))


def test_a_branch_has_the_tokens_that_were_sampled_and_learns_only_its_own(world: World):
    """A sub-agent, a retry, and a second turn of the sub-agent: all go on from the same sampled tokens."""
    world.answers = [f"{CALL}{EOS}", f"main{EOS}", f"sub{EOS}", f"again{EOS}", f"deep{EOS}"]
    tools: Any = [{"type": "function", "function": {"name": "double", "parameters": SCHEMA}}]

    def ask(*messages: Any) -> Any:
        made = gpt(world).chat.completions.create(model="m", messages=list(messages), tools=tools).choices[0].message
        return made.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})

    question = {"role": "user", "content": "twice 4?"}
    call = ask(question)
    told = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "8"}
    ask(question, call, told)
    sub = ask(question, call, told, {"role": "user", "content": "sub?"})
    ask(question, call, told)
    ask(question, call, told, {"role": "user", "content": "sub?"}, sub, {"role": "user", "content": "deeper?"})
    shared = f"(double)[user]twice 4?;[assistant]{CALL}{EOS}"
    assert [whole_text(world, number) for number in range(3)] == [
        f"{shared}{TOLD}main{EOS}",
        f"{shared};[tool]8;[user]sub?;[assistant]sub{EOS};[user]deeper?;[assistant]deep{EOS}",
        f"{shared}{TOLD}again{EOS}",
    ]
    assert [learned_text(world, number) for number in range(3)] == [
        f"{CALL}{EOS}main{EOS}", f"sub{EOS}deep{EOS}", f"again{EOS}",
    ]  # fmt: skip
    assert len(world.session.trajectories) == 3
    assert sum(len(learned(world, number)) for number in range(3)) == sum(
        len(world.tokenizer(f"{said}{EOS}")["input_ids"]) for said in (CALL, "main", "sub", "again", "deep")
    ), "each sampled token is learned once"


def test_the_branches_of_a_conversation_are_packed_as_a_tree(world: World):
    """What they share goes through the model once."""
    world.answers = [f"{CALL}{EOS}", *(f"{word}{EOS}" for word in ("main", "sub", "again"))]
    question = {"role": "user", "content": "twice 4?"}
    client = gpt(world)
    said = client.chat.completions.create(model="m", messages=[question]).choices[0].message  # type: ignore[list-item]
    answer = said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    for ending in ("a", "b", "c"):
        messages: Any = [question, answer, {"role": "user", "content": ending}]
        client.chat.completions.create(model="m", messages=messages)
    rows = [
        (*one.conversation.prompt_ids, *one.conversation.token_ids) for one in world.session.trajectories
    ]  # fmt: skip
    samples = [one.conversation.as_sample(text="", temperature=1.0) for one in world.session.trajectories]
    (tree,) = trees([Row(sample, "sampler", 0) for sample in samples])
    inputs = [row[:-1] for row in rows]  # no last token is one
    assert tree.num_inputs == len({row[:end] for row in inputs for end in range(1, len(row) + 1)})
    assert tree.num_inputs < sum(map(len, inputs)) / 2


def test_of_several_answers_each_is_a_branch_and_any_can_be_continued(world: World):
    world.answers = [f"a{EOS}", f"b{EOS}", f"c{EOS}", f"d{EOS}"]
    first: list[Any] = [{"role": "user", "content": "one"}]
    made = gpt(world).chat.completions.create(model="m", messages=first, n=3)
    assert [(choice.index, choice.message.content) for choice in made.choices] == [(0, "a"), (1, "b"), (2, "c")]
    assert made.usage is not None and made.usage.completion_tokens == 6
    assert len({request.seed for requests in world.engine.requests for request in requests}) == 3
    gpt(world).chat.completions.create(
        model="m", messages=[*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "on"}]
    )
    assert [world.text(world.session, number) for number in range(3)] == [
        f"a{EOS}", f"b{EOS};[user]on;[assistant]d{EOS}", f"c{EOS}",
    ]  # fmt: skip
    world.answers = [f"e{EOS}", f"f{EOS}"]
    found: dict[int, str] = {}
    for chunk in gpt(world).chat.completions.create(model="m", messages=first, n=2, stream=True):
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + (choice.delta.content or "")
    assert found == {0: "e", 1: "f"}


OPENING = '<tool_call>\n{"name": "double", "arguments":'


def forced_arguments(world: World, dialect: str) -> Any:
    """What a call has in it that the API was asked to have."""
    said: Any = {"role": "user", "content": "twice 4?"}
    if dialect == "chat":
        tools: Any = [{"type": "function", "function": {"name": "double", "parameters": SCHEMA}}]
        made: Any = gpt(world).chat.completions.create(model="m", messages=[said], tools=tools, tool_choice="required")
        return json.loads(made.choices[0].message.tool_calls[0].function.arguments)
    if dialect == "responses":
        tools = [{"type": "function", "name": "double", "parameters": SCHEMA}]
        choice: Any = {"type": "function", "name": "double"}
        made = gpt(world).responses.create(model="m", input=[said], tools=tools, tool_choice=choice)
        return json.loads(made.output[0].arguments)
    if dialect == "messages":
        tools = [{"name": "double", "input_schema": SCHEMA}]
        made = claude(world).messages.create(
            model="m", max_tokens=100, messages=[said], tools=tools, tool_choice={"type": "any"}
        )
        return made.content[0].input
    body = {
        "contents": [{"role": "user", "parts": [{"text": "twice 4?"}]}],
        "tools": [{"functionDeclarations": [{"name": "double"}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["double"]}},
    }
    made = gemini(world, "generateContent", body).json()
    return made["candidates"][0]["content"]["parts"][0]["functionCall"]["args"]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "google"])
def test_a_call_that_has_to_be_is_begun_with_tokens_that_are_not_learned(world: World, dialect: str):
    rest = '{"x":4}}</tool_call>'
    world.answers = [f"{rest}{EOS}"]
    assert forced_arguments(world, dialect) == {"x": 4}
    assert whole_text(world, 0) == f"(double)[user]twice 4?;[assistant]{OPENING}{rest}{EOS}"
    assert learned_text(world, 0) == f"{rest}{EOS}"


def test_a_call_of_any_of_several_tools_is_begun_up_to_its_name(world: World):
    world.answers = [f' "half", "arguments":{{"x":4}}}}</tool_call>{EOS}']
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("double", "half")]
    made = gpt(world).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice="required"
    )
    calls: Any = made.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["half"]


def in_a_format(world: World, dialect: str, questions: Sequence[str]) -> str:
    """The answer to the last question in a schema, the first having been answered with 4."""
    last = questions[1:]
    said: Any = [{"role": "user", "content": questions[0]}]
    for question in last:
        said += [{"role": "assistant", "content": '{"x": 4}'}, {"role": "user", "content": question}]
    if dialect == "chat":
        form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        made: Any = gpt(world).chat.completions.create(model="m", messages=said, response_format=form)
        return made.choices[0].message.content
    if dialect == "responses":
        form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
        return gpt(world).responses.create(model="m", input=said, text=form).output_text
    roles = {"user": "user", "assistant": "model"}
    contents = [{"role": roles[one["role"]], "parts": [{"text": one["content"]}]} for one in said]
    options = {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}
    made = gemini(world, "generateContent", {"contents": contents, "generationConfig": options}).json()
    return made["candidates"][0]["content"]["parts"][0]["text"]


@pytest.mark.parametrize("dialect", ["chat", "responses", "google"])
def test_a_schema_is_told_in_the_last_message_and_the_answer_begun(world: World, dialect: str):
    world.answers = [f'"x": 4}}{EOS}', f'"x": 5}}{EOS}']
    told = f"Answer with JSON of this schema: {json.dumps(SCHEMA)}"
    assert json.loads(in_a_format(world, dialect, ["one"])) == {"x": 4}
    assert json.loads(in_a_format(world, dialect, ["one", "two"])) == {"x": 5}
    assert len(world.session.trajectories) == 1
    assert whole_text(world, 0) == (
        f'[user]one\n\n{told};[assistant]{{"x": 4}}{EOS};[user]two\n\n{told};[assistant]{{"x": 5}}{EOS}'
    )
    assert learned_text(world, 0) == f'"x": 4}}{EOS}"x": 5}}{EOS}'


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
    with pytest.raises(openai.AuthenticationError, match="belongs to no running rollout"):
        gpt(world).chat.completions.create(**ask)
    with pytest.raises(anthropic.AuthenticationError, match="belongs to no running rollout"):
        claude(world).messages.create(max_tokens=5, **ask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 17}, "n is 17, not a number of answers from 1 to 16"),
        ({"response_format": {"type": "grammar"}}, "the format 'grammar' is neither text, json_object nor"),
        ({"tool_choice": "required"}, "the tool that has to be called .any. is not among the tools"),
        ({"tool_choice": {"type": "custom"}}, "is neither none, auto, required nor a function"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, "maximum context length is 600"),
        ({"messages": []}, "no messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
            "reads only text",
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
    "../v1beta/models/m:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"a": "x"}}}, {"text": "b"}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"maxOutputTokens": 3, "stopSequences": ["a"]},
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
        assert http.post(path, content=b" " * ((8 << 20) + 1)).status_code == 413
        parts = (b" " * (1 << 20) for _ in range(40))  # without a length
        assert http.post(path, content=parts).status_code == 413
    assert set(seen) <= {200, 400, 404} and seen[400] > 8, seen
    assert world.proxy.failure is None


def test_a_conversation_far_beyond_the_context_is_refused_before_it_is_rendered(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lachesis.rollouts.tools.template.Continuation.whole", lambda *_: pytest.fail("rendered"))
    said = {"role": "user", "content": "q"}
    tool = {"type": "function", "function": {"name": "f", "description": "a" * 90_000}}
    bodies = {
        "601 messages": {"messages": [said] * 601},
        "characters": {"messages": [{**said, "content": "ab " * 30_000}]},
        "their tools": {"messages": [said], "tools": [tool]},
        "1 messages": {"messages": [{**said, "content": [{"type": "text", "text": "q"}] * 45_000}]},
    }
    with httpx.Client(base_url=f"{world.proxy.url}/v1", headers={"x-api-key": world.key}) as http:
        for words, body in bodies.items():
            answer = http.post("/chat/completions", json=body)
            assert answer.status_code == 400 and words in answer.text and "length is 600 tokens" in answer.text


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
