from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lachesis.common.errors import DataError, RewardError
from lachesis.common.types import Prompt
from lachesis.plugins.checks import rewards as check_rewards_module
from lachesis.plugins.checks.rewards import RewardCheck, check_rewards
from lachesis.rollouts.rewards.rewarder import NamedReward
from tests.tiny import tiny_tokenizer


def problems(**more: Any) -> list[Prompt]:
    answers = ("1234", "5678", "9012")
    return [
        Prompt(id=str(i), token_ids=(1,), text=f"q{i}", columns={"answer": answer} | more)
        for i, answer in enumerate(answers)
    ]


def texts(completions: list[Any]) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def exact(completions, answer):
    return [float(text == right) for text, right in zip(texts(completions), answer, strict=True)]


def check(*functions: Callable[..., Any], **options: Any) -> RewardCheck:
    rewards = [NamedReward(getattr(f, "__name__", "f").strip("<>"), f) for f in functions]
    return check_rewards(rewards, options.pop("problems", problems()), **options)


def rules(found: RewardCheck) -> list[tuple[str, str]]:
    return [(finding.level, finding.rule) for finding in found.findings]


class TestGoodRewards:
    def test_one_that_looks_at_the_content(self):
        found = check(exact)
        assert found.findings == []
        assert found.scores == {
            "exact": {"gold": 1.0, "empty": 0.0, "truncated": 0.0, "shuffled": 0.0, "repeated": 0.0}
        }

    def test_one_that_looks_at_the_form_beside_it(self):
        def digits(completions):
            return [float(len(text) == 4) for text in texts(completions)]

        found = check(exact, digits)
        assert rules(found) == [("note", "form only")]
        assert "'digits'" in found.findings[0].message

    def test_answers_may_have_a_frame(self):
        def framed(completions, answer):
            return [float(text == f"<a>{right}</a>") for text, right in zip(texts(completions), answer, strict=True)]

        assert check(framed, gold_format="<a>{gold}</a>").findings == []
        assert rules(check(framed))[0] == ("problem", "constant")

    def test_token_ids_are_there_with_a_tokenizer(self):
        def short(completion_ids, completions, answer):
            assert [len(ids) for ids in completion_ids] == [len(text) for text in texts(completions)]
            return exact(completions, answer)

        assert check(short, tokenizer=tiny_tokenizer()).findings == []


class TestBadRewards:
    def find(self, function: Callable[..., Any], rule: str, **options: Any) -> str:
        found = [finding.message for finding in check(function, **options).findings if finding.rule == rule]
        assert found
        return found[0]

    def test_constant(self):
        assert "gives 0.5 to every answer" in self.find(lambda completions: [0.5] * len(completions), "constant")

    def test_abstaining(self):
        assert "abstains on every answer" in self.find(lambda completions: [None] * len(completions), "abstains")

        def only_wrong(completions, answer):
            return [None if text == right else 0.0 for text, right in zip(texts(completions), answer, strict=True)]

        assert rules(check(only_wrong))[0] == ("problem", "constant")

    def test_who_judges_nothing_gives_nothing(self):
        def fails(completions):
            raise KeyError("answer")

        assert rules(check(lambda completions: [None] * len(completions))) == [("problem", "abstains")]
        assert {rule for _, rule in rules(check(fails))} == {"fails"}

    def test_saying_nothing_pays(self):
        def brief(completions, answer):
            return [1.0 - len(text) / 100 for text in texts(completions)]

        message = self.find(brief, "gameable")
        assert "gives 1 to an empty answer and 0.96 to the right one: an empty answer pays" in message

    def test_repetition_pays(self):
        def counted(completions, answer):
            return [float(text.count(right)) for text, right in zip(texts(completions), answer, strict=True)]

        assert "gives 8 to the right answer 8 times over, and 1" in self.find(counted, "gameable")

    def test_half_is_better(self):
        def half(completions, answer):
            shares = [len(text) for text in texts(completions)]
            return [1.0 if n == 2 else 0.5 if n == 4 else 0.0 for n in shares]

        assert "gives 1 to half of the right answer, and 0.5 to all of it" in self.find(half, "gameable")

    def test_nothing_looks_at_the_content(self):
        def digits(completions):
            return [float(len(text) == 4) for text in texts(completions)]

        found = check(digits)
        assert rules(found) == [("note", "form only"), ("problem", "gameable")]
        assert "the answer to another problem 1 and the right one 1" in found.findings[1].message

    def test_weights_count_in_the_total(self):
        def digits(completions):
            return [float(len(text) == 4) for text in texts(completions)]

        assert ("problem", "gameable") in rules(check(exact, digits, weights=[0.0, 1.0]))

    def test_crashing_and_hanging_are_told_with_the_sample(self):
        def crashes(completions):
            return [1 / len(text) for text in texts(completions)]

        message = self.find(crashes, "fails")
        assert message.startswith("on empty answers: reward function 'crashes' raised ZeroDivisionError")
        assert "(3 of 3 rows)" in message

        def hangs(completions):
            if "" in texts(completions):
                threading.Event().wait(600)
            return [float(len(text)) for text in texts(completions)]

        assert "did not return within 0.05 s" in self.find(hangs, "fails", timeout_s=0.05)

    def test_slow(self, monkeypatch):
        monkeypatch.setattr(check_rewards_module, "_SLOW_S", 0.01)

        def slow(completions, answer):
            time.sleep(0.012 * len(completions))
            return exact(completions, answer)

        assert "for 256" in self.find(slow, "slow", rows=1)

    def test_random(self):
        source = random.Random(0)

        def noisy(completions, answer):
            return [value + source.random() / 100 for value in exact(completions, answer)]

        assert "differently a second time" in self.find(noisy, "random")


class TestGold:
    def test_the_column_can_be_named_and_is_else_looked_for(self):
        assert check(exact, problems=problems(response="x"), gold_column="answer").findings == []
        found = check(exact, problems=problems(response="x"))
        assert rules(found)[0] == ("problem", "constant")

    @pytest.mark.parametrize("options", [{"gold_column": "nothing"}, {"problems": [Prompt("0", (1,), "q")]}])
    def test_no_right_answers(self, options):
        with pytest.raises(DataError, match="no right answers") as caught:
            check(exact, **options)
        assert "--gold" in caught.value.remedy

    def test_a_column_that_the_function_needs(self):
        with pytest.raises(RewardError, match="needs 'solution'"):
            check(lambda completions, solution: [])

    def test_rows_limit_what_is_looked_at(self):
        calls = []

        def spy(completions, answer):
            calls.append(len(completions))
            return exact(completions, answer)

        check(spy, rows=2)
        assert set(calls) == {2}
