"""Turns with tools: tokens as they were sampled, masks, limits, counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DataError, RewardError
from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import GenerationRequest, Message, Prompt, SamplingParams
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import Episodes, EpisodeSource, RolloutFailed, item_of
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.rewards.attempts import Item
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.tools.base import ToolServerLost
from lachesis.rollouts.tools.parsers import hermes
from lachesis.rollouts.tools.player import ToolPlayers, TurnLimits
from lachesis.rollouts.tools.template import Continuation, answer_message, short_token_ids
from lachesis.rollouts.tools.toolbox import Tool, Toolbox
from tests.fakes import FakeEngine
from tests.tiny import EOS, tiny_tokenizer

TEMPLATE = """
{%- for message in messages %}[{{ message.role }}]
{%- if message.role == 'assistant' %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>
{%- else %}{{ message.content }}{% endif %};{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
WITH_IDS = TEMPLATE.replace("{%- else %}", "{%- else %}{{ message.tool_call_id }}")
CALL = '<tool_call>{"name": "double", "arguments": {"x": %s}}</tool_call>'
QUESTION: Message = {"role": "user", "content": "twice 4?"}


@pytest.fixture
def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


def double(x: int) -> int:
    return 2 * x


def build(tokenizer: Any, answers: Sequence[Sequence[str]], **limits: Any) -> tuple[ToolPlayers, FakeEngine]:
    """An engine that says ``answers[turn][number]`` to the conversation ``number`` of a group."""
    asked: dict[int, int] = {}

    def answer(request: GenerationRequest, index: int) -> list[int]:
        text = tokenizer.decode(request.prompt_ids)
        turn = text.count("[assistant]") - 1
        number = index if turn == 0 else asked.setdefault(hash((text, request.seed)), len(asked))
        said = answers[turn][number % len(answers[turn])]
        return tokenizer(said)["input_ids"]

    engine = FakeEngine(answer)
    turns = ToolPlayers(
        calls=CallBatcher(engine, at_once=1),
        params=SamplingParams(max_tokens=400),
        toolbox=Toolbox([Tool("double", double, {})], timeout_s=5),
        parse=hermes,
        continuation=Continuation(tokenizer, {}),
        tokenizer=tokenizer,
        decode=text_decoder(tokenizer),
        limits=TurnLimits(**({"turns": 4, "result_tokens": 20} | limits)),
    )
    return turns, engine


def prompt(tokenizer: Any) -> Prompt:
    text = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    return Prompt(id="0", token_ids=tuple(tokenizer(text)["input_ids"]), text=text, messages=(QUESTION,))


def tool_source(turns: ToolPlayers, tokenizer: Any, reward: Callable[..., list[float]]) -> EpisodeSource:
    return EpisodeSource(
        players=turns,
        stream=PromptStream([prompt(tokenizer)], seed=0),
        rewarder=Rewarder([NamedReward("reward", reward)]),
        num_generations=2,
        seed=0,
    )


def play(turns: ToolPlayers, tokenizer: Any, *, n: int = 1, max_tokens: int = 400, prompts: Any = None) -> Item:
    turns.params = replace(turns.params, max_tokens=max_tokens)
    asked, episodes = prompts or prompt(tokenizer), Episodes(turns)
    try:
        (played,) = episodes.play_all([asked], seeds=[1], count=n, deadline=Deadline("test", 10))
    finally:
        turns.failures = episodes.counts.take()  # type: ignore[attr-defined]
        episodes.close()
    return item_of(asked, played)


def test_a_call_is_answered_and_what_was_sampled_stays_as_it_was(tokenizer: Any):
    odd = '<tool_call>{"arguments":{"x":4},  "name":"double"}</tool_call>'  # not as the template would write it
    turns, engine = build(tokenizer, [[f"{odd}{EOS}"], [f"8!{EOS}"]])
    item = play(turns, tokenizer)
    (sample,) = item.group.samples
    told = ";[tool]8;[assistant]"
    assert tokenizer.decode(sample.completion_ids) == f"{odd}{EOS}{told}8!{EOS}"
    sampled = len(tokenizer(f"{odd}{EOS}")["input_ids"])
    assert sample.mask == (*(1,) * sampled, *(0,) * len(told), *(1,) * 3)
    assert [logprob for logprob, own in zip(sample.logprobs, sample.mask, strict=True) if own] == [-0.5] * (sampled + 3)
    assert engine.requests[1][0].prompt_ids == sample.prompt_ids + sample.completion_ids[: sampled + len(told)]
    assert engine.requests[1][0].params.max_tokens == 400 - sampled - len(told)
    assert [message["role"] for message in item.extras["_turns"][0]] == ["assistant", "tool", "assistant"]
    assert item.extras["_turns"][0][-1]["content"] == "8!"
    assert (item.extras["turns"], item.extras["tool_calls"]) == ([2], [1])


def test_the_first_turn_is_as_without_tools(tokenizer: Any):
    turns, engine = build(tokenizer, [[f"a{EOS}", f"b{EOS}"]])
    item = play(turns, tokenizer, n=2)
    plain = GenerationRequest(prompt(tokenizer).token_ids, SamplingParams(max_tokens=400), 2, 1)
    assert engine.requests == [[replace(plain, conversation="tools 1")]]
    assert [sample.mask for sample in item.group.samples] == [None, None]
    assert [sample.text for sample in item.group.samples] == ["a", "b"]


def test_several_calls_of_one_turn_are_answered_together(tokenizer: Any):
    turns, _ = build(tokenizer, [[f"{CALL % 4}{CALL % 5}{EOS}"], [f"ok{EOS}"]])
    item = play(turns, tokenizer)
    assert ";[tool]8;[tool]10;[assistant]ok" in tokenizer.decode(item.group.samples[0].completion_ids)
    ids = [message["tool_call_id"] for message in item.extras["_turns"][0] if message["role"] == "tool"]
    assert len(set(ids)) == 2
    assert turns.take_counts() == {"turns": 2, "tool_calls": 2, "tool_errors": 0, "tool_calls/double": 2}


def test_errors_are_told_and_counted(tokenizer: Any):
    turns, _ = build(tokenizer, [['<tool_call>{"name": "triple"}</tool_call>' + EOS], [f"ok{EOS}"]], result_tokens=80)
    item = play(turns, tokenizer)
    assert "[tool]error: there is no tool 'triple'" in item.group.samples[0].text
    counts = turns.take_counts()
    assert (counts["tool_calls"], counts["tool_errors"], counts["tool_errors/unknown"]) == (1, 1, 1)


def test_the_last_turn_that_there_may_be_is_not_answered(tokenizer: Any):
    turns, engine = build(tokenizer, [[f"{CALL % 4}{EOS}"], [f"{CALL % 8}{EOS}"]], turns=2)
    item = play(turns, tokenizer)
    assert len(engine.requests) == 2
    assert item.extras["_turns"][0][-1]["role"] == "assistant", "what a tool says is never the answer"
    assert item.group.samples[0].mask[-1] == 1


def test_an_answer_without_room_for_a_turn_after_it_is_not_given(tokenizer: Any):
    turns, engine = build(tokenizer, [[f"{CALL % 4}{EOS}"]])
    whole = len(tokenizer(f"{CALL % 4}{EOS}")["input_ids"])
    item = play(turns, tokenizer, max_tokens=whole + 5)
    assert len(engine.requests) == 1
    assert (item.group.samples[0].finish_reason, len(item.group.samples[0].completion_ids)) == ("length", whole)


def test_a_turn_that_was_cut_off_is_the_last(tokenizer: Any):
    turns, engine = build(tokenizer, [[f"{CALL % 4}and so on"]])
    play(turns, tokenizer, max_tokens=len(CALL % 4) + 2)
    assert len(engine.requests) == 1


def test_no_turn_begins_after_the_limit_of_time(tokenizer: Any):
    turns, engine = build(tokenizer, [[f"{CALL % 4}{EOS}"]], seconds=-1.0)
    play(turns, tokenizer)
    assert len(engine.requests) == 1


def test_a_long_answer_is_cut(tokenizer: Any):
    turns, _ = build(tokenizer, [[f"{CALL % ('4' * 30)}{EOS}"], [f"ok{EOS}"]])
    item = play(turns, tokenizer)
    assert f"[tool]{'8' * 20} ... (cut);[assistant]ok" in item.group.samples[0].text


def test_a_text_has_no_place_to_tell_of_tools(tokenizer: Any):
    turns, _ = build(tokenizer, [["a"]])
    with pytest.raises(DataError, match="prompt '0' is a text"):
        play(turns, tokenizer, prompts=replace(prompt(tokenizer), messages=None))


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if loop.last else '' }}<eos>{% endfor %}"
    with pytest.raises(ConfigError, match="rewrites a turn of the model once messages follow"):
        Continuation(tokenizer, {}).tokens(answer_message("a", []), [{"role": "tool", "content": "b"}], ended=True)


