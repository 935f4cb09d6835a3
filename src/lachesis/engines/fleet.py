"""The states of a run's engines, and the choice of an engine for each request. Does no I/O; the clock is passed in.

::

    STARTING --met--> STALE --proved--> SERVING --lost, hangs--> SUSPECT --gone, hangs on--> DEAD --replaced--> STARTING
                        ^                  |  ^                     |
                        +-- unproved ------+  +--- met, progresses -+          any --retire--> RETIRED

Each engine is admitted by its own proof that, in its current session, it computes with weights of at least the required
version. If no version is required, because nothing is trained, an answer is enough. A restarted engine has a new
session, which needs a new proof.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lachesis.common.errors import ConfigError

# Number of groups to remember with the engine that last had them.
_GROUPS = 4096
# Weight of a new length in the running mean of completion lengths.
_FORGETTING = 0.05


class State(StrEnum):
    """The state of an engine; see the module's docstring."""

    STARTING = "starting"
    STALE = "stale"
    SERVING = "serving"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine as ``lachesis status`` shows it.

    ``version`` is the last proved weight version; ``for_s`` the seconds in this state.
    """

    url: str
    state: State
    version: int | None
    in_flight: int
    expected_tokens: int
    completed: int
    for_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request assigned to an engine; its ``expected_tokens`` count towards the engine's load until it ends."""

    url: str
    session: str
    expected_tokens: int


@dataclass(slots=True)
class _Member:
    url: str
    since: float
    state: State = State.STARTING
    session: str = ""
    proved: int | None = None
    reason: str = ""
    in_flight: int = 0
    expected_tokens: int = 0
    completed: int = 0
    tokens: int = 0
    moved: float = 0.0  # when it last made progress, or got work while idle


