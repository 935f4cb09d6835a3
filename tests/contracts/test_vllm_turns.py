"""Rollouts of several turns over a real vLLM: tokens as it sampled them, calls found by its own parser."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError
from lachesis.common.types import Completion, GenerationRequest, Prompt, SamplingParams
from lachesis.engines.base import Finished
from lachesis.engines.http.client import HttpEngine
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import Recorder
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeSource
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.tools import Toolbox, load_parser
from lachesis.rollouts.tools.conversation import Conversation
from lachesis.rollouts.tools.player import ToolPlayers, TurnLimits
from lachesis.rollouts.tools.template import Continuation
from lachesis.rollouts.tools.toolbox import Tool
from tests.contracts.bridge_cases import reset
from tests.contracts.servers import MAX_LEN, TOKEN, Server
from tests.contracts.vllm_server import needs_vllm
from tests.threads import listening
from tests.tiny import tiny_tokenizer

# Short: the model has a context of 128 characters.
TEMPLATE = """
{%- for message in messages %}[{{ message.role[0] }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.role == 'assistant' %}<eos>{% endif %};{% endfor %}
{%- if add_generation_prompt %}[a]{% endif %}"""
# What the model has to say, whose weights are random. Not as the template would write it.
CALL = r'<tool_call>\{"arguments":\{"x":[0-9]\}, "name":"f"\}</tool_call>'
PARAMS = SamplingParams(max_tokens=100, guided_regex=CALL)
SCHEMA = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


class Recording(HttpEngine):
    """Keeps each turn as vLLM sampled it."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Finished | None = None
    ) -> list[list[Completion]]:
        answers = super().generate(requests, deadline=deadline, finished=finished)
        self.sampled = [*getattr(self, "sampled", ()), *zip(requests, answers, strict=True)]
        return answers


@pytest.fixture
def engine(vllm_server: Server) -> Iterator[Recording]:
    reset(vllm_server)
    made = Recording([str(vllm_server.http.base_url)], token=TOKEN)
    yield made
    made.close()


@pytest.fixture
def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


def f(x: int) -> int:
    return 2 * x


@needs_vllm
def test_a_conversation_with_tools_keeps_every_token_as_vllm_sampled_it(engine: Recording, tokenizer: Any):
    turns = ToolPlayers(
        calls=CallBatcher(engine, at_once=1),
        params=PARAMS,
        toolbox=Toolbox([Tool("f", f, SCHEMA)], timeout_s=10),
        parse=load_parser("vllm:hermes", tokenizer=tokenizer),
        continuation=Continuation(tokenizer, {"tools": [SCHEMA]}),
        tokenizer=tokenizer,
        decode=text_decoder(tokenizer),
        limits=TurnLimits(turns=3, result_tokens=8),
    )
    messages = ({"role": "user", "content": "2?"},)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    source = EpisodeSource(
        players=turns,
        stream=PromptStream([Prompt("0", tuple(tokenizer(text)["input_ids"]), text, messages)], seed=0),
        rewarder=Rewarder([NamedReward("calls", lambda tool_calls, **_: [float(n) for n in tool_calls])]),
        num_generations=2,
        seed=0,
    )
    (group,) = source.next_groups(1, deadline=Deadline("turns", 120.0))
    source.close()
    assert group.rewards == (1.0, 1.0)
    (first, answers), *rest = engine.sampled
    assert len(rest) == 2
    for number, (sample, second) in enumerate(zip(group.samples, rest, strict=True)):
        call, ((cut,)) = answers[number], second[1]
        told = second[0].prompt_ids[len(first.prompt_ids) + len(call.token_ids) :]
        digit = json.loads(tokenizer.decode(call.token_ids).split(":")[2][0])
        assert tokenizer.decode(told) == f";[t]{2 * digit};[a]"
        assert sample.completion_ids == (*call.token_ids, *told, *cut.token_ids)
        assert sample.logprobs == (*call.logprobs, *[0.0] * len(told), *cut.logprobs)
        assert sample.mask == (*[1] * len(call.token_ids), *[0] * len(told), *[1] * len(cut.token_ids))
        assert sample.finish_reason == cut.finish_reason == "length"


