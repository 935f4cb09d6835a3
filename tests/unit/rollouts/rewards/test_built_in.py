from __future__ import annotations

import time

import pytest

from lachesis.config.schema.rollouts import NAMED_REWARDS
from lachesis.rollouts.rewards import built_in, mathematics
from lachesis.rollouts.rewards.built_in import FACTORIES, FUNCTIONS

R1 = "<think>\nStep 1: add.\n</think>\n<answer>\n4\n</answer>"


def messages(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_the_configuration_knows_the_names():
    assert set(NAMED_REWARDS) == set(FUNCTIONS) | set(FACTORIES)


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("think_format_reward", ["<think>a\nb</think>c", "<think>a</think><think>", "a <think>b</think>"], [1, 0, 0]),
        ("format", [R1, R1 + "!", "<think>a</think>"], [1, 0, 0]),
        ("tag_count", [R1, "<think>\na\n</think>\n", ""], [1, 0.5, 0]),
        ("reasoning_steps", ["First, a. Next, b. Finally, c.", "Step 1: a\n- b", "none"], [1, 2 / 3, 0]),
    ],
)
def test_forms(name, texts, expected):
    assert FUNCTIONS[name](messages(*texts)) == pytest.approx(expected)
    assert FUNCTIONS[name](texts) == pytest.approx(expected)  # as texts too


def test_answers_are_compared_by_their_value():
    answers = messages(r"so \boxed{\frac{2}{6}}", r"so \boxed{\frac{1}{2}}", "no answer")
    assert FUNCTIONS["accuracy_reward"](answers, solution=[r"$\frac{1}{3}$"] * 3) == [1.0, 0.0, 0.0]
    assert FUNCTIONS["accuracy"](messages("x"), solution=[""]) == [None]


def test_gsm8k_s_answer_is_what_follows_its_mark():
    calculation = "84 holes / 3 holes/day = <<84/3=28>>28 days\n28 / 7 days/week = <<28/7=4>>4 weeks\n#### 1,004"
    answers = messages(r"\boxed{1004}", r"\boxed{28}")
    assert FUNCTIONS["accuracy_reward"](answers, solution=[calculation] * 2) == [1.0, 0.0]


def test_answers_that_are_slow_to_compare_share_a_bound_of_time(monkeypatch, capfd):
    """One that is not compared in time is wrong; the others are judged, and no text of an answer is logged."""
    monkeypatch.setattr(mathematics, "_SLOW_S", 1.0)
    monkeypatch.setattr(mathematics, "_LEAST_S", 0.2)  # for the last one, on a busy machine
    slow = ["\\boxed{\x1b[2J" + "(" * 400 + f"{n}" + ")" * 400 + "}" for n in range(10)]
    started = time.monotonic()
    rewards = FUNCTIONS["accuracy_reward"]([r"\boxed{4}", *slow, r"\boxed{4}"], solution=["$4$"] * 12)
    assert time.monotonic() - started < 5
    assert rewards == [1.0, *[0.0] * 10, 1.0]
    assert "\x1b" not in "".join(capfd.readouterr())


def test_an_answer_before_the_end_of_reasoning_is_none():
    texts = messages(r"<think>\boxed{5}</think> \boxed{4}", r"<think>\boxed{4}", r"<think></think>\boxed{4}")
    assert FUNCTIONS["reasoning_accuracy_reward"](texts, solution=["$4$"] * 3) == [1.0, 0.0, 1.0]


def test_lengths_beyond_a_bound_cost():
    reward = FACTORIES["get_soft_overlong_punishment"](max_completion_len=10, soft_punish_cache=4)
    assert reward(completion_ids=[[1] * n for n in (5, 6, 7, 8, 10, 11)]) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    default = FACTORIES["get_soft_overlong_punishment"]()
    assert default(completion_ids=[[1] * 1024, [1] * 1152]) == [0.0, -0.5]


def test_repetitions_cost_their_share():
    reward = FACTORIES["get_repetition_penalty_reward"](ngram_size=2)
    assert reward(messages("a", "b", "c"), completion_ids=[[1, 2, 3], [1, 1, 1, 1, 1], [1]]) == [0.0, -0.75, 0.0]
    words = FACTORIES["repetition_penalty"](ngram_size=1, max_penalty=-2.0, in_tokens=False)
    assert words(messages("A a b b"), completion_ids=[[1]]) == [-1.0]


def test_of_right_answers_the_short_ones_are_worth_more(monkeypatch):
    equal = lambda text, gold, _: None if not gold else float(text.strip() == gold)  # noqa: E731
    monkeypatch.setattr(mathematics, "same_answer", equal)
    cosine = FACTORIES["get_cosine_scaled_reward"](max_len=100)
    ids = [[1] * 50, [1] * 50, [1], [1] * 500]
    assert cosine(messages("4", "5", "x", "4"), solution=["4", "4", "", "4"], completion_ids=ids) == pytest.approx(
        [0.75, -0.75, None, 0.5]
    )
    lengths = FUNCTIONS["length"](messages("4", "4  ", "5    ", "55"), solution=["4"] * 4)
    assert lengths == pytest.approx([0.5, 0.0, -0.5, 0.0])


def test_code_needs_its_language():
    reward = FACTORIES["code_format"](language="cpp")
    good = "<think>\na\n</think>\n<answer>\n```cpp\nint a;\n```\n</answer>"
    assert reward(messages(good, good.replace("cpp", "python"))) == [1.0, 0.0]


def test_reasoning_that_the_prompt_has_opened_goes_on_in_the_completion():
    texts = messages("a\n</think>\n4", "<think>a</think>4", "a", "a\n</think>\n4")
    prompts = ["[assistant]<think>\n", "[assistant]<think>", "[assistant]<think>", "[assistant]"]
    assert built_in.think_format_reward(texts, prompt_texts=prompts) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "without"), [("format", 0.0), ("tag_count", 0.75), ("code_format", 0.0)])
def test_a_form_may_begin_in_the_prompt(name: str, without: float):
    texts = messages(*["a\n</think>\n<answer>\n```python\n4\n```\n</answer>"] * 2)
    reward = FUNCTIONS.get(name) or FACTORIES[name]()
    assert reward(texts, prompt_texts=["[assistant]<think>\n", "[assistant]"]) == [1.0, without]
