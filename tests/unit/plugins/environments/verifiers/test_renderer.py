"""Later turns of a conversation by any chat template: what was sampled stays, what the environment said is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("renderers", reason="verifiers is not installed")
from lachesis.plugins.environments.verifiers.renderer import added_tokens

EOS, NEWLINE = 1, 2
ROLES = {"user": 10, "assistant": 11, "tool": 12, "system": 13}


def chatml(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
    """A role, the characters, an end, and a newline after it: as ChatML."""
    ids = [
        token
        for message in messages
        for token in (ROLES[message["role"]], *map(ord, str(message["content"])), EOS, NEWLINE)
    ]
    return [*ids, ROLES["assistant"]] if add_generation_prompt else ids


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_what_the_template_puts_after_an_end_comes_first_and_then_each_message():
    parts = added_tokens([said("tool", "A"), said("user", "B")], apply=chatml, stop_ids=[EOS], ended=[70, EOS])
    assert parts == [
        (-1, [NEWLINE]),
        (0, [ROLES["tool"], ord("A"), EOS, NEWLINE]),
        (1, [ROLES["user"], ord("B"), EOS, NEWLINE]),
        (-1, [ROLES["assistant"]]),
    ]


def test_it_is_what_a_whole_rendering_would_have():
    first = [said("user", "Q"), said("assistant", "A")]
    more = [said("user", "R")]
    completion = [ord("A"), EOS]
    parts = added_tokens(more, apply=chatml, stop_ids=[EOS], ended=completion)
    assert parts is not None
    prompt = chatml(first[:1], add_generation_prompt=True)
    continued = [*prompt, *completion, *(token for _, part in parts for token in part)]
    assert continued == chatml([*first, *more], add_generation_prompt=True)


@pytest.mark.parametrize("ended", [[], [70]], ids=["nothing was said", "it was cut off"])
def test_a_completion_without_an_end_cannot_be_gone_on_from(ended: list[int]):
    assert added_tokens([said("user", "B")], apply=chatml, stop_ids=[EOS], ended=ended) is None


def test_a_template_that_writes_earlier_turns_anew_is_not_gone_on_from():
    def counting(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        return [len(messages), *chatml(messages, add_generation_prompt=add_generation_prompt)]

    assert added_tokens([said("user", "B")], apply=counting, stop_ids=[EOS], ended=[EOS]) is None


def test_what_the_model_itself_said_is_never_added():
    assert added_tokens([said("assistant", "B")], apply=chatml, stop_ids=[EOS], ended=[EOS]) is None
    assert added_tokens([], apply=chatml, stop_ids=[EOS], ended=[EOS]) is None
