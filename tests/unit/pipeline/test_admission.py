"""Which groups may begin and which are the next batch, over thousands of groups on a clock that costs nothing."""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import pytest

from lachesis.common.types import Prompt
from lachesis.pipeline.admission import Admission
from lachesis.rollouts.base import Draw
from tests.unit.pipeline.sources import group

SIZE = 16
# The median group takes a second, one of a hundred ten: e^(2.326 sigma) = 10.
SIGMA = 0.99


def draw(number: int) -> Draw:
    return Draw(Prompt(id=str(number), token_ids=(1, 2), text=""), number)


@cache
def seconds_of(number: int) -> float:
    """How long a group is generated, log-normal."""
    return random.Random(number).lognormvariate(0.0, SIGMA)


@dataclass
class Simulation:
    """An engine that does every group at once and a trainer that takes ``train_s`` for a batch, on a clock of its own.

    ``trained`` has for each group its number, and the batches done when it was admitted and before it was trained on.
    """

    ahead: int
    train_s: float
    line: Admission = field(init=False)
    trained: list[tuple[int, int, int]] = field(default_factory=list)
    waited: float = 0.0
    now: float = 0.0
    at_most: int = 0

    def __post_init__(self) -> None:
        self.line = Admission(size=SIZE, ahead=self.ahead)
        self._events: list[tuple[float, int]] = []
        self._numbers = count()
        self._began: dict[int, int] = {}

    def run(self, batches: int) -> None:
        for batch in range(batches):
            self._admit(batch)
            began = self.now
            while not self.line.ready():
                self._next_event()
            self.waited += self.now - began
            for one in self.line.take():
                self.trained.append((int(one.prompt.id), self._began[int(one.prompt.id)], batch))
            done = self.now + self.train_s
            while self._events and self._events[0][0] <= done:
                self._next_event()
            self.now = done
            self.line.train()

    def _admit(self, batch: int) -> None:
        for place in self.line.admit([draw(next(self._numbers)) for _ in range(self.line.room)]):
            self._began[place.number] = batch
            heapq.heappush(self._events, (self.now + seconds_of(place.draw.request), place.number))
        self.at_most = max(self.at_most, len(self._events))

    def _next_event(self) -> None:
        self.now, number = heapq.heappop(self._events)
        self.line.finish(number, group(str(number), (0.0, 1.0)))


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("train_s", [0.5, 5.0, 50.0])
def test_no_group_is_trained_on_later_than_its_admission_allows(ahead: int, train_s: float):
    simulation = Simulation(ahead, train_s)
    simulation.run(30)
    assert max(batch - began for _, began, batch in simulation.trained) <= ahead
    assert simulation.at_most <= (1 + ahead) * SIZE


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_all_that_was_admitted_is_trained_on_once_whatever_it_takes(ahead: int):
    simulation = Simulation(ahead, train_s=3.0)
    simulation.run(60)
    numbers = [number for number, _, _ in simulation.trained]
    assert len(set(numbers)) == len(numbers) == 60 * SIZE
    due = range((60 - ahead) * SIZE)
    assert set(due) <= set(numbers), "the slow ones too"
    lengths = sorted(seconds_of(number) for number in numbers if number in due)
    assert lengths == sorted(seconds_of(number) for number in due), "those trained on are those generated"
    assert max(lengths) > 10


def test_lengths_trained_on_are_spread_as_those_generated_at_any_time():
    """A step that took the first to finish and dropped what has become old would train on half the length."""
    simulation = Simulation(ahead=2, train_s=3.0)
    simulation.run(120)
    half = len(simulation.trained) // 2
    means = [
        sum(seconds_of(number) for number, _, _ in part) / len(part)
        for part in (simulation.trained[:half], simulation.trained[half:])
    ]
    generated = sum(map(seconds_of, range(120 * SIZE))) / (120 * SIZE)
    assert means == pytest.approx([generated] * 2, rel=0.1)