class Fleet:
    """The engines of a run and their states. Thread-safe.

    Reports about an unknown engine, and late ones (from an earlier session, or about a dead or retired engine), are
    ignored.

    Args:
        urls: the addresses of the engines, in the order in which they are met.
        clock: returns the time in seconds, from any start.
        max_in_flight: maximum number of concurrent requests to one engine.
        hang_s: with several engines, an engine that has requests but generates nothing for this many seconds becomes
            suspect, and dead after twice as long; ``None``: never.
    """

    def __init__(
        self, urls: Sequence[str], *, clock: Callable[[], float], max_in_flight: int, hang_s: float | None = None
    ) -> None:
        self._clock = clock
        self._limit = max_in_flight
        self._hang_s = hang_s
        self._lock = threading.RLock()
        self._members: dict[str, _Member] = {}
        self._required: int | None = None
        self._groups: OrderedDict[Hashable, str] = OrderedDict()
        self._mean_length: float | None = None
        for url in urls:
            self.add(url)

    def state(self, url: str) -> State:
        """Return the state of the engine at ``url``; RETIRED for an unknown one."""
        with self._lock:
            member = self._members.get(url)
            return State.RETIRED if member is None else member.state

    def session(self, url: str) -> str:
        """Return the session in which the engine was met; empty before the first contact."""
        with self._lock:
            member = self._members.get(url)
            return "" if member is None else member.session

    def reason(self, url: str) -> str:
        """Return the reason for the engine's state; may be empty."""
        with self._lock:
            member = self._members.get(url)
            return "" if member is None else member.reason

    def having(self, *states: State) -> tuple[str, ...]:
        """Return the engines in one of these states, in order."""
        with self._lock:
            return tuple(member.url for member in self._members.values() if member.state in states)

    @property
    def admitted(self) -> tuple[str, ...]:
        """Return the engines that get requests."""
        with self._lock:
            return tuple(member.url for member in self._members.values() if self._is_admitted(member))

    @property
    def rows(self) -> tuple[EngineRow, ...]:
        """Return a row for each engine."""
        with self._lock:
            now = self._clock()
            return tuple(
                EngineRow(
                    url=m.url, state=m.state, version=m.proved, in_flight=m.in_flight,
                    expected_tokens=m.expected_tokens, completed=m.completed, for_s=now - m.since, reason=m.reason,
                )
                for m in self._members.values()
            )  # fmt: skip

    # Members.

    def add(self, url: str) -> None:
        """Add a starting engine, either new or previously retired.

        Raises ConfigError if it is a member already.
        """
        with self._lock:
            if self.state(url) is not State.RETIRED:
                raise ConfigError(f"the engine {url} is already in the fleet", remedy="name each engine once")
            before = self._members.pop(url, None)
            member = self._members[url] = _Member(url, since=self._clock(), moved=self._clock())
            if before is not None:  # its remaining requests end on the old member
                member.in_flight, member.expected_tokens = before.in_flight, before.expected_tokens

    def retire(self, url: str, reason: str = "") -> None:
        """Send the engine no more requests; it may be stopped once :meth:`is_idle`."""
        self._move(url, State.RETIRED, reason, out_of=frozenset(State) - {State.RETIRED})

    def forget(self, url: str) -> None:
        """Remove a retired engine without requests from the members."""
        with self._lock:
            if self.state(url) is State.RETIRED and self.is_idle(url):
                self._members.pop(url, None)

    def is_idle(self, url: str) -> bool:
        """Return True if the engine has no request."""
        with self._lock:
            member = self._members.get(url)
            return member is None or member.in_flight == 0

    def replaced(self, url: str) -> None:
        """Record that a dead engine is being restarted."""
        self._move(url, State.STARTING, "", out_of={State.DEAD})

    # Reports about weights.

    def met(self, url: str, session: str) -> None:
        """Record that the engine answered in this session.

        A suspect engine returns to its previous state if it is still in the same session.
        """
        with self._lock:
            member = self._members.get(url)
            if member is None or member.state is State.RETIRED:
                return
            if session != member.session:
                member.session, member.proved, member.tokens = session, None, 0
                self._set(member, State.STALE, "")
            elif member.state in (State.STARTING, State.DEAD) or (
                member.state is State.SUSPECT and self._moves(member)
            ):
                self._set(member, self._by_proof(member), "")

    def require(self, version: int) -> None:
        """Require engines to be proved at this version from now on; engines at an older version become stale."""
        with self._lock:
            self._required = version
            for member in self._members.values():
                if member.state in (State.SERVING, State.STALE):
                    self._set(member, self._by_proof(member), member.reason)

    def proved(self, url: str, session: str, version: int) -> None:
        """Record a proof that the engine, in this session, computes with the weights of this version."""
        with self._lock:
            member = self._members.get(url)
            if member is None or session != member.session:
                return
            if member.state in (State.STALE, State.SERVING, State.SUSPECT):
                member.proved = version
                self._set(member, self._by_proof(member), "")

    def unproved(self, url: str, reason: str) -> None:
        """Record that the engine answers, but failed the proof that it computes with the trainer's weights."""
        with self._lock:
            member = self._members.get(url)
            if member is not None and member.state in (State.STALE, State.SERVING, State.SUSPECT):
                member.proved = None
                self._set(member, State.STALE, reason)

    # Reports about liveness.

    def suspect(self, url: str, reason: str) -> None:
        """Mark an engine as suspect, because it lost a request or makes no progress.

        It gets no further requests until it answers, makes progress, or is proved.
        """
        self._move(url, State.SUSPECT, reason, out_of={State.STALE, State.SERVING})

    def lost(self, ticket: Ticket, reason: str) -> None:
        """Record that a request was lost with its engine, unless the engine has been replaced since."""
        with self._lock:
            if self.session(ticket.url) == ticket.session:
                self.suspect(ticket.url, reason)

    def died(self, url: str, reason: str) -> None:
        """Record that the engine is dead or unusable."""
        self._move(url, State.DEAD, reason, out_of=frozenset(State) - {State.DEAD, State.RETIRED})

    def given_up(self, url: str, reason: str) -> None:
        """Record that the engine makes no progress and the run gives it up, unless it is the last living one."""
        with self._lock:
            living = self.having(State.STALE, State.SERVING, State.SUSPECT)
            if url in living and len(living) > 1:
                self.died(url, reason)

    def progressed(self, url: str, tokens: int) -> None:
        """Record the engine's total number of generated tokens, which clears a suspicion of hanging.

        Other suspicions stay.
        """
        with self._lock:
            member = self._members.get(url)
            if member is None or tokens <= member.tokens:
                return
            member.tokens, member.moved = tokens, self._clock()
            if member.state is State.SUSPECT:
                self._set(member, self._by_proof(member), "")

    def excused(self, url: str) -> None:
        """Exempt an engine from the progress check: it is paused or asleep, or does not report progress."""
        with self._lock:
            member = self._members.get(url)
            if member is not None:
                member.moved = self._clock()

    @property
    def at_work(self) -> tuple[str, ...]:
        """Return the URLs of engines with requests in flight."""
        with self._lock:
            return tuple(member.url for member in self._members.values() if member.in_flight)

    @property
    def hang_s(self) -> float | None:
        """Return the limit in seconds; ``None`` for a single engine, because no other could take its requests."""
        with self._lock:
            several = sum(member.state is not State.RETIRED for member in self._members.values()) > 1
            return self._hang_s if several else None

    def check_progress(self) -> tuple[str, ...]:
        """Update the states of engines that hang; return the newly dead ones."""
        dead: list[str] = []
        with self._lock:
            if (hang_s := self.hang_s) is None:
                return ()
            for member in self._members.values():
                still = self._clock() - member.moved
                if not member.in_flight or still < hang_s:
                    continue
                reason = f"it has {member.in_flight} requests but has generated nothing for {still:.0f} s"
                alive = member.state in (State.SERVING, State.STALE, State.SUSPECT)
                if alive and still >= 2 * hang_s:
                    self.died(member.url, reason)
                    dead.append(member.url)
                elif member.state in (State.SERVING, State.STALE):
                    self._set(member, State.SUSPECT, reason)
        return tuple(dead)

    # Requests.

    def pick(self, *, completions: int, max_tokens: int, group: Hashable) -> Ticket | None:
        """Assign a request to its group's last engine, or to the least busy one if that has less to do.

        Return ``None`` if no engine is admitted, or all admitted engines are full.
        """
        with self._lock:
            free = [m for m in self._members.values() if self._is_admitted(m) and m.in_flight < self._limit]
            if not free:
                return None
            expected = completions * self._expected_length(max_tokens)
            chosen = min(free, key=lambda member: member.expected_tokens)
            before = self._groups.get(group)
            for member in free:
                if member.url == before and member.expected_tokens <= chosen.expected_tokens + expected:
                    chosen = member
            self._remember(group, chosen.url)
            if not chosen.in_flight:
                chosen.moved = self._clock()
            chosen.in_flight += 1
            chosen.expected_tokens += expected
            return Ticket(chosen.url, chosen.session, expected)

    def ended(self, ticket: Ticket, *, lengths: Sequence[int] = ()) -> None:
        """Record the end of a request, with the lengths of its completions in tokens.

        ``lengths`` is empty if the request was lost or given up.
        """
        with self._lock:
            for length in lengths:
                mean = length if self._mean_length is None else self._mean_length
                self._mean_length = mean + _FORGETTING * (length - mean)
            member = self._members.get(ticket.url)
            if member is None:
                return
            member.in_flight -= 1
            member.expected_tokens -= ticket.expected_tokens
            if lengths:
                member.completed += 1
                member.moved = self._clock()

    def _expected_length(self, max_tokens: int) -> int:
        return max(1, max_tokens if self._mean_length is None else min(max_tokens, round(self._mean_length)))

    def _remember(self, group: Hashable, url: str) -> None:
        self._groups[group] = url
        self._groups.move_to_end(group)
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)

    def _moves(self, member: _Member) -> bool:
        """Return True unless the engine may be hanging."""
        hang_s = self.hang_s
        return hang_s is None or not member.in_flight or self._clock() - member.moved < hang_s

    def _is_admitted(self, member: _Member) -> bool:
        if self._required is None:
            return member.state in (State.STALE, State.SERVING)
        return member.state is State.SERVING

    def _by_proof(self, member: _Member) -> State:
        """Return the state, by its proof, of an engine that answers."""
        required = -1 if self._required is None else self._required
        return State.SERVING if member.proved is not None and member.proved >= required else State.STALE

    def _move(self, url: str, state: State, reason: str, *, out_of: frozenset[State] | set[State]) -> None:
        with self._lock:
            member = self._members.get(url)
            if member is not None and member.state in out_of:
                if state in (State.DEAD, State.STARTING):
                    member.proved = None
                self._set(member, state, reason)

    def _set(self, member: _Member, state: State, reason: str) -> None:
        if state is not member.state:
            member.since = self._clock()
        member.state, member.reason = state, reason
