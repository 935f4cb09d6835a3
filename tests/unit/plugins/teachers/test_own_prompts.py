"""What a policy that is its own teacher reads: chosen as TRL's SDPO and SDFT choose it."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import TeacherConfig
from lachesis.plugins.teachers.own_prompts import OwnPrompts
from tests.tiny import tiny_tokenizer

SDPO = "{prompt}\nCorrect solution:\n\n{solution}\n\n"
FEEDBACK = "{prompt}\nFeedback: {feedback}"


def group(*rewards: float | None, messages: Any = None, **columns: Any) -> Group:
    samples = tuple(
        Sample((1,), (2,), (-1.0,), "stop", VersionSpan(0, 0), text=f"say {i}", reward=reward)
        for i, reward in enumerate(rewards)
    )
    return Group(Prompt("7", (1,), "1+1=", messages=messages, columns=columns), samples)


def writer(*prompts: str, **options: Any) -> OwnPrompts:
    return OwnPrompts(TeacherConfig(kind="self", prompts=[*prompts], **options), tiny_tokenizer(), {})


def texts(found: OwnPrompts, of: Group) -> list[str | None]:
    return [found.text(of, place) for place in range(len(of.samples))]


def test_a_solution_is_the_first_other_completion_that_succeeded():
    first, third = (SDPO.format(prompt="1+1=", solution=f"say {i}") for i in (1, 3))
    assert texts(writer(SDPO), group(0.0, 1.0, None, 2.0)) == [first, third, first, first]
    assert texts(writer(SDPO), group(0.0, 1.0, None, 0.5)) == [first, None, first, first]
    assert texts(writer(SDPO, success=0.5), group(0.5, 0.0)) == [None, SDPO.format(prompt="1+1=", solution="say 0")]


def test_the_first_prompt_that_can_be_filled_counts():
    found = writer(SDPO, FEEDBACK)
    told = "1+1=\nFeedback: too long"
    assert texts(found, group(0.0, 0.0, feedback="too long")) == [told, told]
    assert texts(found, group(0.0, 0.0, feedback="")) == [None, None]
    assert texts(found, group(0.0, 1.0, feedback="x"))[0] == SDPO.format(prompt="1+1=", solution="say 1")


def test_braces_and_numbers_of_a_row_stay_as_they_are():
    assert texts(writer("{prompt} {{x}} {answer}"), group(0.0, answer=2)) == ["1+1= {x} 2"]


@pytest.mark.parametrize("conversation", [True, False])
def test_a_prompt_is_tokenized_as_that_of_the_problem(conversation: bool):
    before = ({"role": "system", "content": "s"}, {"role": "user", "content": "1+1="})
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"
    found = OwnPrompts(TeacherConfig(kind="self", prompts=["{prompt}{answer}"]), tokenizer, {})
    (taught,) = found.teach([group(0.0, 1.0, messages=before if conversation else None, answer=2)])
    text = "[system]s[user]1+1=2>" if conversation else "1+1=2"
    wanted = tuple(tokenizer(text, add_special_tokens=not conversation)["input_ids"])
    assert [sample.teacher_prompt_ids for sample in taught.samples] == [wanted, wanted]


def test_environments_without_a_weight_are_not_taught():
    found = writer("{prompt}{answer}", column="env_id", weights={"math": 0.0})
    (math,) = found.teach([group(0.0, answer=2, env_id="math")])
    (chat,) = found.teach([group(0.0, answer=2, env_id="chat")])
    assert math.samples[0].teacher_prompt_ids is None
    assert chat.samples[0].teacher_prompt_ids
