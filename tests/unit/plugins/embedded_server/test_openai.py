"""What a client may put into a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.engines.serving.bodies import Refused, parse
from lachesis.plugins.embedded_server.openai import _TokenizeBody, render_chat
from tests.tiny import tiny_tokenizer

MESSAGES = [{"role": "user", "content": "1+1"}]


def rendered(variables: dict[str, Any]) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ more }}{{ documents[0].text }}"
    body = parse(_TokenizeBody, {"messages": MESSAGES, "chat_template_kwargs": variables})
    return str(tokenizer.decode(render_chat(body, tokenizer)))


def test_variables_reach_the_template():
    assert rendered({"more": "=2", "documents": [{"text": "3"}]}) == "1+1=23"


@pytest.mark.parametrize(
    "name", ["chat_template", "max_length", "padding", "return_tensors", "tokenizer_kwargs", "tokenize", "conversation"]
)
def test_options_of_the_tokenizer_are_refused(name: str):
    """A template with loops in loops, or padding to 10 ** 9 tokens, held up the server for all."""
    with pytest.raises(Refused, match=f"chat_template_kwargs has '{name}'"):
        rendered({name: "{% for i in range(99999) %}{% endfor %}"})
