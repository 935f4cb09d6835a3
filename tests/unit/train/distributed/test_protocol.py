"""Leader and followers: commands, answers, and every way in which one of them can be gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, LachesisError, TrainingError
from lachesis.train.distributed import following
from lachesis.train.distributed.commands import Build, Canary, Done, End, Step
from lachesis.train.distributed.following import Follower
from lachesis.train.distributed.links import Gone, Link, Listener, connect
from lachesis.train.distributed.team import Team

LIMIT_S = 60.0


class FakePolicy:
    """Takes part by doing what the test says."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.read: list[tuple[int, ...]] = []

    def canary(self, token_ids: tuple[int, ...]) -> list[float]:
        self.read.append(token_ids)
        return []


class Ranks:
    """A team and its followers, each in a thread of its own."""

    def __init__(self, step: Callable[[int], None], *, followers: int = 2, limit_s: float = LIMIT_S) -> None:
        pairs = {rank: socket.socketpair() for rank in range(1, followers + 1)}
        self.policies: dict[int, FakePolicy] = {}
        self.ended: list[LachesisError] = []
        self.threads = ThreadPoolExecutor(followers)
        self.links = {rank: Link(theirs, peer="the leader") for rank, (_, theirs) in pairs.items()}
        self.done: dict[int, Future[None]] = {}
        for rank, link in self.links.items():
            policy = self.policies[rank] = FakePolicy(lambda rank=rank: step(rank))
            follower = Follower(
                link, rank=rank, build=lambda data, p=policy: (p, limit_s, 0), end_process=self.ended.append
            )
            self.done[rank] = self.threads.submit(follower.follow)
        leaders = {rank: Link(ours, peer=f"rank {rank}") for rank, (ours, _) in pairs.items()}
        self.team = Team(leaders, limit_s=limit_s)
        with self.team.together("building", Build({})):
            pass


@contextmanager
def ranks(step: Callable[[int], None] = lambda rank: None, **options: Any) -> Iterator[Ranks]:
    running = Ranks(step, **options)
    try:
        yield running
    finally:
        running.team.close()
        running.threads.shutdown()


def test_all_take_part_until_the_end():
    stepped = []
    with ranks(stepped.append) as running:
        with running.team.together("reading", [Canary((1, 2)), Canary((3,))]) as answers:
            pass
        assert answers == [None, None]
        with running.team.together("stepping", Step()):
            pass
        running.team.end()
        for future in running.done.values():
            future.result(LIMIT_S)
    assert sorted(stepped) == [1, 2]
    assert {rank: policy.read for rank, policy in running.policies.items()} == {1: [(1, 2)], 2: [(3,)]}


def test_answers_come_in_the_order_of_ranks():
    ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    team = Team({rank: Link(s, peer=f"rank {rank}") for rank, s in enumerate(ours, 1)}, limit_s=LIMIT_S)
    others = [Link(s, peer="the leader") for s in theirs]
    for rank in (3, 1, 2):  # whoever is first
        others[rank - 1].send(Done(rank))
    with team.together("counting", Step()) as answers:
        pass
    assert answers == [1, 2, 3]
    team.close()


def fail(rank: int) -> None:
    if rank == 2:
        raise ValueError("a tensor is too large")


def test_a_follower_that_fails_is_named():
    with ranks(fail) as running:
        with (
            pytest.raises(TrainingError, match=r"rank 2: .*ValueError: a tensor is too large, in the midst"),
            running.team.together("the step", Step()),
        ):
            pass
        with pytest.raises(TrainingError, match=r"its part of Step could not be done"):
            running.done[2].result(LIMIT_S)


def refuse(rank: int) -> None:
    raise TrainingError("the gradient is not finite", remedy="lower the rate")


def test_an_error_of_all_ranks_is_the_leaders_own():
    with ranks(refuse) as running:
        with pytest.raises(TrainingError) as caught, running.team.together("the step", Step()):
            refuse(0)
        assert caught.value.message == "the gradient is not finite"
        with pytest.raises(TrainingError, match=r"not finite"):
            running.done[1].result(LIMIT_S)


def test_an_error_of_the_leader_that_comes_from_a_follower_who_is_gone_is_told_as_that():
    """A collective fails with whatever its library says of a connection."""
    with ranks() as running:
        with (
            pytest.raises(TrainingError, match=r"rank 1 has ended without a word.*, in the midst of the step"),
            running.team.together("the step", Step()),
        ):
            running.links[1].close()
            raise RuntimeError("Connection closed by peer")
        with pytest.raises(Gone):
            running.done[1].result(LIMIT_S)


def test_an_error_of_the_leader_alone_stays_what_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.train.distributed.team._NEWS_S", 0.01)
    with ranks() as running, pytest.raises(ZeroDivisionError), running.team.together("the step", Step()):
        raise ZeroDivisionError


