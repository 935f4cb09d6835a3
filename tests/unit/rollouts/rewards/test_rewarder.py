from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from lachesis.common.errors import ConfigError, RewardError, StopRequested
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.rollouts.rewards import attempts
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder, Scored, load_reward, load_rewards
from tests.waiting import LONG_S, until


def sample(text: str, ids: tuple[int, ...] = (5, 6)) -> Sample:
    return Sample(
        prompt_ids=(1, 2),
        completion_ids=ids,
        logprobs=(-0.5,) * len(ids),
        finish_reason="stop",
        versions=VersionSpan(3, 4),
        text=text,
    )


def group(prompt_id: str, *texts: str, **columns: Any) -> Group:
    prompt = Prompt(id=prompt_id, token_ids=(1, 2), text=f"prompt {prompt_id}", columns=columns)
    return Group(prompt, tuple(sample(text) for text in texts))


def sums() -> list[Group]:
    return [group("0", "3", "4", answer="3"), group("1", "9", "x", answer="9"), group("2", "1", "2", answer="2")]


def score(function: Callable[..., Any], groups: list[Group] | None = None, **options: Any) -> Scored:
    rewarder = Rewarder([NamedReward("f", function)], **options)
    try:
        return rewarder.score(sums() if groups is None else groups)
    finally:
        rewarder.close()


def texts(completions: list[list[dict[str, str]]]) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def exact(completions, answer, **_):
    return [float(text == right) for text, right in zip(texts(completions), answer, strict=True)]


COUNTDOWN = "I add them.</think>\n<answer>44 + 19 + 35</answer>"


def reward_len(completions, **kwargs):
    """TRL's quick start, as published."""
    return [-abs(20 - len(completion)) for completion in completions]


def equation_reward_func(completions, target, nums, **kwargs):
    """A countdown reward, as published with TRL's trainer in mind (Mini-R1)."""
    rewards = []
    for completion, gt, numbers in zip(completions, target, nums):  # noqa: B905
        try:
            completion = "<think>" + completion
            match = re.search(r"<answer>(.*?)<\/answer>", completion)
            if match is None:
                rewards.append(0.0)
                continue
            equation = match.group(1).strip()
            used_numbers = [int(n) for n in re.findall(r"\d+", equation)]
            if sorted(used_numbers) != sorted(numbers):
                rewards.append(0.0)
                continue
            if not re.match(r"^[\d+\-*/().\s]+$", equation):
                rewards.append(0.0)
                continue
            result = eval(equation, {"__builtins__": None}, {})
            rewards.append(1.0 if abs(float(result) - float(gt)) < 1e-5 else 0.0)
        except Exception:
            rewards.append(0.0)
    return rewards


def rewards(scored: Scored) -> dict[str, tuple[float | None, ...]]:
    return {group.prompt.id: group.rewards for group in scored.groups}


