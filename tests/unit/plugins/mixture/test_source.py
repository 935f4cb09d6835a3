"""Shares of several sources, and what a slow or broken one does to the others."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import CheckpointError, EngineError, RewardError
from lachesis.common.types import Group, Prompt
from lachesis.pipeline.collect import Collector
from lachesis.pipeline.feed import Finisher
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.plugins.mixture.source import Ingredient, Shares, SourceMixture
from lachesis.rollouts.base import Done, Draw, GroupwiseSource
from tests.unit.pipeline.sources import group
from tests.waiting import LONG_S


class Numbered(GroupwiseSource):
    """Prompts numbered from 0 (or put back), whose groups are there once the source is let go."""

    def __init__(self, *, held: bool = False) -> None:
        self.drawn: list[str] = []
        self.error: BaseException | None = None
        self._back: list[str] = []
        self._numbers = itertools.count()
        self._go = threading.Event()
        if not held:
            self.let_go()

    def let_go(self) -> None:
        self._go.set()

    def draw(self, count: int) -> list[Draw]:
        ids = [self._back.pop(0) if self._back else str(next(self._numbers)) for _ in range(count)]
        self.drawn += ids
        return [Draw(Prompt(id=one, token_ids=(1, 2), text=""), 0) for one in ids]

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        assert self._go.wait(LONG_S)
        if self.error is not None:
            raise self.error
        for place, draw in enumerate(draws):
            done(place, group(draw.prompt.id, (0.0, 1.0)))

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        raise AssertionError("a mixture draws and rolls out")

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        self._back = [prompt.id for prompt in prompts] + self._back
        return True

    def report_version(self, version: int) -> None: ...

    def counters(self) -> dict[str, float]:
        return {"dropped_groups": 1.0, "turns": 2.0, "reward_metrics/format": 0.5}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def soon() -> Deadline:
    return Deadline("test: groups", 60.0)


def names(draws: Sequence[Draw]) -> list[str]:
    return [draw.prompt.source for draw in draws]


def feed_of(mixture: SourceMixture, *, size: int, ahead: int) -> AsynchronousFeed[Sequence[Group]]:
    return AsynchronousFeed(
        source=mixture,
        collector=Collector(mixture, count=size),
        finisher=Finisher(advantages=list, pack=tuple),
        ahead=ahead,
        batch_deadline_s=60.0,
    )


class TestShares:
    @pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 7, "b": 2, "c": 1.5}])
    def test_each_has_its_share_to_within_a_turn_at_any_time(self, weights: dict[str, float]):
        shares, had, total = Shares(weights), Counter[str](), sum(weights.values())
        for turns in range(1, 400):
            had[shares.next(weights)] += 1
            for name, weight in weights.items():
                assert abs(had[name] - turns * weight / total) < 1 + 1e-9

    def test_they_are_exact_over_a_period(self):
        shares = Shares({"a": 0.5, "b": 0.3, "c": 0.2})
        for _ in range(5):
            assert Counter(shares.next("abc") for _ in range(10)) == {"a": 5, "b": 3, "c": 2}

    def test_turns_are_spread_out(self):
        shares = Shares({"a": 3, "b": 1})
        assert "".join(shares.next("ab") for _ in range(8)) == "aabaaaba"

    def test_a_name_that_is_passed_over_is_owed_nothing_for_it(self):
        shares = Shares({"a": 1, "b": 1})
        assert [shares.next("a") for _ in range(10)] == ["a"] * 10
        assert Counter(shares.next("ab") for _ in range(10)) == {"a": 5, "b": 5}


def test_the_groups_of_a_mixture_are_shared_by_weight():
    weights = {"math": 0.5, "code": 1.5, "game": 3.0}
    mixture = SourceMixture({name: Ingredient(Numbered(), weight) for name, weight in weights.items()})
    groups = [one for _ in range(25) for one in mixture.next_groups(8, deadline=soon())]
    assert Counter(one.prompt.source for one in groups) == {"math": 20, "code": 60, "game": 120}


class TestSlowSource:
    def test_it_holds_up_no_group_of_another(self):
        slow = Numbered(held=True)
        mixture = SourceMixture({"slow": Ingredient(slow), "quick": Ingredient(Numbered())})
        feed = feed_of(mixture, size=2, ahead=2)
        batch = feed.next()
        assert [group.prompt.source for group in batch] == ["quick", "quick"]
        slow.let_go()
        feed.close()

    def test_its_share_is_trained_on_once_it_is_there(self):
        slow = Numbered(held=True)
        mixture = SourceMixture({"slow": Ingredient(slow), "quick": Ingredient(Numbered())})
        feed = feed_of(mixture, size=2, ahead=1)
        trained = Counter(group.prompt.source for group in feed.next())
        slow.let_go()
        for step in range(1, 10):
            feed.advance(step)
            trained.update(group.prompt.source for group in feed.next())
        feed.close()
        assert trained["slow"] == pytest.approx(trained["quick"], abs=2)

    def test_with_a_limit_the_others_have_its_turns_until_it_is_done(self):
        slow = Numbered(held=True)
        limited = Ingredient(slow, weight=3, max_unfinished=2)
        mixture = SourceMixture({"slow": limited, "quick": Ingredient(Numbered())})
        feed = feed_of(mixture, size=4, ahead=4)
        for step in range(1, 4):
            feed.next()
            feed.advance(step)
        assert slow.drawn == ["0", "1"]
        slow.let_go()
        for step in range(4, 20):
            feed.next()
            feed.advance(step)
        assert len(slow.drawn) > 2
        feed.close()


class TestErrors:
    def test_the_error_of_one_comes_once_the_others_are_done(self):
        broken, sound = Numbered(), Numbered()
        broken.error = EngineError("the engine is gone")
        mixture = SourceMixture({"broken": Ingredient(broken), "sound": Ingredient(sound)})
        found: dict[int, Any] = {}
        with pytest.raises(EngineError, match="the engine is gone"):
            mixture.roll_out(mixture.draw(4), deadline=soon(), done=found.__setitem__)
        assert [found[place].prompt.source for place in sorted(found)] == ["sound", "sound"]

    def test_an_error_of_a_source_names_it(self):
        broken = Numbered()
        broken.error = RewardError("the reward is broken")
        mixture = SourceMixture({"broken": Ingredient(broken), "sound": Ingredient(Numbered())})
        with pytest.raises(RewardError, match="source broken: the reward is broken"):
            mixture.next_groups(2, deadline=soon())


def test_counters_are_sums_and_name_the_source_of_what_went_wrong():
    mixture = SourceMixture({"a": Ingredient(Numbered()), "b": Ingredient(Numbered())})
    assert mixture.counters() == {
        "dropped_groups": 2.0,
        "turns": 4.0,
        "source/a/dropped_groups": 1.0,
        "source/b/dropped_groups": 1.0,
        "reward_metrics/a/format": 0.5,
        "reward_metrics/b/format": 0.5,
    }


class TestState:
    def test_prompts_that_are_put_back_come_first_and_in_their_order(self):
        mixture = SourceMixture({name: Ingredient(Numbered(), weight) for name, weight in (("a", 1), ("b", 4))})
        taken = [draw.prompt for draw in mixture.draw(5)]
        assert mixture.requeue([taken[4], taken[1], taken[0]])
        assert [draw.prompt for draw in mixture.draw(3)] == [taken[4], taken[1], taken[0]]

    def test_a_checkpoint_of_other_sources_is_refused_by_their_names(self):
        mixture = SourceMixture({"math": Ingredient(Numbered())})
        other = SourceMixture({"code": Ingredient(Numbered())})
        with pytest.raises(CheckpointError, match="of the sources math, but the configuration has code"):
            other.load_state_dict(mixture.state_dict())