def test_a_template_may_drop_the_thoughts_of_earlier_turns(tokenizer: Any):
    """As Qwen3's does: its empty thoughts stand in the last turn only. Those that were sampled stay."""
    thinks = "{{ '<think></think>' if loop.last }}{{ message.content.split('</think>')[-1] }}"
    tokenizer.chat_template = TEMPLATE.replace("{{ message.content }}", thinks, 1)
    for content in ("a", "<think>b</think>a"):
        ids = Continuation(tokenizer, {}).tokens(answer_message(content, []), [QUESTION], ended=True)
        assert tokenizer.decode(ids) == ";[user]twice 4?;[assistant]"
        ids = Continuation(tokenizer, {}).tokens(answer_message(content, []), [QUESTION], ended=False)
        assert tokenizer.decode(ids) == "<eos>;[user]twice 4?;[assistant]"


def test_an_answer_is_a_part_where_the_template_takes_only_these(tokenizer: Any):
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ message.content }}", "{% for p in message.content %}{{ p.text }}{% endfor %}"
    )
    ids = Continuation(tokenizer, {}).tokens(answer_message("a", []), [{"role": "tool", "content": "b"}], ended=True)
    assert tokenizer.decode(ids) == ";[tool]b;[assistant]"


class Counting(Continuation):
    """How many conversations were rendered."""

    rendered = 0

    def _render(self, conversations: Any, *, going_on: bool) -> list[str]:
        self.rendered += len(conversations)
        return super()._render(conversations, going_on=going_on)


