"""Leader and followers: turns, answers, and every way in which one of them can be gone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, LachesisError, TrainingError
from lachesis.train.distributed import follower, leader
from lachesis.train.distributed.control import Gone, Tag
from lachesis.train.distributed.follower import Follower, ToldLeader
from lachesis.train.distributed.leader import BUILD, END, METHODS, Leader
from lachesis.train.distributed.messages import Alive, Answer, Ended, Turn

LIMIT_S = 60.0
DEAD = object()
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"


class Wire:
    """What is under way between ranks, which are threads here; who dies is noticed by those who wait for it."""

    def __init__(self, size: int, *, limit_s: float = LIMIT_S) -> None:
        self.size = size
        self.limit_s = limit_s
        # All at once: two threads that each made the same one would wait for one another in different ones.
        self.queues: dict[Any, queue.Queue[Any]] = {
            (source, to, what): queue.Queue()
            for source, to, what in product(range(size), range(size), ("broadcast", *Tag))
        }
        self.dead: set[int] = set()

    def die(self, rank: int) -> None:
        self.dead.add(rank)
        for other in range(self.size):
            for what in ("broadcast", *Tag):
                self.queues[rank, other, what].put(DEAD)


class FakeControl:
    """One rank's end of a :class:`Wire`: a :class:`ControlGroup` of threads."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.size, self.limit_s = wire, rank, wire.size, wire.limit_s

    def name(self, rank: int) -> str:
        return f"rank {rank}" if rank else "the leader"

    def broadcast(self, message: Any = None) -> Any:
        if self.rank > 0:
            found = self.wire.queues[0, self.rank, "broadcast"].get(timeout=LIMIT_S)
            if found is DEAD:
                raise RuntimeError(CLOSED)
            return found
        for other in range(1, self.size):
            self.wire.queues[0, other, "broadcast"].put(message)
        return message

    def send(self, message: Any, *, to: int, tag: Tag) -> None:
        if to in self.wire.dead:
            raise Gone(f"{self.name(to)} ended without reporting an error")
        self.wire.queues[self.rank, to, tag].put(message)

    def receive(self, source: int, *, tag: Tag, deadline: Deadline | None = None) -> Any:
        box = self.wire.queues[source, self.rank, tag]
        if deadline is None:
            return self._opened(box.get(), source)
        try:
            found = box.get(timeout=deadline.remaining_s())
        except queue.Empty:
            raise DeadlineExceeded(f"{deadline.name} took longer", remedy=f"raise {deadline.setting}") from None
        return self._opened(found, source)

    def _opened(self, found: Any, source: int) -> Any:
        if found is DEAD:
            raise Gone(f"{self.name(source)} ended without reporting an error")
        return found


