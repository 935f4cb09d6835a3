"""Parts between marks are those that the regular expressions found, in linear time."""

from __future__ import annotations

import random
import re

import pytest

from lachesis.plugins.sandbox.rewards.grpo_code.rewards import code_blocks
from lachesis.rollouts.tagged_text import after_in_order, has_line_end, longest_boxed, tagged

BLOCK = re.compile(r"```[ \t]*(?P<language>[\w.+-]*)[^\r\n]*\r?\n(?P<code>.*?)```", re.DOTALL)
FORM = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)
CODE_FORM = re.compile(
    r"^<think>\n.*?\n</think>\n<answer>\n.*?```python.*?```.*?\n</answer>$", re.DOTALL | re.MULTILINE
)
PIECES = ("```", "`", "python", "a b", "\n", "\r\n", "\r", " \t", "<answer>", "</answer>", "x", "{", "}")
TAGS = ("<think>\n", "\n</think>\n", "<answer>\n", "\n</answer>", "\n", "x", "```python", "```", " ")


def texts(pieces: tuple[str, ...], *, count: int) -> list[str]:
    chance = random.Random(0)
    return ["".join(chance.choices(pieces, k=chance.randrange(1, 24))) for _ in range(count)]


def form(text: str, *inside: str) -> bool:
    start = text.startswith("<think>\n")
    at = after_in_order(text, ("\n</think>\n<answer>\n", *inside), at=8)
    return start and at >= 0 and has_line_end(text, "\n</answer>", at)


def test_blocks_are_those_of_the_regular_expression():
    some = texts(PIECES, count=20_000)
    found = [list(code_blocks(text)) for text in some]
    assert found == [[(match["language"], match["code"]) for match in BLOCK.finditer(text)] for text in some]
    assert sum(map(bool, found)) > 1000


def test_tags_are_those_of_the_regular_expression():
    for text in texts(PIECES, count=5_000):
        assert list(tagged(text, "<answer>", "</answer>")) == re.findall(r"(?s)<answer>(.*?)</answer>", text)


@pytest.mark.parametrize(("pattern", "inside"), [(FORM, ()), (CODE_FORM, ("```python", "```"))])
def test_forms_are_those_of_the_regular_expression(pattern: re.Pattern[str], inside: tuple[str, ...]):
    some = ["<think>\n" + text for text in texts(TAGS, count=20_000)]
    found = [form(text, *inside) for text in some]
    assert found == [pattern.match(text) is not None for text in some]
    assert sum(found) > 20


def test_the_longest_box():
    assert longest_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}") == len(r"\frac{1}{2}")
    assert longest_boxed(r"\boxed{a\boxed{b}c}") == len(r"a\boxed{b}c")
    assert longest_boxed(r"} {1} \boxed{2") is None