def test_what_a_group_is_told_alike_is_rendered_once(tokenizer: Any):
    turns, _ = build(tokenizer, [[f"{CALL % 4}{EOS}"], [f"ok{EOS}"]])
    turns.continuation = counting = Counting(tokenizer, {})
    samples = play(turns, tokenizer, n=8).group.samples
    assert counting.rendered == 2
    assert {tokenizer.decode(sample.completion_ids) for sample in samples} == {
        f"{CALL % 4}{EOS};[tool]8;[assistant]ok{EOS}"
    }


@pytest.mark.parametrize(("template", "rendered"), [(TEMPLATE, 2), (WITH_IDS, 8)], ids=["without", "with"])
def test_turns_that_differ_in_the_ids_of_calls_are_rendered_once_where_these_are_not_written(
    tokenizer: Any, template: str, rendered: int
):
    tokenizer.chat_template = template
    turns, _ = build(tokenizer, [[f"{CALL % 4}{EOS}"]] * 3 + [[f"ok{EOS}"]])
    turns.continuation = counting = Counting(tokenizer, {})
    text = play(turns, tokenizer).group.samples[0].text
    assert counting.rendered == rendered, "two texts of a turn; with ids those of the first twice, to see them"
    ids = ("call00000", "call00001", "call00002") if template == WITH_IDS else ("", "", "")
    assert text == "".join(f"{CALL % 4};[tool]{name}8;[assistant]" for name in ids) + "ok"


def test_answers_that_differ_at_all_are_rendered_each(tokenizer: Any):
    tokens = partial(Continuation(tokenizer, {}).tokens, ended=True)
    said = [
        tokenizer.decode(tokens(answer_message("a", []), [{"role": "tool", "content": content}]))
        for content in ("b", "c", "b")
    ]
    assert said == [";[tool]b;[assistant]", ";[tool]c;[assistant]", ";[tool]b;[assistant]"]


