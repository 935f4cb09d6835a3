"""TRL's environments: their methods are told of and called as tools, and their state is the reward."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.environments.steps.tools import tool_schemas
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from tests.unit.plugins.environments.steps.games import TOKENIZER, Tools, play

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def call(number: str) -> str:
    return '<tool_call>{"name": "add", "arguments": {"number": %s}}</tool_call>' % number  # noqa: UP031


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATE)


def test_methods_are_called_until_a_turn_calls_none():
    judge = Rewarder([NamedReward("none", lambda completions: [0.0])])
    played = play(Tools, call("2") + call("3"), call("-1"), "done", max_tokens=400, max_context=900, rewarder=judge)
    (sample,) = played.samples
    assert TOKENIZER.decode(sample.prompt_ids).replace(" ", "") == "[add](begin)"
    assert "25" in sample.text and "error: ValueError: too little" in sample.text
    assert sample.rewards == (5.0,)
    assert played.metrics == {"turns": 3, "tool_calls": 3.0, "tool_errors": 1.0, "truncated": 0}
    assert [message["role"] for message in played.state.said] == ["assistant", "tool", "tool", "assistant", "tool",
                                                                   "assistant"]  # fmt: skip


def test_a_method_has_to_be_described_and_there_has_to_be_one():
    class Bare:
        def reset(self) -> None: ...

        def act(self, what): ...

    with pytest.raises(ConfigError, match=r"'Bare\.act' cannot be described"):
        tool_schemas(Bare())
    with pytest.raises(ConfigError, match="the model could do nothing"):
        tool_schemas(object())


def test_tools_need_a_template(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    with pytest.raises(ConfigError, match="tools need a chat template"):
        play(Tools, "x")