class FakePolicy:
    """Takes part by doing what the test says."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        self.read: list[tuple[Any, ...]] = []
        self.optimizer = SimpleNamespace(steps_taken=0)

    def full_parameters(self, names: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            self.read.append((name,))
            yield name

    def canary(self, token_ids: tuple[int, ...]) -> list[int]:
        self.read.append(token_ids)
        return list(token_ids)


class Ranks:
    """A leader and its followers, each in a thread of its own."""

    def __init__(self, step: Callable[[int], object], *, followers: int = 2, limit_s: float = LIMIT_S) -> None:
        self.wire = Wire(followers + 1, limit_s=limit_s)
        self.policies = {rank: FakePolicy(lambda rank=rank: step(rank)) for rank in range(1, followers + 1)}
        self.ended: list[LachesisError] = []
        self.threads = ThreadPoolExecutor(followers)
        self.done: dict[int, Future[None]] = {}
        self.aborted = threading.Event()
        for rank, policy in self.policies.items():
            one = Follower(
                FakeControl(self.wire, rank),  # type: ignore[arg-type]
                build=lambda data, p=policy: (p, 0),  # type: ignore[arg-type, return-value]
                end_process=self.ended.append,
            )
            self.done[rank] = self.threads.submit(one.follow)
        self.leader = Leader(FakeControl(self.wire, 0), abort=self.aborted.set)  # type: ignore[arg-type]
        with self.leader.turn(BUILD, {}, what="building"):
            pass


@contextmanager
def ranks(step: Callable[[int], object] = lambda rank: None, **options: Any) -> Iterator[Ranks]:
    running = Ranks(step, **options)
    try:
        yield running
    finally:
        running.leader.close()
        running.wire.die(0)
        for rank in running.policies:
            running.wire.die(rank)
        running.threads.shutdown()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (leader, follower):
        monkeypatch.setattr(module, "_NEWS_S", 0.01)
    monkeypatch.setattr(leader, "_SETTLE_S", 0.01)
    monkeypatch.setattr(leader, "_ABORT_S", 0.01)
    monkeypatch.setattr(follower, "_GRACE_S", 0.01)


def test_all_take_part_until_the_end():
    stepped: list[int] = []
    with ranks(stepped.append) as running:
        with running.leader.turn("canary", what="reading", parts=[(1, 2), (3,)]) as answers:
            pass
        assert answers == []
        with running.leader.turn("step", what="stepping"):
            pass
        running.leader.close()
        for future in running.done.values():
            future.result(LIMIT_S)
    assert sorted(stepped) == [1, 2]
    assert {rank: policy.read for rank, policy in running.policies.items()} == {1: [(1, 2)], 2: [(3,)]}


def test_a_follower_takes_part_in_a_stream_to_its_end():
    with ranks() as running:
        with running.leader.turn("full_parameters", ("a", "b"), what="gathering"):
            pass
        assert [policy.read for policy in running.policies.values()] == [[("a",), ("b",)]] * 2
        assert running.leader.turns == 2


def test_answers_come_in_the_order_of_ranks_if_asked_for():
    """Rank 1 answers last."""
    second = threading.Event()
    with (
        ranks(lambda rank: (second.wait(LIMIT_S) if rank == 1 else second.set()) or rank) as running,
        running.leader.turn("step", what="counting", answers=True) as answers,
    ):
        pass
    assert answers == [True, 2]


def test_what_the_leaders_policy_overrides_may_be_a_turn_and_nothing_else():
    assert {"accumulate", "step", "canary", "full_parameters", "load_state_dict"} <= METHODS
    with (
        ranks() as running,
        pytest.raises(TrainingError, match=r"rank [12]: turn 1 is read, which this rank does not know"),
        running.leader.turn("read", what="reading"),
    ):
        for rank in (1, 2):  # one that were dead before it had said why would be that: gone without a word
            running.done[rank].exception(LIMIT_S)
        for rank in (1, 2):
            running.wire.die(rank)


def fail(rank: int) -> None:
    if rank == 2:
        raise ValueError("a tensor is too large\nand more")


def test_a_follower_that_fails_is_named():
    with ranks(fail) as running:
        running.done[2].add_done_callback(lambda _: running.wire.die(2))
        with (
            pytest.raises(TrainingError, match=r"rank 2: .*ValueError: a tensor is too large, during the st"),
            running.leader.turn("step", what="the step"),
        ):
            pass
        with pytest.raises(ToldLeader, match=r"its part failed"):
            running.done[2].result(LIMIT_S)


def refuse(rank: int) -> None:
    raise TrainingError("the gradient is not finite", remedy="lower the rate")


def test_an_error_of_all_ranks_is_the_leaders_own():
    with ranks(refuse) as running:
        with pytest.raises(TrainingError) as caught, running.leader.turn("step", what="the step"):
            refuse(0)
        assert caught.value.message == "the gradient is not finite"
        with pytest.raises(ToldLeader, match=r"not finite"):
            running.done[1].result(LIMIT_S)


@pytest.mark.usefixtures("impatient")
def test_a_collective_that_fails_because_a_follower_is_gone_names_that_one():
    """Rank 2's collective fails too, and it may be heard first."""

    def step(rank: int) -> None:
        if rank == 2:
            raise RuntimeError(CLOSED)
        running.wire.die(1)

    with ranks(step) as running:
        with (
            pytest.raises(TrainingError, match=r"rank 1 ended without reporting an error, during the step"),
            running.leader.turn("step", what="the step"),
        ):
            running.done[2].exception(LIMIT_S)
            raise RuntimeError(CLOSED)
        with pytest.raises(ToldLeader):
            running.done[2].result(LIMIT_S)


@pytest.mark.usefixtures("impatient")
def test_collectives_of_the_leader_that_wait_for_one_who_is_gone_are_aborted():
    with (
        ranks() as running,
        pytest.raises(TrainingError, match=r"rank 2 ended without reporting an error"),
        running.leader.turn("step", what="the step"),
    ):
        running.wire.die(2)
        assert running.aborted.wait(LIMIT_S)


@pytest.mark.usefixtures("impatient")
def test_an_error_of_the_leader_alone_stays_what_it_is():
    with ranks() as running, pytest.raises(ZeroDivisionError), running.leader.turn("step", what="the step"):
        raise ZeroDivisionError