class TestWhatFunctionsGet:
    def test_all_arguments_in_one_call(self):
        calls = []

        def spy(**kwargs):
            calls.append(kwargs)
            return [0.0] * 4

        score(spy, [group("0", "a", "b", answer="3", level=1), group("1", "c", "d", answer="9", level=2)])
        (kwargs,) = calls
        state = kwargs.pop("trainer_state")
        assert (state.global_step, state.max_steps) == (0, 0)
        assert callable(kwargs.pop("log_extra"))
        assert callable(kwargs.pop("log_metric"))
        assert kwargs == {
            "completions": [[{"role": "assistant", "content": text}] for text in "abcd"],
            "prompts": ["prompt 0", "prompt 0", "prompt 1", "prompt 1"],
            "prompt_texts": ["prompt 0", "prompt 0", "prompt 1", "prompt 1"],
            "completion_ids": [[5, 6]] * 4,
            "answer": ["3", "3", "9", "9"],
            "level": [1, 1, 2, 2],
        }

    def test_the_step_where_they_ask_for_it(self):
        seen = []

        def spy(completions, trainer_state):
            seen.append((trainer_state.global_step, trainer_state.max_steps))
            return [0.0] * len(completions)

        rewarder = Rewarder([NamedReward("f", spy)], max_steps=9)
        for step in (0, 4):
            rewarder.report_step(step)
            rewarder.score(sums())
        assert seen == [(0, 9), (4, 9)]

    def test_columns_of_their_own_for_each_sample(self):
        def spy(completions, env_reward, answer, log_extra):
            return [given if right != "9" else None for given, right in zip(env_reward, answer, strict=True)]

        groups = sums()[:2]
        scored = Rewarder([NamedReward("f", spy)]).score(groups, extras=[{"env_reward": [0.5, 1.5]}, {"other": [1, 2]}])
        assert rewards(scored) == {"0": (0.5, 1.5), "1": (None, None)}

    def test_only_what_they_take(self):
        def narrow(completions, answer):
            return [float(a == t) for a, t in zip(answer, texts(completions), strict=True)]

        scored = score(narrow, [group("0", "3", "4", answer="3", prompt="1+2=", difficulty=1)])
        assert rewards(scored) == {"0": (1.0, 0.0)}

    def test_prompts_are_messages_where_the_dataset_has_them(self):
        messages = ({"role": "user", "content": "1+2"},)
        prompt = Prompt(id="0", token_ids=(1,), text="<user>1+2", messages=messages)
        seen = []
        score(lambda prompts: seen.append(prompts) or [1.0], [Group(prompt, (sample("3"),))])
        assert seen == [[list(messages)]]

    def test_completions_of_texts_are_texts_where_that_is_asked_for(self):
        message = {"role": "user", "content": "1+2"}
        conversation = Group(Prompt("1", token_ids=(1,), text="<user>1+2", messages=(message,)), (sample("3"),))
        seen = []

        def spy(prompts, completions):
            seen.extend(zip(prompts, completions, strict=True))
            return [1.0] * len(prompts)

        score(spy, [group("0", "a", "b"), conversation], text_completions="text")
        answer = {"role": "assistant", "content": "3"}
        assert seen == [("prompt 0", "a"), ("prompt 0", "b"), ([message], [answer])]

    def test_rewards_written_for_trl_run_as_published(self):
        groups = [group("0", "four letters and more", "x" * 20), group("1", COUNTDOWN, "<answer>44-19</answer>")]
        columns = [{"target": [None] * 2, "nums": [None] * 2}, {"target": [98] * 2, "nums": [[44, 19, 35]] * 2}]
        rewarder = Rewarder(
            [NamedReward("len", reward_len), NamedReward("equation", equation_reward_func)], text_completions="text"
        )
        scored = rewarder.score(groups, extras=columns)
        assert [[one.rewards for one in group.samples] for group in scored.groups] == [
            [(-1.0, 0.0), (0.0, 0.0)],
            [(-abs(20.0 - len(COUNTDOWN)), 1.0), (-2.0, 0.0)],
        ]

    @pytest.mark.parametrize(
        ("form", "read", "remedy"),
        [
            ("text", lambda completion: completion[0]["content"], "text_completions: messages"),
            ("messages", lambda completion: re.search("3", completion), "text_completions: text"),
            ("messages", lambda completion: "<think>" + completion, "text_completions: text"),
            ("messages", lambda completion: completion.strip(), "text_completions: text"),
        ],
    )
    def test_a_function_that_expects_the_other_form_is_told_of_the_key(self, form: Any, read: Any, remedy: str):
        with pytest.raises(RewardError) as caught:
            score(lambda completions: [float(bool(read(c))) for c in completions], text_completions=form)
        assert remedy in caught.value.remedy

    def test_a_column_named_like_an_argument_is_hidden(self):
        scored = score(lambda prompts: [len(p) for p in prompts], [group("0", "a", prompts="longer than that")])
        assert rewards(scored) == {"0": (8.0,)}

    def test_a_column_that_some_prompts_lack_is_none_there(self):
        def present(completions, level):
            return [float(value is not None) for value in level]

        assert rewards(score(present, [group("0", "a", level=1), group("1", "b")])) == {"0": (1.0,), "1": (0.0,)}

    def test_what_a_function_does_to_its_lists_is_not_seen_by_the_next(self):
        def greedy(completions, answer, **_):
            result = exact(completions, answer)
            completions.clear()
            answer.clear()
            return result

        rewarder = Rewarder([NamedReward("a", greedy), NamedReward("b", exact)])
        assert rewards(rewarder.score(sums())) == {"0": (2.0, 0.0), "1": (2.0, 0.0), "2": (0.0, 2.0)}

    def test_what_it_does_to_the_values_in_them_neither(self):
        """Not by the next completion of the group, the next call, or the dataset."""

        def greedy(completions, prompts, tests, extra):
            seen = [len(one) for one in tests]
            for prompt, of_one, more in zip(prompts, tests, extra, strict=True):
                prompt[0]["content"] = "changed"
                of_one.pop()["name"] = "changed"
                more.clear()
            return [float(length) for length in seen]

        tests = [{"name": "first"}, {"name": "second"}]
        messages = ({"role": "user", "content": "2+2?"},)
        prompt = Prompt("0", (1, 2), "2+2?", messages=messages, columns={"tests": tests})
        extras = {"extra": [[1], [2]]}
        rewarder = Rewarder([NamedReward("a", greedy), NamedReward("b", greedy)], weights=[1.0, 10.0])
        scored = rewarder.score([Group(prompt, (sample("3"), sample("4")))], extras=[extras])
        assert rewards(scored) == {"0": (22.0, 22.0)}
        assert (tests, messages[0]["content"], extras) == (
            [{"name": "first"}, {"name": "second"}],
            "2+2?",
            {"extra": [[1], [2]]},
        )

    def test_a_column_that_there_is_not_is_reported_with_the_nearest(self):
        def misspelt(completions, anwser):
            raise AssertionError("never called")

        for on_error in ("fail", "drop_group"):
            with pytest.raises(RewardError, match=r"'f' needs 'anwser'.*\(answer\) -> did you mean answer"):
                score(misspelt, on_error=on_error)

    def test_what_is_given_is_suggested_where_it_is_all_but_written(self):
        with pytest.raises(RewardError, match=r"needs 'completion'.* -> did you mean completions"):
            score(lambda completion: [0.0] * len(completion))
        with pytest.raises(RewardError, match=r"needs 'completion'.* -> did you mean completions"):
            rewarder = Rewarder([NamedReward("f", lambda prompt, completion: 0.0)])
            rewarder.check_columns(["prompt"])
        with pytest.raises(RewardError, match=r"needs 'solution'.*\(answer\) -> name a column, add this"):
            score(lambda completions, solution: [0.0] * len(completions))

    def test_a_function_of_one_answer_is_shown_how_a_reward_is_called(self):
        with pytest.raises(RewardError, match=r"needs 'solution_str'.* lists of all completions: def f\(completions,"):
            score(lambda solution_str: 0.0)

    def test_columns_can_be_checked_before_anything_is_generated(self):
        rewarder = Rewarder([NamedReward("f", exact)])
        rewarder.check_columns(["answer", "prompt"])
        with pytest.raises(RewardError, match="needs 'answer'"):
            rewarder.check_columns(["prompt"])

    def test_problems_without_what_a_function_needs_are_named(self):
        """A function that compares with None gives 0, and nothing fails."""

        def greedy(completions, answer, turns, note=None, **columns):
            raise AssertionError("never called")

        rewarder = Rewarder([NamedReward("f", exact), NamedReward("g", greedy)])
        columns = [{"answer": "1"}, {"answer": None}, {}, {"answer": "", "note": None}]
        problems = [Prompt(f"data.jsonl:{i}", (1,), "?", columns=given) for i, given in enumerate(columns)]
        assert rewarder.blanks(problems) == [
            f"reward function {name!r} needs 'answer', but 2 of 4 problems do not have it "
            "(the first is 'data.jsonl:1'); it gets None for these"
            for name in "fg"
        ]
        assert rewarder.blanks(problems[:1]) == []

    def test_coroutine_functions_are_awaited(self):
        async def judge(completions, answer, **_):
            await asyncio.sleep(0)
            return exact(completions, answer)

        assert rewards(score(judge))["1"] == (1.0, 0.0)