def test_short_texts_are_tokenized_as_the_tokenizer_does_it(tokenizer: Any):
    texts = ["twice 3", "", "error: no <eos>"]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert short_token_ids(tokenizer, texts) == expected
    tokenizer.backend_tokenizer.enable_truncation(1)  # as a call before it may have left it
    assert short_token_ids(tokenizer, texts) == expected


def test_a_turn_without_its_end_gets_it_from_the_template(tokenizer: Any):
    tokens = partial(Continuation(tokenizer, {}).tokens, answer_message("a", []), [{"role": "tool", "content": "b"}])
    assert tokenizer.decode(tokens(ended=True)) == ";[tool]b;[assistant]"
    assert tokenizer.decode(tokens(ended=False)) == f"{EOS};[tool]b;[assistant]"


def test_rewards_get_all_messages_and_the_counts(tokenizer: Any):
    turns, _ = build(tokenizer, [[f"{CALL % 4}{EOS}"], [f"8{EOS}"]])
    seen: list[Any] = []

    def reward(completions: Any, turns: Any, tool_calls: Any) -> list[float]:
        seen.append((completions, turns, tool_calls))
        return [float(messages[-1]["content"] == "8") for messages in completions]

    source = tool_source(turns, tokenizer, reward)
    (group,) = source.next_groups(1, deadline=Deadline("test", 10))
    assert group.rewards == (1.0, 1.0)
    ((completions, turn_counts, calls),) = seen
    assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
    assert (turn_counts, calls) == ([2, 2], [1, 1])
    counters = source.counters()
    assert (counters["turns"], counters["tool_calls"], counters["tool_calls/double"]) == (4, 2, 2)
    source.close()


def test_what_a_reward_changes_is_no_other_rollouts(tokenizer: Any):
    turns, _ = build(tokenizer, [[f"{CALL % 4}{EOS}"], [f"8{EOS}"]])
    seen: list[Any] = []

    def reward(completions: Any) -> list[float]:
        for messages in completions:
            seen.append(messages[0]["tool_calls"][0]["function"]["arguments"].pop("x"))
            messages[0]["tool_calls"].clear()
            messages[1]["content"] += "!"
            seen.append(messages[1]["content"])
        return [1.0, 0.0]

    source = tool_source(turns, tokenizer, reward)
    for _ in range(2):  # the second time what was read and told before is remembered
        source.next_groups(1, deadline=Deadline("test", 10))
    assert seen == [4, "8!"] * 4
    source.close()


def test_a_rollout_whose_tool_server_died_is_left_out_of_its_group(tokenizer: Any):
    turns, _ = build(tokenizer, [[f"{CALL % 4}{EOS}", f"{CALL % 5}{EOS}", f"no{EOS}"], [f"ok{EOS}"]])

    def dies_at_5(x: int) -> int:
        if x == 5:
            raise ToolServerLost("the server broke off")
        return 2 * x

    turns.toolbox = Toolbox([Tool("double", dies_at_5, {})], timeout_s=5)
    item = play(turns, tokenizer, n=3)
    said = [sample.text for sample in item.group.samples]
    assert len(said) == 2 and "[tool]8" in said[0] and said[1] == "no"
    assert item.extras["tool_calls"] == [1, 0]
    counts = turns.failures  # type: ignore[attr-defined]
    assert (counts["rollout_failures"], counts["rollout_failures/tool_server"]) == (1, 1)


def test_a_group_of_one_is_dropped_with_the_reason(tokenizer: Any):
    turns, _ = build(tokenizer, [[f"{CALL % 4}{EOS}", f"no{EOS}"]])

    def dies(x: int) -> int:
        raise ToolServerLost("the server broke off")

    turns.toolbox = Toolbox([Tool("double", dies, {})], timeout_s=5)
    source = tool_source(turns, tokenizer, lambda completions: [0.0] * len(completions))
    with pytest.raises(RewardError, match="all but 1 rollouts of prompt '0' failed"):
        source.next_groups(1, deadline=Deadline("test", 10))
    assert source.counters()["dropped_groups"] == 10