@pytest.mark.usefixtures("impatient")
def test_a_collective_that_fails_though_all_are_there_is_told_as_that():
    with (
        ranks() as running,
        pytest.raises(TrainingError, match=r"the ranks lost contact during the step: \[gloo\] Timed out"),
        running.leader.turn("step", what="the step"),
    ):
        raise RuntimeError("[gloo] Timed out waiting 600000ms for recv operation to complete\nand more")


@pytest.mark.usefixtures("impatient")
def test_a_follower_that_is_gone_between_turns_is_known_and_ends_the_others():
    with ranks() as running:
        running.leader.check()
        running.wire.die(2)
        assert running.leader._trouble.wait(LIMIT_S)
        with pytest.raises(TrainingError, match=r"rank 2 ended without reporting an error"):
            running.leader.check()
        with (
            pytest.raises(TrainingError, match=r"rank 2 ended without reporting an error.*, during the step"),
            running.leader.turn("step", what="the step"),
        ):
            pass


def test_a_follower_that_does_nothing_is_waited_for_until_the_deadline():
    wire = Wire(2, limit_s=0.01)
    one = Leader(FakeControl(wire, 0), abort=lambda: None)  # type: ignore[arg-type]
    with (
        pytest.raises(DeadlineExceeded, match=r"rank 1 doing its part of the step took longer") as caught,
        one.turn("step", what="the step"),
    ):
        pass
    assert "deadlines.ranks_s" in caught.value.remedy
    wire.die(1)
    one.close()


def test_a_rank_at_another_turn_is_named_with_both():
    wire = Wire(2)
    other = Follower(
        FakeControl(wire, 1),  # type: ignore[arg-type]
        build=lambda data: pytest.fail("it is not its turn"),
        end_process=lambda error: None,
    )
    wire.queues[0, 1, "broadcast"].put(Turn(3, "step"))
    wire.queues[0, 1, Tag.LIFE].put(Ended())
    with pytest.raises(ToldLeader, match=r"it is at turn 0, but the leader is at turn 3 \(step\)"):
        other.follow()
    one = Leader(FakeControl(wire, 0), abort=lambda: None)  # type: ignore[arg-type]
    wire.queues[1, 0, Tag.ANSWER].put(Answer(7))
    with pytest.raises(TrainingError, match=r"rank 1 answered .*7.* to turn 0 \(step\)"), one.turn("step", what="it"):
        pass
    wire.die(1)
    one.close()


def test_a_follower_ends_where_the_leader_is_gone():
    with ranks() as running:
        running.wire.die(0)
        for rank, future in running.done.items():
            with pytest.raises(Gone, match=r"the leader ended without reporting an error"):
                future.result(LIMIT_S)
            running.wire.die(rank)
    assert not running.ended


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("dies", [True, False])
def test_a_follower_that_waits_in_a_collective_for_a_leader_who_ends_is_ended(dies: bool):
    collective, began = threading.Event(), threading.Event()

    def wait(rank: int) -> None:
        began.set()
        collective.wait(LIMIT_S)

    with ranks(wait, followers=1) as running:
        running.wire.queues[0, 1, "broadcast"].put(Turn(1, "step"))
        assert began.wait(LIMIT_S)
        if dies:
            running.wire.die(0)
        else:
            running.leader.close()
        while not running.ended:
            collective.wait(0.01)
        collective.set()
    assert isinstance(running.ended[0], Gone if dies else ToldLeader)


def test_a_leader_that_is_silent_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leader, "_BEAT_S", 0.01)
    monkeypatch.setattr(follower, "_GRACE_S", 0.01)
    wire = Wire(2, limit_s=0.5)
    ended: queue.Queue[LachesisError] = queue.Queue()
    one = Follower(FakeControl(wire, 1), build=lambda data: pytest.fail("nobody said so"), end_process=ended.put)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(one.follow)
        for _ in range(3):
            wire.queues[0, 1, Tag.LIFE].put(Alive())
            with pytest.raises(queue.Empty):
                ended.get(timeout=0.3)
        assert "rank 1 waiting for a sign of life of the leader took longer" in ended.get(timeout=LIMIT_S).message
        wire.queues[0, 1, "broadcast"].put(Turn(0, END))
        done.result(LIMIT_S)


def test_a_leader_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leader, "_BEAT_S", 0.01)
    wire = Wire(2)
    one = Leader(FakeControl(wire, 0), abort=lambda: None)  # type: ignore[arg-type]
    for _ in range(3):
        assert wire.queues[0, 1, Tag.LIFE].get(timeout=LIMIT_S) == Alive()
    wire.queues[1, 0, Tag.LIFE].put(Ended())
    one.close()