class TestLogging:
    def test_extras_are_kept_by_group_and_metrics_are_means(self):
        def chatty(completions, log_extra, log_metric):
            log_extra("length", [len(text) for text in texts(completions)])
            log_metric("share", 0.25)
            log_metric("share", 0.75)
            return [0.0] * len(completions)

        scored = score(chatty, [group("0", "a", "bb"), group("1", "ccc")])
        assert scored.extras == [{"length": [1, 2]}, {"length": [3]}]
        assert [group.logged for group in scored.groups] == scored.extras
        assert scored.metrics == {"share": 0.5}

    def test_calls_that_failed_log_nothing(self):
        def fails_together(completions, log_metric, log_extra):
            log_metric("calls", len(completions))
            log_extra("text", texts(completions))
            if len(completions) > 2:
                raise ValueError("too many")
            return [0.0] * len(completions)

        scored = score(fails_together, on_error="drop_group")
        assert scored.metrics == {"calls": 2.0}
        assert scored.extras == [{"text": ["3", "4"]}, {"text": ["9", "x"]}, {"text": ["1", "2"]}]

    @pytest.mark.parametrize("call", ["log_extra('x', [1])", "log_metric('x', float('nan'))", "log_metric('x', 'y')"])
    def test_what_makes_no_sense_is_an_error(self, call):
        def wrong(completions, log_extra, log_metric):
            eval(call)

        with pytest.raises(RewardError, match="raised ValueError"):
            score(wrong)

    def test_a_column_of_that_name_is_hidden(self):
        scored = score(lambda log_metric, completions: [log_metric("m", 1.0)], [group("0", "a", log_metric="column")])
        assert scored.metrics == {"m": 1.0}


