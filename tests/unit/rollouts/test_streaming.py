"""Rewards beside generation: the same groups, sooner."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, RewardError
from lachesis.common.types import Completion, GenerationRequest, Group
from lachesis.engines.base import Finished
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.streaming import Overlap, StreamingSource
from tests.fakes import FakeEngine
from tests.unit.rollouts.test_local import FOREVER, PARAMS, decode, length, prompts
from tests.waiting import LONG_S, until


class ShuffledEngine(FakeEngine):
    """Finishes the requests of a call in the order ``order``; calls ``before`` with the place of each first."""

    def __init__(self, order: Sequence[int], *, before: Callable[[int], None] = lambda place: None) -> None:
        super().__init__()
        self.order = order
        self.before = before

    def generate(
        self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Finished | None = None
    ) -> list[list[Completion]]:
        answers = super().generate(requests, deadline=FOREVER)
        for place in self.order:
            self.before(place)
            if finished is not None:
                finished(place, answers[place])
        return answers


def source(
    engine: FakeEngine, *, min_groups: int | None = 1, reward: Callable[..., Any] = length, on_error: Any = "drop_group"
) -> LocalSource:
    build = LocalSource if min_groups is None else partial(StreamingSource, min_groups=min_groups)
    return build(
        stream=PromptStream(prompts(7), seed=0, shuffle=False),
        engine=engine,
        rewarder=Rewarder([NamedReward("f", reward)], on_error=on_error),
        decode=decode,
        params=PARAMS,
        num_generations=3,
        seed=0,
    )


def ids(groups: list[Group]) -> list[int]:
    return [int(group.prompt.id) for group in groups]


@pytest.mark.parametrize("min_groups", [1, 2, 5, 9])
def test_the_groups_are_those_without_streaming_whatever_is_finished_first(min_groups: int):
    streaming, plain = (
        source(ShuffledEngine([3, 0, 4, 2, 1]), min_groups=min_groups),
        source(FakeEngine(), min_groups=None),
    )
    for _ in range(3):
        assert streaming.next_groups(5, deadline=FOREVER) == plain.next_groups(5, deadline=FOREVER)
        assert streaming.state_dict() == plain.state_dict()
    timed = ("generation_time", "reward_time", "hidden_reward_time")
    counts, expected = ({k: v for k, v in one.counters().items() if k not in timed} for one in (streaming, plain))
    assert counts == expected


def test_the_first_groups_are_scored_before_the_last_is_generated():
    scored = threading.Event()
    seen: list[list[int]] = []

    def reward(completions: list[Any], answer: list[int]) -> list[float]:
        seen.append(sorted(set(answer)))
        if len(seen) == 1:
            scored.set()
        return [1.0] * len(completions)

    def before(place: int) -> None:
        if place == 3:  # the last one is generated only once rewards of the others are there
            assert scored.wait(LONG_S), "no reward function was called while the last group was being generated"

    local = source(ShuffledEngine([0, 1, 2, 3], before=before), reward=reward, min_groups=2)
    assert ids(local.next_groups(4, deadline=FOREVER)) == [0, 1, 2, 3]
    assert 2 <= len(seen[0]) <= 3 and 3 not in seen[0]
    assert sorted(answer for call in seen for answer in call) == [0, 1, 2, 3]
    counts = local.counters()
    assert 0 < counts["hidden_reward_time"] <= counts["reward_time"]


def test_what_is_scored_after_the_last_group_is_generated_is_not_hidden():
    local = source(ShuffledEngine([0, 1]), min_groups=3)
    local.next_groups(2, deadline=FOREVER)
    counts = local.counters()
    assert (counts["hidden_reward_time"], counts["reward_time"] > 0) == (0.0, True)


def test_no_time_is_said_to_be_hidden_without_streaming():
    assert "hidden_reward_time" not in source(FakeEngine(), min_groups=None).counters()


class TestFailures:
    def test_dropped_groups_are_missing_as_they_are_without_streaming(self):
        def reward(completions, answer):
            return [math.nan if a in (1, 4) else float(a) for a in answer]

        streaming, plain = (
            source(ShuffledEngine([4, 2, 3, 1, 0]), reward=reward),
            source(FakeEngine(), reward=reward, min_groups=None),
        )
        groups = streaming.next_groups(5, deadline=FOREVER)
        assert ids(groups) == [0, 2, 3]
        assert groups == plain.next_groups(5, deadline=FOREVER)
        counts = streaming.counters()
        assert (counts["dropped_groups"], counts["reward_errors"]) == (2, 2)

    def test_where_all_are_dropped_the_next_prompts_are_taken(self):
        local = source(FakeEngine(), reward=lambda completions, answer: [math.nan if a < 4 else 1.0 for a in answer])
        assert ids(local.next_groups(2, deadline=FOREVER)) == [4, 5]

    def test_a_failing_reward_calls_off_the_generation_and_changes_nothing(self, monkeypatch: pytest.MonkeyPatch):
        fail, called, generated, made = [True], threading.Event(), [], []
        enter = Overlap.__enter__
        monkeypatch.setattr(Overlap, "__enter__", lambda overlap: made.append(overlap) or enter(overlap))

        def reward(completions: list[Any]) -> list[float]:
            called.set()
            return [math.nan if fail[0] else 1.0] * len(completions)

        def before(place: int) -> None:
            if place:
                assert called.wait(LONG_S)
                until(lambda: not fail[0] or made[-1]._error is not None, "the reward's error was not noticed")
            generated.append(place)

        engine = ShuffledEngine([0, 1, 2], before=before)
        local, plain = (
            source(engine, reward=reward, on_error="fail"),
            source(FakeEngine(), reward=reward, min_groups=None),
        )
        with pytest.raises(RewardError, match="returned nan"):
            local.next_groups(3, deadline=FOREVER)
        assert generated == [0, 1], "the third was called off"
        fail[0] = False
        assert local.next_groups(3, deadline=FOREVER) == plain.next_groups(3, deadline=FOREVER)

    def test_a_failing_engine_changes_nothing_either(self):
        def before(place: int) -> None:
            if place == 2 and engine.order == [0, 1, 2]:
                raise EngineError("the engine died")

        engine = ShuffledEngine([0, 1, 2], before=before)
        local, plain = source(engine), source(FakeEngine(), min_groups=None)
        with pytest.raises(EngineError, match="died"):
            local.next_groups(3, deadline=FOREVER)
        engine.order = [2, 1, 0]
        assert local.next_groups(3, deadline=FOREVER) == plain.next_groups(3, deadline=FOREVER)

    def test_rewards_are_waited_for_until_the_deadline_of_the_batch(self):
        released = threading.Event()

        def reward(completions: list[Any]) -> list[float]:
            released.wait(LONG_S)
            return [1.0] * len(completions)

        local = source(ShuffledEngine([0, 1]), reward=reward)
        with pytest.raises(DeadlineExceeded, match=r"the feed took longer than 0.05 s.*0 of 2 are done"):
            local.next_groups(2, deadline=Deadline("the feed", 0.05))
        released.set()

    @pytest.mark.parametrize("order", [[0], [0, 1, 1]])
    def test_an_engine_that_hands_back_other_requests_than_it_got(self, order: list[int]):
        with pytest.raises(EngineError, match=f"returned {len(order)} finished groups for 2 requests"):
            source(ShuffledEngine(order)).next_groups(2, deadline=FOREVER)

    def test_an_answer_that_is_not_what_was_asked_for(self):
        class Cut(ShuffledEngine):
            def generate(self, requests: Any, *, deadline: Any, finished: Any = None) -> Any:
                return super().generate(
                    requests, deadline=deadline, finished=lambda place, answer: finished(place, answer[:-1])
                )

        with pytest.raises(EngineError, match=r"gave 2 completions of prompt '.', but 3 were requested"):
            source(Cut([0, 1])).next_groups(2, deadline=FOREVER)


def test_metrics_of_reward_functions_are_means_over_groups():
    first = threading.Event()

    def reward(completions: list[Any], answer: list[int], log_metric: Callable[[str, float], None]) -> list[float]:
        log_metric("answer", sum(answer) / len(answer))
        first.set()
        return [1.0] * len(completions)

    def before(place: int) -> None:
        if place:
            assert first.wait(LONG_S)

    local = source(ShuffledEngine([0, 1, 2, 3], before=before), reward=reward)
    local.next_groups(4, deadline=FOREVER)
    assert local.counters()["reward_metrics/answer"] == pytest.approx(1.5), "however they were split into calls"


def soon(seconds: float = LONG_S) -> Deadline:
    return Deadline("test: results", seconds, setting="deadlines.batch_s")


class Work:
    """Keeps what each call got. A call says that it has begun, and waits until it may go on."""

    def __init__(self, *, held: bool = False) -> None:
        self.calls: list[list[int]] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.held = held

    def __call__(self, items: Sequence[int]) -> int:
        self.calls.append(list(items))
        self.begun.release()
        if self.held:
            assert self.go_on.acquire(timeout=LONG_S)
        return sum(items)


def overlap(work: Work, *, at_least: int = 1) -> Overlap[int, int]:
    return Overlap(work, at_least=at_least, name="test-overlap")


def test_work_begins_before_all_items_are_there():
    work = Work()
    with overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        running.put(2)
        assert running.results(deadline=soon()) == [1, 2]


def test_a_call_gets_all_that_has_come_meanwhile_in_order():
    work = Work(held=True)
    with overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        for item in (2, 3, 4):
            running.put(item)
        work.go_on.release(2)
        assert running.results(deadline=soon()) == [1, 9]
    assert work.calls == [[1], [2, 3, 4]]


def test_it_waits_for_enough_items_and_the_last_call_gets_the_rest():
    work = Work()
    with overlap(work, at_least=3) as running:
        for item in (1, 2, 3):
            running.put(item)
        assert work.begun.acquire(timeout=LONG_S)
        running.put(4)
        assert running.results(deadline=soon()) == [6, 4]
    assert work.calls == [[1, 2, 3], [4]]


def test_nothing_gives_no_results_and_no_call():
    work = Work()
    with overlap(work) as running:
        assert running.results(deadline=soon()) == []
    assert work.calls == []


def test_an_error_is_raised_to_whoever_puts_in_more_and_waits():
    failed = threading.Event()

    class Failing(Work):
        def __call__(self, items: Sequence[int]) -> int:
            try:
                raise RewardError("no reward")
            finally:
                failed.set()

    with overlap(Failing()) as running:
        running.put(1)
        assert failed.wait(LONG_S)
        with pytest.raises(RewardError, match="no reward"):
            running.results(deadline=soon())
        with pytest.raises(RewardError, match="no reward"):
            running.put(2)


def test_results_have_a_deadline():
    work = Work(held=True)
    with overlap(work) as running:
        running.put(1)
        with pytest.raises(
            DeadlineExceeded, match=r"test: results took longer than 0.01 s .*0 of 1 are done"
        ) as caught:
            running.results(deadline=soon(0.01))
        assert "deadlines.batch_s" in caught.value.remedy
        work.go_on.release()


def test_leaving_it_early_begins_no_further_call():
    work = Work(held=True)
    before = set(threading.enumerate())
    with pytest.raises(KeyError), overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        running.put(2)
        raise KeyError("what is put in has failed")
    (thread,) = set(threading.enumerate()) - before
    work.go_on.release(2)
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert work.calls == [[1]]


def test_seconds_are_those_of_work_up_to_a_moment():
    work = Work(held=True)
    before = time.monotonic()
    with overlap(work) as running:
        running.put(1)
        assert work.begun.acquire(timeout=LONG_S)
        middle = time.monotonic()
        work.go_on.release(2)
        running.results(deadline=soon())
        running_s = running.seconds()
        assert running.seconds(until=before) == 0.0
        assert 0.0 <= running.seconds(until=middle) <= running_s
        assert running_s <= time.monotonic() - before
        assert running_s > 0.0