def rounds(ahead: int, train_s: float, batches: int) -> float:
    """Seconds that a trainer waits where whole batches are generated one after the other, up to ``ahead`` ahead."""
    ready, done, waited = 0.0, [0.0] * (ahead + 1), 0.0
    now = 0.0
    for batch in range(batches):
        slowest = max(seconds_of(number) for number in range(batch * SIZE, (batch + 1) * SIZE))
        ready = max(ready, done[-ahead - 1]) + slowest
        waited += max(0.0, ready - now)
        now = max(now, ready) + train_s
        done.append(now)
    return waited


def test_the_trainer_waits_less_than_for_whole_batches():
    """As a share of the run; one version is little room for groups that take three times as long as a step."""
    for ahead, most in ((1, 0.5), (2, 0.35), (4, 0.2)):
        simulation = Simulation(ahead, train_s=3.0)
        simulation.run(60)
        old = rounds(ahead, 3.0, 60)
        assert simulation.waited / simulation.now < most < 0.52 < old / (old + 60 * 3.0)


def test_a_slow_group_does_not_hold_up_others_until_it_has_to():
    line = Admission(size=2, ahead=1)
    places = line.admit([draw(i) for i in range(4)])
    for place in places[1:3]:
        line.finish(place.number, group(str(place.number), (0.0, 1.0)))
    assert line.ready()
    assert [one.prompt.id for one in line.take()] == ["1", "2"]
    line.train()
    for place in line.admit([draw(i) for i in (4, 5)]):
        line.finish(place.number, group(str(place.number), (0.0, 1.0)))
    assert not line.ready(), "0 and 3 would be a version too old in the batch after this one"
    for number in (3, 0):
        line.finish(number, group(str(number), (0.0, 1.0)))
    assert line.ready()
    assert [one.prompt.id for one in line.take()] == ["0", "3"], "the oldest, in the order of admission"


def test_two_slow_groups_are_not_left_for_one_place():
    line = Admission(size=1, ahead=2)
    line.admit([draw(i) for i in range(3)])
    line.finish(2, group("2", (0.0, 1.0)))
    assert line.ready() and [one.prompt.id for one in line.take()] == ["2"]
    line.train()
    (place,) = line.admit([draw(3)])
    line.finish(place.number, group("3", (0.0, 1.0)))
    assert not line.ready(), "0 and 1 both have to be in the third batch at the latest"
    line.finish(0, group("0", (0.0, 1.0)))
    assert line.ready()


def test_a_batch_in_training_holds_its_slots():
    line = Admission(size=2, ahead=1)
    for place in line.admit([draw(i) for i in range(4)]):
        line.finish(place.number, group(str(place.number), (0.0, 1.0)))
    assert line.room == 0
    line.take()
    assert line.room == 0
    line.train()
    assert line.room == 2
    line.leave(2)
    assert line.room == 3
    with pytest.raises(ValueError, match="4 groups cannot be admitted to 3 free slots"):
        line.admit([draw(i) for i in range(4)])


def test_it_goes_on_exactly():
    straight = Simulation(ahead=2, train_s=3.0)
    straight.run(20)
    saved = json.loads(json.dumps(straight.line.state_dict()))
    line = Admission(size=SIZE, ahead=2)
    line.load_state_dict(saved)
    assert line.finished == straight.line.finished
    assert line.unfinished == straight.line.unfinished
    assert line.room == straight.line.room == SIZE
    assert line.admit([draw(0)]) == straight.line.admit([draw(0)])


def test_a_line_that_was_longer_is_used_up():
    """Of a run that went further ahead: more groups than slots, and some too old already."""
    long = Admission(size=2, ahead=3)
    long.admit([draw(i) for i in range(8)])
    short = Admission(size=2, ahead=1)
    short.load_state_dict(long.state_dict())
    assert short.room == 0
    for number in range(8):
        short.finish(number, group(str(number), (0.0, 1.0)))
    for _ in range(4):
        assert short.ready()
        short.take()
        short.train()
    assert short.room == 4


@pytest.mark.parametrize(("size", "ahead"), [(0, 1), (1, -1)])
def test_sizes_that_are_none(size: int, ahead: int):
    with pytest.raises(ValueError, match="at least"):
        Admission(size=size, ahead=ahead)