class TestTotals:
    def test_every_other_field_is_kept(self):
        marks = {field.name: object() for field in dataclasses.fields(Sample)} | {"text": "3"}
        marks["completion_ids"] = (5, 6)
        before = Group(Prompt("0", (1,), "1+2="), (Sample(**marks),))
        (after,) = score(lambda completions: [0.5], [before]).groups
        assert after.samples == (dataclasses.replace(before.samples[0], rewards=(0.5,), reward=0.5),)
        assert after.prompt is before.prompt

    def test_the_weighted_sum_leaves_out_those_that_abstain(self):
        functions = [
            NamedReward("a", lambda completions: [1.0, None, None]),
            NamedReward("b", lambda completions: np.array([2.0, 3.0, 4.0])),
            NamedReward("c", lambda completions: [True, False, None]),
        ]
        (scored,) = Rewarder(functions, [1.0, 0.5, -2.0]).score([group("0", "x", "y", "z")]).groups
        assert [one.rewards for one in scored.samples] == [(1.0, 2.0, 1.0), (None, 3.0, 0.0), (None, 4.0, None)]
        assert scored.rewards == (0.0, 1.5, 2.0)

    def test_where_all_abstain_there_is_no_reward(self):
        assert rewards(score(lambda completions: [None, 0.0], [group("0", "x", "y")])) == {"0": (None, 0.0)}

    def test_no_groups(self):
        assert score(exact, []) == Scored(groups=[], dropped=0, errors=[])

    @pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [1.0, math.nan]])
    def test_weights_that_do_not_fit(self, weights):
        with pytest.raises(ConfigError, match=r"rewards\.weights"):
            Rewarder([NamedReward("a", exact), NamedReward("b", exact)], weights)

    def test_functions_that_do_not_fit(self):
        with pytest.raises(ConfigError, match="called 'a'"):
            Rewarder([NamedReward("a", exact), NamedReward("a", exact)])
        with pytest.raises(ConfigError, match="names no function"):
            Rewarder([])


def raises_on_x(completions, **_):
    if "x" in texts(completions):
        raise KeyError("no number")
    return [1.0] * len(completions)


def nan_on_x(completions, **_):
    return [math.nan if text == "x" else 1.0 for text in texts(completions)]


def text_on_x(completions, **_):
    return ["one" if text == "x" else 1.0 for text in texts(completions)]


def short_on_x(completions, **_):
    return [1.0 for text in texts(completions) if text != "x"]


def none_instead_on_x(completions, **_):
    return None if "x" in texts(completions) else [1.0] * len(completions)


def exits_on_x(completions, **_):
    if "x" in texts(completions):
        raise SystemExit(1)
    return [1.0] * len(completions)


HANGING = threading.Semaphore(0)


def hang() -> None:
    HANGING.release()
    threading.Event().wait(LONG_S)


