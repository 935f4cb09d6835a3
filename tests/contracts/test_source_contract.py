"""What every rollout source owes to the feed. A source joins by adding a factory to ``SOURCES``.

The sources here sample prompts that are numbered from 0 to ``PROMPTS - 1`` and know the column ``answer``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, RewardError
from lachesis.common.types import Group, Prompt, SamplingParams
from lachesis.engines.base import Engine
from lachesis.plugins.mixture.source import Ingredient, SourceMixture
from lachesis.rollouts.base import GroupwiseSource, RolloutSource
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.streaming import StreamingSource
from tests.fakes import FakeEngine

PROMPTS, SAMPLES = 7, 3
Reward = Callable[..., Sequence[float | None]]


def by_length(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@dataclass(frozen=True, slots=True)
class Factory:
    """How to make a source: over an engine, with a reward function, in a run with a seed."""

    name: str
    build: Callable[..., RolloutSource]


def build_local(
    *,
    engine: Engine | None = None,
    reward: Reward = by_length,
    seed: int = 0,
    build: Callable[..., RolloutSource] = LocalSource,
    numbers: Sequence[int] = range(PROMPTS),
) -> RolloutSource:
    prompts = [Prompt(id=str(i), token_ids=(i + 3, 9), text=f"p{i}", columns={"answer": i}) for i in numbers]
    return build(
        stream=PromptStream(prompts, seed=seed),
        engine=engine or FakeEngine(),
        rewarder=Rewarder([NamedReward("by_length", reward)]),
        decode=lambda token_ids: [" ".join(map(str, ids)) for ids in token_ids],
        params=SamplingParams(max_tokens=6),
        num_generations=SAMPLES,
        seed=seed,
    )


def build_mixture(*, max_unfinished: int | None = None, **options: Any) -> SourceMixture:
    """Mix a source of four of the prompts with one of the three others."""
    mine = {"first": range(4), "second": range(4, PROMPTS)}
    streaming = {"second": {"build": partial(StreamingSource, min_groups=1)}}
    return SourceMixture(
        {
            name: Ingredient(
                cast(GroupwiseSource, build_local(numbers=numbers, **options, **streaming.get(name, {}))),
                weight=len(numbers) / 10,
                max_unfinished=max_unfinished,
            )
            for name, numbers in mine.items()
        }
    )


SOURCES = [
    Factory("local", build_local),
    Factory("local, streaming", partial(build_local, build=partial(StreamingSource, min_groups=2))),
    Factory("mixture", build_mixture),
    Factory("mixture of one", lambda **options: SourceMixture({"only": Ingredient(build_local(**options))})),
]


@pytest.fixture(params=SOURCES, ids=lambda factory: factory.name)
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param


@pytest.fixture
def source(factory: Factory) -> Iterator[RolloutSource]:
    built = factory.build()
    yield built
    built.close()


def soon() -> Deadline:
    return Deadline("contract: groups", 60.0)


def collect(source: RolloutSource, count: int) -> list[Group]:
    """Exactly ``count`` groups, however many come at once."""
    groups: list[Group] = []
    while len(groups) < count:
        found = source.next_groups(count - len(groups), deadline=soon())
        assert 1 <= len(found) <= count - len(groups)
        groups += found
    return groups


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


class TestGroups:
    def test_they_are_whole(self, factory: Factory):
        source = factory.build(engine=FakeEngine(version=5))
        for group in collect(source, 4):
            assert len(group.samples) == SAMPLES
            assert group.prompt.columns["answer"] == int(group.prompt.id)
            for sample in group.samples:
                assert sample.prompt_ids == group.prompt.token_ids
                assert 1 <= len(sample.completion_ids) == len(sample.logprobs)
                assert sample.versions == (5, 5)
                assert sample.rewards == (sample.reward,) == (float(len(sample.completion_ids)),)
                assert sample.advantage is None, "advantages are the pipeline's"

    def test_an_epoch_has_every_prompt_once_and_the_next_another_order(self, source: RolloutSource):
        first, second = ([group.prompt.id for group in collect(source, PROMPTS)] for _ in range(2))
        assert sorted(first) == sorted(second) == sorted(map(str, range(PROMPTS)))
        assert first != second

    def test_equal_seeds_give_equal_groups_and_others_do_not(self, factory: Factory):
        first, same, other = (collect(factory.build(seed=seed), 5) for seed in (1, 1, 2))
        assert first == same
        assert first != other

    def test_what_is_asked_at_once_does_not_matter(self, factory: Factory):
        at_once, one_by_one = factory.build(), factory.build()
        assert collect(at_once, 5) == [group for _ in range(5) for group in collect(one_by_one, 1)]


class TestGoingOn:
    @pytest.mark.parametrize("done", [0, 3, PROMPTS, PROMPTS + 2])
    def test_a_saved_state_goes_on_exactly(self, factory: Factory, done: int):
        straight, stopped, resumed = (factory.build(seed=4) for _ in range(3))
        for source in (straight, stopped):
            if done:
                collect(source, done)
        resumed.load_state_dict(through_json(stopped.state_dict()))
        assert collect(resumed, 9) == collect(straight, 9)

    def test_a_state_is_a_copy(self, source: RolloutSource, factory: Factory):
        collect(source, 2)
        state = source.state_dict()
        kept = through_json(state)
        expected = collect(source, 4)
        assert through_json(state) == kept
        resumed = factory.build()
        resumed.load_state_dict(state)
        assert collect(resumed, 4) == expected

    def test_loading_a_state_forgets_what_was_before(self, factory: Factory):
        source = factory.build()
        state, expected = source.state_dict(), collect(source, 4)
        source.load_state_dict(state)
        assert collect(source, 4) == expected


class TestRequeue:
    def test_prompts_that_are_taken_back_come_again(self, source: RolloutSource):
        taken = [group.prompt for group in collect(source, 4)]
        if not source.requeue(taken[1:3]):
            pytest.skip("this source cannot take prompts back")
        again = [group.prompt.id for group in collect(source, 2)]
        assert sorted(again) == sorted(prompt.id for prompt in taken[1:3])

    def test_they_are_sampled_anew(self, source: RolloutSource):
        (first,) = collect(source, 1)
        if not source.requeue([first.prompt]):
            pytest.skip("this source cannot take prompts back")
        (again,) = collect(source, 1)
        assert again.prompt == first.prompt
        assert again.samples != first.samples

    def test_they_are_not_forgotten_when_a_run_is_resumed(self, factory: Factory):
        source, resumed = factory.build(), factory.build()
        if not source.requeue([collect(source, 3)[0].prompt]):
            pytest.skip("this source cannot take prompts back")
        resumed.load_state_dict(through_json(source.state_dict()))
        assert collect(resumed, 3) == collect(source, 3)


class TestCounters:
    def test_they_count_since_the_last_call(self, source: RolloutSource):
        groups = collect(source, 4)
        counts = source.counters()
        assert counts["tokens_generated"] == sum(len(s.completion_ids) for g in groups for s in g.samples)
        assert counts["generation_time"] > 0
        assert (counts["dropped_groups"], counts["reward_errors"]) == (0, 0)
        again = source.counters()
        assert again.keys() == counts.keys()
        assert not any(again.values())

    def test_versions_are_taken_note_of_at_any_time(self, source: RolloutSource):
        for version in (0, 1, 1, 7):
            source.report_version(version)
        assert len(collect(source, 2)) == 2


class TestFailures:
    def test_a_deadline_that_has_passed_is_named_and_nothing_is_lost(self, factory: Factory):
        source, undisturbed = factory.build(), factory.build()
        with pytest.raises(DeadlineExceeded, match="took longer than 0 s"):
            source.next_groups(2, deadline=Deadline("contract: too short", 0.0))
        assert collect(source, 4) == collect(undisturbed, 4)

    def test_an_engine_that_fails_is_an_error_and_nothing_is_lost(self, factory: Factory):
        engine = FakeEngine()
        source, undisturbed = factory.build(engine=engine), factory.build()
        engine.pause()
        with pytest.raises(EngineError, match="paused"):
            source.next_groups(2, deadline=soon())
        engine.resume()
        assert collect(source, 4) == collect(undisturbed, 4)

    def test_a_reward_that_fails_is_never_a_reward_of_0(self, factory: Factory):
        broken = [True]

        def reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
            if broken[0]:
                raise KeyError("answer")
            return by_length(completion_ids)

        source, undisturbed = factory.build(reward=reward), factory.build()
        with pytest.raises(RewardError, match="KeyError") as caught:
            source.next_groups(2, deadline=soon())
        assert caught.value.remedy
        broken[0] = False
        assert collect(source, 4) == collect(undisturbed, 4)

    def test_a_reward_that_abstains_is_none(self, factory: Factory):
        source = factory.build(reward=lambda completion_ids: [None] * len(completion_ids))
        (group,) = collect(source, 1)
        assert group.rewards == (None,) * SAMPLES


def test_closing_may_be_repeated(source: RolloutSource):
    source.close()
    source.close()


class TestOneByOne:
    """A source whose groups are drawn in order and finished in any."""

    def test_groups_are_those_of_whole_batches_however_they_are_drawn(self, factory: Factory):
        whole, source = factory.build(), factory.build()
        assert isinstance(source, GroupwiseSource)
        first, second = source.draw(2), source.draw(3)
        assert [draw.request for draw in [*first, *second]] == list(range(5))
        found: dict[int, Group | RewardError] = {}
        for draws in (second, first):
            source.roll_out(draws, deadline=soon(), done=lambda i, group, d=draws: found.update({d[i].request: group}))
        assert [found[number] for number in range(5)] == collect(whole, 2) + collect(whole, 3)

    def test_calls_may_overlap(self, factory: Factory):
        source = factory.build()
        assert isinstance(source, GroupwiseSource)
        found: list[Group | RewardError] = []

        def keep(_: int, group: Group | RewardError) -> None:
            found.append(group)

        calls = [source.draw(2) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            for call in [pool.submit(source.roll_out, draws, deadline=soon(), done=keep) for draws in calls]:
                call.result()
        ids = [group.prompt.id for group in found if isinstance(group, Group)]
        assert sorted(ids) == sorted(draw.prompt.id for draws in calls for draw in draws)
        assert source.counters()["tokens_generated"] == sum(
            len(s.completion_ids) for group in found if isinstance(group, Group) for s in group.samples
        )