def test_all_turns_of_a_prompt_are_one_conversation_of_the_engine(tokenizer: Any):
    turns, engine = build(tokenizer, [[CALL % 4], ["8"]])
    play(turns, tokenizer, n=2)
    assert len(engine.requests) == 2
    assert {request.conversation for call in engine.requests for request in call} == {"tools 1"}


def test_turns_after_a_prompt_with_images_are_asked_for_with_them(tokenizer: Any):
    turns, engine = build(tokenizer, [[CALL % 4], ["8"]])
    shown = PromptImages({})
    asyncio.run(turns.play(replace(prompt(tokenizer), images=shown), seed=1))
    assert [request.images for requests in engine.requests for request in requests] == [shown, shown]


PARTS = "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
PARTS += "{{ '#' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"


class Reader:
    """A reader for which # in a text is an image of three tokens, and a picture a number."""

    def prepare(self, problem: Any, *, directory: Any) -> Any:
        raise NotImplementedError

    def encode(self, text: str, images: Sequence[Any], *, place: str, special_tokens: bool) -> Any:
        raise NotImplementedError

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def answer(self, text: str, *, messages: Any, given: Any) -> tuple[tuple[int, ...], PromptImages]:
        if given[0].get("path") == "none":
            raise DataError("the image 'none' cannot be read")
        ids = self.tokenizer(text.replace("#", "###"))["input_ids"]
        return tuple(ids), PromptImages({"pixels": np.array([one["pixels"] for one in given])}, sizes=[(1, 1)])


@pytest.mark.parametrize("broken", [False, True])
def test_images_of_an_answer_are_in_the_turns_after_it(tokenizer: Any, broken: bool):
    tokenizer.chat_template = TEMPLATE.replace("{{ message.content }}{% endif %}", f"{PARTS}{{% endif %}}")
    turns, engine = build(tokenizer, [[f"{CALL % 4}{EOS}"], [f"{CALL % 5}{EOS}"], [f"ok{EOS}"]])

    def look(x: int) -> Any:
        return ["1234567890" * 3, {"type": "image", "pixels": x, "path": "none" if broken else "here"}]

    turns.toolbox = Toolbox([Tool("double", look, {})], timeout_s=5, shows_images=True)
    turns.images = Reader(tokenizer)
    prompt_images = PromptImages({"pixels": np.array([9])}, sizes=[(1, 1)])
    asked = replace(prompt(tokenizer), images=prompt_images)
    if broken:
        with pytest.raises(RolloutFailed, match="cannot be read"):
            asyncio.run(turns.play(asked, seed=1))
        return
    sample = asyncio.run(turns.play(asked, seed=1)).samples[0]
    told = "[tool]12345678901234567890 ... (cut)###;[assistant]"
    assert tokenizer.decode(sample.completion_ids).count(told) == 2
    assert [one.inputs["pixels"].tolist() for one in sample.images] == [[4], [5]]
    assert not any(own for own, token in zip(sample.mask or (), sample.completion_ids, strict=True)
                   if token == tokenizer("#")["input_ids"][0])  # fmt: skip
    last = engine.requests[-1][0]
    assert last.images is not None
    assert [one.inputs["pixels"].tolist() for one in last.images.records] == [[9], [4], [5]]
    for one in last.images.later:
        assert tokenizer.decode(last.prompt_ids[one.first :]).startswith(f";{told}")


@pytest.mark.parametrize("sampled", [True, False])
def test_tokens_of_images_end_a_rollout_or_fail_it(tokenizer: Any, sampled: bool):
    """A model's own ends its last turn; in a tool's answer, they would stand for an image that does not exist."""
    turns, engine = build(tokenizer, [[CALL % 4], ["8"]])
    (mark,) = short_token_ids(tokenizer, ["4" if sampled else "8"])[0]
    turns.placeholders = frozenset({mark})
    if sampled:
        asyncio.run(turns.play(prompt(tokenizer), seed=1))
        assert len(engine.requests) == 1
        return
    with pytest.raises(RolloutFailed, match="has the token '8', which stands for an image"):
        asyncio.run(turns.play(prompt(tokenizer), seed=1))