def test_a_collective_that_fails_though_all_are_there_is_told_as_that(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.train.distributed.team._NEWS_S", 0.01)
    with (
        ranks() as running,
        pytest.raises(TrainingError, match=r"ranks have lost one another in the midst of the step: \[gloo\] Timed out"),
        running.team.together("the step", Step()),
    ):
        raise RuntimeError("[gloo] Timed out waiting 600000ms for recv operation to complete\nand more")


def test_a_follower_that_is_gone_before_is_noticed_at_the_next_command():
    with ranks() as running:
        running.links[2].close()
        with pytest.raises(Gone):
            running.done[2].result(LIMIT_S)
        with (
            pytest.raises(TrainingError, match=r"rank 2 has ended without a word"),
            running.team.together("the step", Step()),
        ):
            pass


def test_a_follower_that_does_nothing_is_waited_for_until_the_deadline():
    ours, theirs = socket.socketpair()
    team = Team({1: Link(ours, peer="rank 1")}, limit_s=0.01)
    with (
        pytest.raises(DeadlineExceeded, match=r"rank 1 doing its part of the step took longer than 0.01 s") as caught,
        team.together("the step", Step()),
    ):
        pass
    assert "deadlines.ranks_s" in caught.value.remedy
    team.close()
    theirs.close()


def test_a_follower_ends_where_the_leader_is_gone():
    with ranks() as running:
        for link in running.team._links.values():
            link.close()
        for future in running.done.values():
            with pytest.raises(Gone, match=r"the leader has ended without a word"):
                future.result(LIMIT_S)
    assert not running.ended


def test_a_follower_that_waits_in_a_collective_for_a_leader_who_is_gone_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following, "_GRACE_S", 0.01)
    collective, began = threading.Event(), threading.Event()

    def wait(rank: int) -> None:
        began.set()
        collective.wait(LIMIT_S)

    with ranks(wait, followers=1) as running:
        running.team._links[1].send(Step())
        assert began.wait(LIMIT_S)
        running.team._links[1].close()
        while not running.ended:
            collective.wait(0.01)
        collective.set()
        with pytest.raises(Gone):
            running.done[1].result(LIMIT_S)
    assert "the leader has ended without a word" in running.ended[0].message


def test_a_follower_hears_that_the_leader_lives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.train.distributed.team._BEAT_S", 0.01)
    heard = threading.Semaphore(0)
    ours, theirs = socket.socketpair()
    team = Team({1: Link(ours, peer="rank 1")}, limit_s=LIMIT_S)
    link = Link(theirs, peer="the leader")
    for _ in range(3):
        link.receive()
        heard.release()
    team.close()


def test_a_leader_that_is_silent_for_too_long_is_given_up():
    ours, theirs = socket.socketpair()
    link = Link(ours, peer="rank 1")
    follower = Follower(
        Link(theirs, peer="the leader"),
        rank=1,
        build=lambda data: (FakePolicy(lambda: None), 0.01, 0),
        end_process=lambda error: None,
    )
    link.send(Build({}))
    with pytest.raises(DeadlineExceeded, match=r"rank 1 waiting for a sign of life of the leader took longer"):
        follower.follow()
    link.close()


def test_whoever_has_the_token_is_let_in():
    listener = Listener("127.0.0.1", everywhere=False)
    deadline = Deadline("followers", LIMIT_S)
    stranger = socket.create_connection((listener.address.host, listener.address.port))
    stranger.sendall(b"x" * len(listener.address.token))
    silent = socket.create_connection((listener.address.host, listener.address.port))
    silent.close()
    with ThreadPoolExecutor(2) as threads:
        links = [
            threads.submit(connect, listener.address, rank=rank, leader="the leader", deadline=deadline)
            for rank in (2, 1)
        ]
        admitted = listener.admit(2, deadline=deadline)
    assert list(admitted) == [1, 2]
    assert "rank 1 (process " in admitted[1].peer
    by_rank = dict(zip((2, 1), (future.result() for future in links), strict=True))
    admitted[1].send(End())
    assert by_rank[1].receive() == End()
    with pytest.raises(Gone, match=r"cannot reach the leader at 127.0.0.1"):
        connect(listener.address, rank=1, leader="the leader", deadline=deadline)
    for link in (*admitted.values(), *by_rank.values()):
        link.close()
    stranger.close()


def test_followers_that_do_not_come_are_counted():
    listener = Listener("127.0.0.1", everywhere=False)
    with pytest.raises(DeadlineExceeded, match=r"the leader waiting .*0 of 2 followers came"):
        listener.admit(2, deadline=Deadline("the leader waiting for 2 followers", 0.01))
