from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lachesis.common.errors import DataError, DeadlineExceeded, RewardError
from lachesis.common.types import GenerationRequest, Prompt, SamplingParams
from lachesis.rollouts.evaluate import Evaluator
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from tests.fakes import FakeEngine

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
PROBLEMS = [Prompt(id=str(i), token_ids=(i,), text=str(i), columns={"answer": str(i)}) for i in range(10)]


def even_is_right(request: GenerationRequest, index: int) -> Sequence[int]:
    """The answer is the prompt's number; odd ones get a longer, wrong one."""
    (number,) = request.prompt_ids
    return [number] if number % 2 == 0 else [99, 99]


def exact(completions: list[Any], answer: list[str]) -> list[float]:
    return [float(c[0]["content"] == right) for c, right in zip(completions, answer, strict=True)]


def evaluator(reward: Callable[..., Any] = exact, engine: FakeEngine | None = None, **options: Any) -> Evaluator:
    return Evaluator(
        problems=options.pop("problems", PROBLEMS),
        engine=engine or FakeEngine(even_is_right),
        rewarder=Rewarder([NamedReward("exact", reward)], on_error="drop_group"),
        decode=lambda token_ids: [" ".join(map(str, ids)) for ids in token_ids],
        params=GREEDY,
        **options,
    )


def test_accuracy_is_the_share_of_successes():
    result = evaluator().run(7)
    assert (result.step, result.problems) == (7, 10)
    assert result.accuracy == 0.5
    assert result.mean_reward == 0.5
    assert result.mean_length == 1.5
    assert result.seconds > 0


def test_all_problems_are_generated_in_one_call_greedily_and_alike_each_time():
    engine = FakeEngine(even_is_right)
    one = evaluator(engine=engine)
    one.run(0)
    one.run(1)
    first, second = engine.requests
    assert first == second
    assert [request.prompt_ids for request in first] == [(i,) for i in range(10)]
    assert all((request.n, request.params) == (1, GREEDY) for request in first)
    assert len({request.seed for request in first}) == 10


def test_only_the_first_problems_with_a_limit():
    assert evaluator(limit=3).run(0).accuracy == pytest.approx(2 / 3)
    assert evaluator(limit=30).run(0).problems == 10


def test_the_bar_for_success_can_be_set():
    def graded(completions, answer):
        return [int(right) / 10 for right in answer]

    assert evaluator(graded, success_reward=0.7).run(0).accuracy == pytest.approx(0.3)
    assert evaluator(graded).run(0).accuracy == 0


def test_where_the_functions_abstain_there_is_no_success_and_no_reward():
    def only_small(completions, answer):
        return [1.0 if int(right) < 4 else None for right in answer]

    result = evaluator(only_small).run(0)
    assert (result.accuracy, result.mean_reward) == (0.4, 1.0)
    with pytest.raises(RewardError, match="step 3: every reward function abstained on all 10 problems"):
        evaluator(lambda completions: [None] * len(completions)).run(3)


def all_but(numbers: Sequence[int]) -> Callable[..., list[Any]]:
    def judge(completions: list[Any], answer: list[str]) -> list[Any]:
        places = map(int, answer)
        return [Excluded("sandbox", "it fell") if place in numbers else float(place % 2 == 0) for place in places]

    return judge


def test_what_could_not_be_judged_is_left_out_and_said(caplog: pytest.LogCaptureFixture):
    result = evaluator(all_but([4])).run(0)
    assert (result.accuracy, result.mean_reward, result.problems) == (4 / 9, 4 / 9, 9)
    assert result.mean_length == (4 * 1 + 5 * 2) / 9
    assert caplog.messages == [
        "a sample is excluded (sandbox): sample 1 of 1 of prompt '4' could not be judged: it fell"
    ]
    with pytest.raises(RewardError, match="step 3: no completion of 10 problems could be judged"):
        evaluator(all_but(range(10))).run(3)


def test_a_failing_reward_raises_whatever_the_policy_of_training():
    def nan_on_4(completions, answer):
        return [math.nan if right == "4" else 1.0 for right in answer]

    with pytest.raises(RewardError, match="returned nan as a reward on completion 1 of 1 of prompt '4'"):
        evaluator(nan_on_4).run(0)


def test_what_cannot_be_evaluated_is_refused_at_once():
    with pytest.raises(DataError, match="no held-out problems"):
        evaluator(problems=[])
    with pytest.raises(RewardError, match="needs 'solution'"):
        evaluator(lambda completions, solution: [])


def test_the_deadline_is_named():
    with pytest.raises(DeadlineExceeded, match="evaluation at step 2: generation for 10 problems"):
        evaluator(generation_s=1e-9).run(2)


def test_several_samples_give_avg_at_k_and_pass_at_k():
    """Of 4 samples of 2 problems, one of the first succeeds."""
    rewards = iter([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    rewarder = Rewarder([NamedReward("some", lambda completions, **_: [next(rewards) for _ in completions])])
    problems = [Prompt(id=str(i), token_ids=(i + 1,), text="") for i in range(2)]
    result = Evaluator(
        problems=problems,
        engine=FakeEngine(),
        rewarder=rewarder,
        decode=lambda ids: ["" for _ in ids],
        params=SamplingParams(4),
        samples=4,
    ).run(3)
    assert (result.problems, result.samples) == (2, 4)
    assert (result.accuracy, result.pass_at_k) == (1 / 8, 1 / 2)
