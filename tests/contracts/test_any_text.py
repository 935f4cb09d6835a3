"""Whatever a model writes, reading it takes time that grows as its length, and ends in a value.

Each reader of a completion is given texts of 64,000 and more characters that repeat what it looks for without an end,
nest it, or leave it open. Times are this process's own, as the machine may be busy.
"""

# ruff: noqa: E501
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from examples.environments import calculator

from lachesis.common.json_values import read_json
from lachesis.plugins.atropos.environments.records import Trajectory
from lachesis.plugins.environments.agents.requests import BadRequest, arguments_of
from lachesis.plugins.environments.reasoning_gym import parse_tasks, score_answer
from lachesis.plugins.sandbox.rewards.code_tests import same_output
from lachesis.plugins.sandbox.rewards.grpo_code import rewards as code
from lachesis.rollouts.rewards import built_in
from lachesis.rollouts.rewards.mathematics import same_answer
from lachesis.rollouts.tools.parsers import hermes

SIZE = 64_000
# Of 64,000 characters; those that are quadratic take seconds to minutes.
MOST_S = 1.0
CLASS = "class A:\n    def f(self): return 1\n"

MARKS = (
    "```", "```python\n", "```\r", "``` ", "````", "<answer>", "</answer>", "<think>", "</think>", "<think>\n", "\n</think>\n<answer>\n",
    "<tool_call>", "</tool_call>", '<tool_call>{"name": "f", "arguments": {}}', "[TOOL_CALLS]", "<|python_tag|>", "[CALL_ID]a[ARGS]",
    "{", "[", '{"a":', "[{", '"', "\\", "\\u", "\\boxed{", "$", "\\frac{", "<calc>", "</calc>", "<answer> ", "Step 1", "1", "9e", "-",
    "+1", ".b", "not ", "lambda:", "(", ")", "f(", " ", "\n", "\t", "\r\n", "a", "Ω", "\ud800", "a.", "if 1:\n ", "x=", "@", "\x00", "#", "'''",
)  # fmt: skip