@needs_vllm
def test_an_agent_talks_to_vllm_through_the_proxy(engine: Recording, tokenizer: Any):
    parse = load_parser("vllm:hermes", tokenizer=tokenizer)
    recorder = Recorder(tokenizer, parse=parse, template_kwargs={}, max_context=MAX_LEN)
    proxy = AgentProxy(CallBatcher(engine, at_once=2), recorder)
    with listening(proxy):
        key, session = proxy.open(seed=1, params=PARAMS)
        client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "2?"}]
        said = client.chat.completions.create(model="m", messages=messages, tools=[SCHEMA]).choices[0]  # type: ignore[list-item]
        assert said.finish_reason == "tool_calls"
        (call,) = said.message.tool_calls or []
        answer = str(f(**json.loads(call.function.arguments)))  # type: ignore[union-attr]
        messages.append(said.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        stream = client.chat.completions.create(model="m", messages=messages, tools=[SCHEMA], stream=True)  # type: ignore[list-item]
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        assert chunks[-1].finish_reason == "length", "the model's context is full"
        assert "".join(chunk.delta.content or "" for chunk in chunks).startswith("<tool_call>")
        proxy.close(key)
    (trajectory,) = session.trajectories
    assert_as_sampled(trajectory.conversation, engine, told=f";[t]{answer};[a]", tokenizer=tokenizer)


def assert_as_sampled(conversation: Conversation, engine: Recording, *, told: str, tokenizer: Any) -> None:
    (_, ((first,))), (request, ((second,))) = engine.sampled
    between = tokenizer(told)["input_ids"]
    assert conversation.token_ids == [*first.token_ids, *between, *second.token_ids]
    assert conversation.logprobs == [*first.logprobs, *[0.0] * len(between), *second.logprobs]
    assert request.prompt_ids == (*conversation.prompt_ids, *first.token_ids, *between)


class TestParsers:
    """Their names and formats, without a server."""

    @needs_vllm
    def test_a_text_that_a_pattern_backtracks_on_is_a_call_that_cannot_be_read(self, tokenizer: Any):
        """Two thousand spaces take this one 13 s, and ten thousand half an hour, in which the interpreter is held."""
        parse = load_parser("vllm:dots", tokenizer=tokenizer)
        said = '<dots_function_call><invoke name="f"><parameter name="x">1</parameter></invoke></dots_function_call>'
        (call,) = parse(said, [SCHEMA]).calls
        assert (call.name, call.error) == ("f", "")
        started = time.process_time()
        (call,) = parse("<dots_function_call>" + " " * 10_000 + "x", [SCHEMA]).calls
        assert "timed out" in call.error
        assert time.process_time() - started < 5

    @needs_vllm
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("minicpm5", '<function name="f">' + "<param" * 10_000 + "</function>"),
            (
                "kimi_k2",
                "<|tool_calls_section_begin|><|tool_call_begin|>"
                + ":" * 60_000
                + "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            ),
        ],
    )
    def test_patterns_of_its_modules_give_up_as_well(self, tokenizer: Any, name: str, text: str):
        parse = load_parser(f"vllm:{name}", tokenizer=tokenizer)
        started = time.process_time()
        parse(text, [SCHEMA])
        assert time.process_time() - started < 5
        modules = [one for path, one in sys.modules.items() if path.startswith(("vllm.tool_parsers", "vllm.parser"))]
        free = [field for one in modules for field, value in vars(one).items() if type(value).__name__ == "Pattern"]
        assert modules and free == []

    @needs_vllm
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 4}}</tool_call>'),
            ("pythonic", "[f(x=4)]"),
        ],
    )
    def test_each_reads_its_own_format(self, tokenizer: Any, name: str, text: str):
        found = load_parser(f"vllm:{name}", tokenizer=tokenizer)(text, [SCHEMA])
        assert [(call.name, call.arguments, call.error) for call in found.calls] == [("f", {"x": 4}, "")]

    @needs_vllm
    @pytest.mark.parametrize(
        ("name", "why"),
        [("hermess", "did you mean hermes?"), ("llama3_json", "does not work with this model: .*python_tag")],
    )
    def test_one_that_cannot_be_used_is_refused_with_the_reason(self, tokenizer: Any, name: str, why: str):
        with pytest.raises(ConfigError, match=why):
            load_parser(f"vllm:{name}", tokenizer=tokenizer)
