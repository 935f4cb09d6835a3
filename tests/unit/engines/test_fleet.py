"""Which engines may serve, and who gets which request: the table of states, and long random histories."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lachesis.common.errors import ConfigError
from lachesis.engines.fleet import Fleet, State, Ticket

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fleet_of(*urls: str, clock: Clock, max_in_flight: int = 8, hang_s: float | None = None) -> Fleet:
    """Of engines that serve version 1."""
    fleet = Fleet(urls, clock=clock, max_in_flight=max_in_flight, hang_s=hang_s)
    for url in urls:
        fleet.met(url, f"session of {url}")
        fleet.proved(url, f"session of {url}", 1)
    fleet.require(1)
    return fleet


def pick(fleet: Fleet, *, group: object = None, completions: int = 1, max_tokens: int = 10) -> Ticket:
    ticket = fleet.pick(completions=completions, max_tokens=max_tokens, group=group)
    assert ticket is not None
    return ticket


class TestAdmission:
    def test_an_answer_admits_only_as_long_as_no_version_is_required(self, clock: Clock):
        fleet = Fleet([A], clock=clock, max_in_flight=8)
        assert (fleet.state(A), fleet.admitted) == (State.STARTING, ())
        fleet.met(A, "one")
        assert (fleet.state(A), fleet.admitted) == (State.STALE, (A,))
        fleet.require(0)
        assert fleet.admitted == ()
        fleet.proved(A, "one", 0)
        assert (fleet.state(A), fleet.admitted) == (State.SERVING, (A,))

    def test_who_is_not_proved_at_the_new_version_is_stale(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        fleet.proved(A, f"session of {A}", 2)
        assert fleet.admitted == (A, B), "until the new version is required the old one is served"
        fleet.require(2)
        assert (fleet.admitted, fleet.state(B)) == ((A,), State.STALE)

    def test_a_proof_of_the_session_before_admits_nobody(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        fleet.met(A, "another")
        fleet.proved(A, f"session of {A}", 1)
        assert fleet.state(A) is State.STALE

    def test_one_that_is_shown_to_have_other_weights_is_stale_until_it_is_proved(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        fleet.unproved(A, "its canary differs")
        assert (fleet.state(A), fleet.reason(A)) == (State.STALE, "its canary differs")
        fleet.met(A, f"session of {A}")
        assert fleet.admitted == (B,), "that it answers is no proof"

    def test_a_suspect_that_is_still_the_same_serves_again_and_a_dead_one_has_to_be_proved_anew(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        for url in (A, B):
            fleet.suspect(url, "it lost a request")
        fleet.died(B, "nobody answers")
        for url in (A, B):
            fleet.met(url, f"session of {url}")
        assert (fleet.state(A), fleet.state(B)) == (State.SERVING, State.STALE)

    def test_what_comes_too_late_changes_nothing(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        ticket = pick(fleet)
        fleet.died(A, "killed")
        fleet.proved(A, f"session of {A}", 1)
        fleet.suspect(A, "late")
        assert fleet.state(A) is State.DEAD
        fleet.replaced(A)
        assert fleet.state(A) is State.STARTING
        fleet.met(A, "another")
        fleet.proved(A, "another", 1)
        fleet.lost(ticket, "by the one before")
        assert fleet.state(A) is State.SERVING

    def test_members_come_and_go(self, clock: Clock):
        fleet = fleet_of(A, clock=clock)
        with pytest.raises(ConfigError, match="already in the fleet"):
            fleet.add(A)
        fleet.add(B)
        ticket = pick(fleet)
        fleet.retire(A, "drained")
        assert (fleet.admitted, fleet.is_idle(A)) == ((), False)
        fleet.ended(ticket, lengths=[3])
        assert fleet.is_idle(A)
        fleet.met(A, "another")
        assert fleet.state(A) is State.RETIRED
        fleet.add(A)
        assert [row.state for row in fleet.rows] == [State.STARTING, State.STARTING]


class TestRequests:
    def test_the_engine_with_the_fewest_expected_tokens_gets_the_next(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        assert pick(fleet, completions=4, max_tokens=100).url == A
        assert [pick(fleet, completions=1, max_tokens=100).url for _ in range(4)] == [B, B, B, B]
        assert [row.expected_tokens for row in fleet.rows] == [400, 400]

    def test_what_completions_have_been_long_is_expected_of_the_next(self, clock: Clock):
        fleet = fleet_of(A, clock=clock)
        fleet.ended(pick(fleet, max_tokens=1000), lengths=[20])
        assert pick(fleet, completions=2, max_tokens=1000).expected_tokens == 40
        assert pick(fleet, completions=2, max_tokens=5).expected_tokens == 10

    def test_a_group_stays_with_its_engine_unless_that_has_more_to_do(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        first = pick(fleet, group="p")
        assert pick(fleet, group="p").url == first.url, "one more than the other has is not too many"
        assert pick(fleet, group="p").url != first.url

    def test_an_engine_has_no_more_than_its_own_limit(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock, max_in_flight=2)
        tickets = [pick(fleet) for _ in range(4)]
        assert Counter(ticket.url for ticket in tickets) == {A: 2, B: 2}
        assert fleet.pick(completions=1, max_tokens=1, group=None) is None
        fleet.ended(tickets[0])
        assert pick(fleet).url == tickets[0].url


class TestHanging:
    def test_an_engine_that_generates_nothing_is_a_suspect_and_then_dead(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock, hang_s=10.0)
        ticket = pick(fleet)
        clock.now += 10.0
        assert fleet.check_progress() == ()
        assert (fleet.state(ticket.url), fleet.admitted) == (State.SUSPECT, (B,))
        clock.now += 10.0
        assert fleet.check_progress() == (A,)
        assert fleet.reason(A) == "it has 1 requests but has generated nothing for 20 s"

    def test_progress_clears_it(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock, hang_s=10.0)
        pick(fleet)
        fleet.progressed(A, 7)
        clock.now += 10.0
        fleet.check_progress()
        fleet.progressed(A, 7)
        assert fleet.state(A) is State.SUSPECT, "an answer without a token more is no progress"
        fleet.progressed(A, 8)
        assert fleet.state(A) is State.SERVING
        clock.now += 9.0
        assert fleet.check_progress() == () and fleet.state(A) is State.SERVING

    def test_that_it_answers_is_no_progress_but_one_that_is_paused_may_stand_still(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock, hang_s=10.0)
        pick(fleet)
        pick(fleet)
        clock.now += 10.0
        fleet.excused(B)
        fleet.check_progress()
        for url in (A, B):
            fleet.met(url, f"session of {url}")
        assert (fleet.state(A), fleet.state(B)) == (State.SUSPECT, State.SERVING)

    def test_who_has_nothing_to_do_does_not_hang(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock, hang_s=10.0)
        clock.now += 1000.0
        fleet.check_progress()
        pick(fleet)
        fleet.check_progress()
        assert fleet.state(A) is State.SERVING

    def test_one_that_is_alone_is_waited_for(self, clock: Clock):
        fleet = fleet_of(A, clock=clock, hang_s=10.0)
        pick(fleet)
        clock.now += 1000.0
        assert fleet.check_progress() == () and fleet.state(A) is State.SERVING


class TestMembers:
    def test_one_that_left_is_forgotten_once_it_has_nothing_to_do(self, clock: Clock):
        fleet = fleet_of(A, B, clock=clock)
        tickets = [pick(fleet), pick(fleet)]
        fleet.retire(A)
        fleet.forget(A)
        assert fleet.having(State.RETIRED) == (A,) and fleet.admitted == (B,)
        for ticket in tickets:
            fleet.ended(ticket)
        fleet.forget(A)
        assert fleet.having(*State) == (B,)

    def test_one_that_works_is_not_forgotten(self, clock: Clock):
        fleet = fleet_of(A, clock=clock)
        fleet.forget(A)
        assert fleet.having(*State) == (A,)


class History:
    """Anything that may happen to a fleet, in any order, beside what has to be true of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.fleet = Fleet([A, B, C], clock=self.clock, max_in_flight=3, hang_s=5.0)
        self.session = dict.fromkeys((A, B, C), "")
        self.proofs: dict[tuple[str, str], int] = {}
        self.gone: set[str] = set()
        self.version: int | None = None
        self.tickets: list[Ticket] = []
        self.picked = 0

    def step(self) -> None:
        url = self.random.choice((A, B, C))
        happens = self.random.choice(
            (self.meet, self.prove, self.prove, self.disprove, self.kill, self.require, self.request, self.request,
             self.end, self.lose, self.wait, self.leave)
        )  # fmt: skip
        happens(url)
        self.check()

    def meet(self, url: str) -> None:
        if self.fleet.state(url) is State.RETIRED:
            self.fleet.add(url)
            self.session[url] = ""
        if self.random.random() < 0.5 or not self.session[url]:
            self.session[url] = f"{url} {self.random.random()}"
        self.fleet.met(url, self.session[url])
        self.gone.discard(url)

    def prove(self, url: str) -> None:
        version = self.random.choice((self.version or 0, (self.version or 0) + 1))
        self.fleet.proved(url, self.session[url], version)
        if url not in self.gone and self.session[url]:
            self.proofs[url, self.session[url]] = version

    def disprove(self, url: str) -> None:
        self.fleet.unproved(url, "its canary differs")
        self.proofs.pop((url, self.session[url]), None)

    def kill(self, url: str) -> None:
        self.fleet.died(url, "killed")
        self.forget(url)

    def leave(self, url: str) -> None:
        if self.random.random() < 0.2:
            self.fleet.retire(url)
            self.forget(url)

    def forget(self, url: str) -> None:
        self.gone.add(url)
        self.proofs.pop((url, self.session[url]), None)
        if self.random.random() < 0.5:
            self.fleet.replaced(url)

    def require(self, url: str) -> None:
        self.version = (self.version or 0) + self.random.randrange(2)
        self.fleet.require(self.version)

    def request(self, url: str) -> None:
        ticket = self.fleet.pick(completions=2, max_tokens=9, group=self.random.randrange(3))
        if ticket is None:
            full = [row.url for row in self.fleet.rows if row.in_flight >= 3]
            assert set(self.fleet.admitted) <= set(full), "an engine that may serve has room"
            return
        self.picked += 1
        self.tickets.append(ticket)
        assert ticket.url not in self.gone
        assert ticket.session == self.session[ticket.url]
        if self.version is not None:
            assert self.proofs[ticket.url, ticket.session] >= self.version, "served without a proof of its own"

    def end(self, url: str) -> None:
        if self.tickets:
            lengths = self.random.choice(([], [3, 4]))
            self.fleet.ended(self.tickets.pop(self.random.randrange(len(self.tickets))), lengths=lengths)

    def lose(self, url: str) -> None:
        if self.tickets:
            ticket = self.tickets.pop()
            self.fleet.lost(ticket, "the connection broke")
            self.fleet.ended(ticket)

    def wait(self, url: str) -> None:
        self.clock.now += self.random.choice((0.5, 3.0))
        for dead in self.fleet.check_progress():
            self.gone.add(dead)
            self.proofs.pop((dead, self.session[dead]), None)

    def check(self) -> None:
        held = Counter(ticket.url for ticket in self.tickets)
        expected = Counter[str]()
        for ticket in self.tickets:
            expected[ticket.url] += ticket.expected_tokens
        for row in self.fleet.rows:
            assert (row.in_flight, row.expected_tokens) == (held[row.url], expected[row.url])
            assert row.in_flight <= 3
            assert row.state is not State.SERVING or row.version is not None
        assert set(self.fleet.admitted) <= set(self.fleet.having(State.SERVING, State.STALE))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_only_proved_engines_serve_and_no_request_is_lost_count_of(seed: int):
    history = History(seed)
    for _ in range(400):
        history.step()
    assert history.picked > 10, "the history would show nothing"