def adversarial() -> dict[str, str]:
    found: dict[str, str] = {}
    for mark in MARKS:
        found[f"{mark!r} without end"] = mark * (SIZE // len(mark))
    found |= {
        "a fence and letters": "```" + "a" * SIZE,
        "a fence, letters and fences": ("```" + "a" * 40) * (SIZE // 43),
        "an answer of spaces": "<answer>" + " " * SIZE + "x",
        "thoughts, then beginnings": "<think>\n" + "\n</think>\n<answer>\n```python" * (SIZE // 30),
        "a call of letters": "[TOOL_CALLS]" + "a" * SIZE,
        "a call of identifiers": "[TOOL_CALLS]a" + "[CALL_ID]" + "b" * SIZE,
        "a call and spaces": "[TOOL_CALLS]a" + " " * SIZE,
        "a deep list": "[" * 30_000 + "]" * 30_000,
        "a deep object": '{"a":' * 12_000 + "1" + "}" * 12_000,
        "a deep call": '<tool_call>{"name": "f", "arguments": ' + "[" * 30_000 + "]" * 30_000 + "}</tool_call>",
        "a call just deep enough": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901,
        "a number of 60,000 digits": "9" * 60_000,
        "a sum of 900 terms": "```python\ndef g(self):\n    return " + "+".join(["1"] * 900) + "\n```",
        "a sum of 20,000 terms": "```python\ndef g(self):\n    return " + "+".join(["1"] * 20_000) + "\n```",
        "900 conditions": "```python\ndef g(self):\n    return " + "1 if 1 else " * 900 + "1\n```",
        "900 times not": "```python\ndef g(self):\n    return " + "not " * 900 + "1\n```",
        "900 powers": "```python\ndef g(self):\n    return " + "2**" * 900 + "1\n```",
        "a hexadecimal number too long to write": f"```python\ndef g(self): return 0x{'f' * 5000}\n```",
        "nested functions": "```python\n"
        + "".join(f"{' ' * n}def g{n}(self):\n" for n in range(90))
        + " " * 90
        + "1\n```",
        "a call of calls": "```python\ng" + "(g" * 180 + ")" * 180 + "\n```",
        "calls that add up": '{"name": "f", "arguments": {}}; ' * 2000 + "{",
    }
    return found


TEXTS = adversarial()
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"```python\n{CLASS}```"}]


def answered(text: str) -> Trajectory:
    return Trajectory(messages=[{"role": "assistant", "content": text}])


def value_of(read: Callable[[], object]) -> object:
    """What reads JSON may say that it is none, which is a value here."""
    try:
        return read()
    except (ValueError, BadRequest) as error:
        return error


READERS: dict[str, Callable[[str], Any]] = {
    "code": code.extract_code,
    "the form of code": lambda text: code.soft_format_reward_func([text]),
    "a follow-up": lambda text: code.join_turns(CLASS, code.extract_code(text)),
    "a whole text as a follow-up": lambda text: code.join_turns(CLASS, text),
    "the code of a conversation": lambda text: code._earlier_code([{"role": "assistant", "content": text}]),
    "work": lambda text: code._work(text, [], "class B:\n    pass", CLASS),
    "marked answers": lambda text: list(code.tagged(text, "<answer>", "</answer>")),
    "think_format": lambda text: built_in.think_format_reward([text]),
    "format": lambda text: built_in.format_reward([text]),
    "code_format": lambda text: built_in.get_code_format_reward()([text]),
    "tag_count": lambda text: built_in.tag_count_reward([text]),
    "reasoning_steps": lambda text: built_in.reasoning_steps_reward([text]),
    "repetition_penalty": lambda text: built_in.get_repetition_penalty_reward(in_tokens=False)([text], [[]]),
    "outputs of programs": lambda text: same_output(text, text[::-1]),
    "calls of tools by Hermes": hermes,
    "JSON": lambda text: value_of(lambda: read_json(text)),
    "arguments of a call": lambda text: value_of(lambda: arguments_of(text)),
    "the calculator's answer": lambda text: calculator.final_answer(answered(text)),
    "the calculator's call": calculator._CALL.search,
}


@pytest.mark.parametrize("reader", READERS)
def test_reading_takes_linear_time_and_bounded_recursion(reader: str):
    slow = {}
    depth = sys.getrecursionlimit()
    for name, text in TEXTS.items():
        started = time.process_time()
        READERS[reader](text)
        took_s = time.process_time() - started
        if took_s > MOST_S:
            slow[name] = took_s
    assert slow == {}
    assert sys.getrecursionlimit() == depth


def test_a_follow_up_that_is_too_deep_to_write_anew_is_kept_as_it_is():
    deep = "def g(self):\n    return " + "+".join(["1"] * 900)
    assert code.join_turns(CLASS, deep) == f"{CLASS}\n\n{deep}"


def test_the_scoring_of_a_task_of_reasoning_gym_reads_any_text():
    pytest.importorskip("reasoning_gym")
    from lachesis.plugins.environments.reasoning_gym import entries

    (entry,) = entries(parse_tasks("reasoning_gym:chain_sum?size=1")[0])
    started = time.process_time()
    assert score_answer(entry, "<answer>" * (SIZE // 8)) < 1
    assert time.process_time() - started < MOST_S


MATHS = {
    "a box of 900 variables": r"\boxed{" + "+".join(f"x_{i}" for i in range(900)) + "}",
    "a box of a large set": r"\boxed{\{" + ",".join(map(str, range(2000))) + r"\}}",
    "a box of fractions": r"\boxed{" + r"\frac{1}{" * 300 + "1" + "}" * 301,
    "boxes without end": r"\boxed{" * (SIZE // 7),
    "dollars": "$" * SIZE,
    "a sum": "$" + "+".join(["1"] * 20_000) + "$",
    "parentheses": "$" + "(" * SIZE + "$",
    "digits": "$" + "9" * SIZE + "$",
    "a tower": "$9^{9^{9^{9}}}$",
}


@pytest.mark.parametrize("name", MATHS)
def test_answers_that_mathematics_would_take_long_over_are_wrong(name: str):
    pytest.importorskip("math_verify")
    started = time.process_time()
    assert same_answer(MATHS[name], "$4$") == 0.0
    assert time.process_time() - started < 4.0


def test_a_right_answer_is_found_behind_a_long_text():
    pytest.importorskip("math_verify")
    text = "so $x = 3$ and then\n" * 3000
    assert same_answer(text + r"it is \boxed{4}.", "$4$") == 1.0
    assert same_answer(text + "The final answer is $4$. I hope it is correct.", "$4$") == 1.0
