"""Chat templates write what messages say, or the texts as parts of messages."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.rollouts.datasets.rendering import applied
from tests.tiny import tiny_tokenizer

SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": 'what is "a"?'}]
# As SmolVLM's, whose own one is longer.
OF_PARTS = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'][0]['type'] == 'image' %}!{% endif %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};"
    "{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (OF_PARTS, 'system:be brief;user:what is "a"?;'),
        (PLAIN, 'system:be brief;user:what is "a"?;'),
        (PLAIN.replace("m['content']", "m['content'] | upper"), 'system:BE BRIEF;user:WHAT IS "A"?;'),
        ("{{ messages[1:] | tojson }}", '[{"role": "user", "content": "what is \\"a\\"?"}]'),
        ("always this", "always this"),
    ],
)
def test_texts_are_parts_where_a_template_drops_others(template: str, text: str):
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    assert applied(tokenizer, SAID) == text