class Patient(Future):
    """A call is given up because it hangs, not because the machine is slow: each that hangs says so."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout is not None:
            until(lambda: self.done() or HANGING.acquire(blocking=False))
            if not self.done():
                raise TimeoutError
        return super().exception()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lachesis.process.threads.Future", Patient)


def hangs_on_x(completions, **_):
    if "x" in texts(completions):
        hang()
    return [1.0] * len(completions)


BAD = {
    raises_on_x: r"raised KeyError: 'no number' \(test_rewarder\.py:\d+\) on completion 2 of 2 of prompt '1' "
    r"\(answer='9'\): 'x'",
    nan_on_x: r"returned nan as a reward on completion 2 of 2 of prompt '1' \(answer='9'\): 'x'",
    text_on_x: r"returned a str \('one'\) as a reward on completion 2 of 2 of prompt '1'",
    short_on_x: r"returned 1 rewards for 2 completions on the 2 completions of prompt '1'",
    none_instead_on_x: r"returned None, not a list with one reward per completion on the 2 completions of prompt '1'",
    exits_on_x: r"raised SystemExit: 1 \(test_rewarder\.py:\d+\) on completion 2 of 2 of prompt '1'",
    hangs_on_x: r"did not return within 0\.1 s on the 2 completions of prompt '1'",
}


@pytest.mark.parametrize(("function", "message"), BAD.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.usefixtures("patient")
class TestFailures:
    def test_fail_names_the_function_what_it_did_and_the_sample(self, function, message):
        with pytest.raises(RewardError, match=f"reward function 'f' {message}") as caught:
            score(function, timeout_s=0.1)
        assert caught.value.remedy

    def test_drop_group_drops_that_group_only_and_counts_it(self, function, message, caplog):
        scored = score(function, timeout_s=0.1, on_error="drop_group")
        assert rewards(scored) == {"0": (1.0, 1.0), "2": (1.0, 1.0)}
        assert scored.dropped == len(scored.errors) == 1
        assert scored.errors[0].message in caplog.text
        assert "dropped 1 of 3 groups" in caplog.text

    def test_a_batch_of_the_bad_group_alone(self, function, message):
        with pytest.raises(RewardError, match=message):
            score(function, sums()[1:2], timeout_s=0.1)
        scored = score(function, sums()[1:2], timeout_s=0.1, on_error="drop_group")
        assert (scored.groups, scored.dropped, len(scored.errors)) == ([], 1, 1)


class TestPolicies:
    def test_the_call_can_override_the_policy(self):
        rewarder = Rewarder([NamedReward("f", nan_on_x)], on_error="drop_group")
        assert rewarder.score(sums()).dropped == 1
        with pytest.raises(RewardError):
            rewarder.score(sums(), on_error="fail")

    def test_the_cause_is_kept(self):
        with pytest.raises(RewardError) as caught:
            score(raises_on_x)
        assert isinstance(caught.value.__cause__, KeyError)

    def test_a_group_dropped_by_one_function_is_not_shown_to_the_next(self):
        seen = []

        def spy(completions, **_):
            seen.extend(texts(completions))
            return [0.0] * len(completions)

        rewarder = Rewarder([NamedReward("a", nan_on_x), NamedReward("b", spy)], on_error="drop_group")
        assert rewards(rewarder.score(sums())) == {"0": (1.0, 1.0), "2": (1.0, 1.0)}
        assert seen == ["3", "4", "1", "2"]

    def test_groups_of_different_sizes_keep_their_own_rewards(self):
        groups = [group("0", "1"), group("1", "2", "x", "3"), group("2", "4", "5")]
        scored = score(lambda completions: [math.nan if t == "x" else int(t) for t in texts(completions)], groups,
                       on_error="drop_group")  # fmt: skip
        assert rewards(scored) == {"0": (1.0,), "2": (4.0, 5.0)}

    def test_a_call_that_fails_on_all_groups_together_only(self):
        def small_batches_only(completions, **_):
            if len(completions) > 2:
                raise ValueError("too many")
            return [1.0] * len(completions)

        with pytest.raises(RewardError, match="in one call with 3 groups, but not in separate calls"):
            score(small_batches_only)
        scored = score(small_batches_only, on_error="drop_group")
        assert (len(scored.groups), scored.dropped, len(scored.errors)) == (3, 0, 1)

    @pytest.mark.usefixtures("patient")
    def test_a_function_that_always_hangs_is_given_up_on(self):
        calls = []

        def hangs(completions):
            calls.append(len(completions))
            hang()

        scored = score(hangs, [group(str(i), "x") for i in range(20)], timeout_s=0.05, on_error="drop_group")
        assert calls == [20, 1, 1, 1]
        assert scored.dropped == len(scored.errors) == 20
        assert "was not called again, after 3 calls in a row that hung or crashed" in scored.errors[-1].message

    @pytest.mark.parametrize("fail", [True, False], ids=["fails", "hangs"])
    def test_a_stop_ends_calls_that_take_long_and_the_search_for_a_culprit(self, fail, monkeypatch):
        monkeypatch.setattr(attempts, "_STOP_GRACE_S", 0.1)
        asked = threading.Event()

        def slow(completions):
            asked.set()
            if not fail:
                hang()
            time.sleep(0.3)
            raise ValueError("no number")

        made = Rewarder([NamedReward("f", slow)], timeout_s=LONG_S, stop_requested=asked.is_set)
        started = time.monotonic()
        with pytest.raises(StopRequested, match="asked to stop while it waited for reward functions"):
            made.score([group(str(i), "x", "y") for i in range(100)])
        made.close()
        assert time.monotonic() - started < 10

    def test_a_stop_lets_calls_end_that_do_not_take_long(self):
        made = Rewarder([NamedReward("f", lambda completions: [1.0] * 2)], stop_requested=lambda: True)
        assert len(made.score([group("0", "x", "y")]).groups) == 1
        made.close()

    def test_alarms_are_explained(self):
        def with_alarm(completions):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

        with pytest.raises(
            RewardError, match=r"signal only works in main thread.*rewards\.num_workers.*parsing_timeout=None"
        ):
            score(with_alarm)

    def test_long_texts_and_columns_are_shortened(self):
        with pytest.raises(RewardError) as caught:
            score(nan_on_long, [group("0", "y" * 5000, answer="z" * 5000)])
        assert len(str(caught.value)) < 500


def nan_on_long(completions, **_):
    return [math.nan for _ in completions]


class TestLoading:
    def test_functions_are_called_by_their_name(self, tmp_path):
        (tmp_path / "mine.py").write_text("def good(completions): return [1.0] * len(completions)")
        reward = load_reward("mine.py:good", tmp_path)
        assert reward.name == "good"
        assert rewards(score(reward.function, [group("0", "a")])) == {"0": (1.0,)}
        assert load_reward("math.fsum").name == "fsum"

    def test_functions_of_one_name_are_called_by_their_spec(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / f"{name}.py").write_text("def good(completions): ...\ndef other(completions): ...")
        loaded = load_rewards(["a.py:good", "b.py:good", "b.py:other"], tmp_path)
        assert [reward.name for reward in loaded] == ["a.py:good", "b.py:good", "other"]


def test_a_column_that_is_missing_is_found_early_unless_rollouts_may_bring_it():
    def score(completions: list[str], turns: list[int], **columns: object) -> list[float]:
        return [0.0] * len(completions)

    rewarder = Rewarder([NamedReward("score", score)])
    rewarder.check_early({"turns"}, within_s=0.0)
    rewarder.check_early(None, within_s=0.0)
    with pytest.raises(RewardError, match="'score' needs 'turns'"):
        rewarder.check_early({"prompt"}, within_s=0.0)


def test_scoring_costs_little_beyond_the_function():
    groups = [group(str(i), *["28"] * 8, answer="28", prompt="37+45=") for i in range(32)]
    rewarder = Rewarder([NamedReward("f", exact)])
    times = []
    for _ in range(30):
        started = time.process_time()
        rewarder.score(groups)
        times.append(time.process_time() - started)
    assert min(times) < 20e-3  # seconds of work; about 0.9 ms on a core of 2020


def test_a_function_that_holds_the_interpreter_ends_the_process_with_its_name(tmp_path):
    (tmp_path / "r.py").write_text("import re\ndef r(completions): return [re.match('(a+)+$', 'a' * 60 + 'b')]\n")
    program = textwrap.dedent(f"""
        from pathlib import Path
        from lachesis.common.types import Group, Prompt, Sample, VersionSpan
        from lachesis.rollouts.rewards import rewarder
        made = rewarder.Rewarder(rewarder.load_rewards(["r.py:r"], Path({str(tmp_path)!r})), timeout_s=0.1)
        made._watchdog._grace_s = 0.2
        sample = Sample((1,), (5,), (-0.5,), "stop", VersionSpan(0, 0), text="x")
        made.score([Group(Prompt(id="0", token_ids=(1,), text="p"), (sample,))])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.startswith(
        "error: reward function 'r' holds Python's interpreter lock and did not return within 0.1 s"
    )
