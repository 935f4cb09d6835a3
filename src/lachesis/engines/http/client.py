"""An engine in one or several server processes, reached over HTTP. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import TypeVar
from urllib.parse import urlsplit

from lachesis.common.deadline import Deadline, Retry
from lachesis.common.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EngineUnreachable,
    LachesisError,
    StaleWeights,
)
from lachesis.common.types import CanaryReading, Completion, EngineHealth, GenerationRequest
from lachesis.engines.base import Engine, Finished, PauseMode, largest_difference
from lachesis.engines.fleet import Fleet, State
from lachesis.engines.http.control import ServerControl, ServerInfo
from lachesis.engines.http.dispatch import GenerationCalls, nobody_serves, visit
from lachesis.engines.serving.backend import MEMORY_PARTS, MemoryPart
from lachesis.metrics.names import GENERATION_OF, PREFIX_HITS, PREFIX_HITS_OF
from lachesis.metrics.values import Mean, MetricValue
from lachesis.process.threads import LoopThread

T = TypeVar("T")
logger = logging.getLogger("lachesis")
_AGAIN_S = 1.0
# Seconds between checks, while a call waits for servers, if the fleet has given one up.
_LOOK_S = 0.2
# Number of servers called concurrently; fleets are rarely larger.
_MOST_CALLS = 64


class HttpEngine(Engine):
    """An engine made of servers that hold the same weights. Thread-safe.

    Each request goes, with all its ``n`` completions and its seed, to the server that :attr:`fleet` picks, and to
    another one if its server is lost. Weight changes and their proofs go to all live servers. Sessions are recorded at
    the first contact: an answer from another session means that a server was restarted and has other weights. It gets
    no more requests; if it is the only server, calls raise :class:`StaleWeights` until :meth:`connect` is called.

    Servers may join and leave: see :meth:`set_members`.

    Requests wait while a server is paused: :meth:`generate` returns once it is resumed, or raises at its deadline.

    Args:
        urls: the servers, with or without ``/v1``, in the order of :attr:`session_ids`.
        token: the token of their sessions; by default looked up for each server.
        control_s: time limit of calls without a deadline, in seconds.
        canary_tolerance: maximum difference of a canary logprob between two servers, in nats.
        max_in_flight: maximum number of concurrent requests to one server; further ones wait here.
        hang_s: see :class:`~lachesis.engines.fleet.Fleet`.

    Raises:
        ConfigError: an address is missing, invalid, or given twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        control_s: float = 300.0,
        canary_tolerance: float = 0.05,
        max_in_flight: int = 512,
        hang_s: float | None = None,
    ) -> None:
        self._token = token
        self._controls = {control.url: control for control in map(self._client, urls)}
        addresses = tuple(self._controls)
        if not addresses or len(addresses) < len(urls):
            raise ConfigError(f"engine.urls is {list(urls)}", remedy="name at least one server, and each only once")
        self._control_s = control_s
        self._tolerance = canary_tolerance
        self.fleet = Fleet(addresses, clock=time.monotonic, max_in_flight=max_in_flight, hang_s=hang_s)
        self._calls = GenerationCalls(self.fleet, server=self.control, check_session=self.check_session)
        self._loop = LoopThread("lachesis-engine-client", what="the engine client")
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="lachesis-engine-control")
        self._closed = False
        self._owner = ""

    def _client(self, url: str) -> ServerControl:
        return ServerControl(url, token=self._token)

    def connect(self, *, deadline: Deadline) -> tuple[ServerInfo, ...]:
        """Get the servers' sessions, and require these sessions from now on.

        Raises:
            EngineError: a server does not answer, or they serve different models.
        """
        controls = self.controls
        infos = tuple(self._on(controls, lambda server: server.info(deadline=deadline)))
        for info in infos[1:]:
            _check_same_model(infos[0], info)
        for control, info in zip(controls, infos, strict=True):
            self.fleet.met(control.url, info.session_id)
        return infos

    def connect_when_up(self, *, wait_s: float, deadline: Deadline) -> tuple[ServerInfo, ...]:
        """Call :meth:`connect`, retrying for ``wait_s`` seconds while a server does not answer.

        Raises:
            EngineError: as :meth:`connect`; or a server has not answered in that time.
            DeadlineExceeded: ``deadline`` passed first.
        """
        patience = Deadline("the trainer's wait for the inference servers", wait_s, "engine.wait_s")
        retry = Retry(
            deadline,
            first_s=min(_AGAIN_S, wait_s),
            say=lambda reason: logger.warning("%s; waiting for it for up to %g s", reason, wait_s),
        )
        with patience.waiting():
            while True:
                try:
                    return self.connect(deadline=deadline)
                except EngineUnreachable as error:
                    if not patience.remaining_s():
                        raise
                    pause_s = retry.after(error.message)
                time.sleep(pause_s)

    def set_members(self, urls: Sequence[str], *, deadline: Deadline) -> None:
        """Use exactly these servers, in the form of :func:`~lachesis.common.http.server_url`.

        New servers get requests once greeted and proved. Leaving servers get no more requests, finish their current
        ones, and are then released for other runs.
        """
        for url in urls:
            if self.fleet.state(url) is State.RETIRED:
                logger.info("the engine at %s joins", url)
                self._controls[url] = self._controls.get(url) or self._client(url)
                self.fleet.add(url)
        for url in set(self.urls) - set(urls):
            logger.info("the engine at %s leaves: it gets no more requests", url)
            self.fleet.retire(url, "it was taken out of the fleet")
        for url in self.fleet.having(State.RETIRED):
            if self.fleet.is_idle(url):
                self.fleet.forget(url)
                control = self._controls.pop(url)
                if self._owner:
                    with suppress(EngineError, DeadlineExceeded):  # the server may be gone
                        control.release(self._owner, deadline=deadline)
                control.close()

    @property
    def controls(self) -> tuple[ServerControl, ...]:
        """Return the clients of the servers that have not left, in order."""
        gone = self.fleet.having(State.RETIRED)
        return tuple(control for url, control in self._controls.items() if url not in gone)

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the servers that have not left, in order."""
        return tuple(control.url for control in self.controls)

    @property
    def session_ids(self) -> tuple[str, ...]:
        """Return the sessions of the servers, in the order of their addresses; connect first if necessary."""
        if self.fleet.having(State.STARTING) == self.urls:
            self.connect(deadline=self._deadline("learning the sessions"))
        return tuple(session for url in self.urls if (session := self.fleet.session(url)))

    @property
    def session_id(self) -> str:
        """Return the sessions of all servers joined by commas, as in canary readings and health."""
        return ",".join(self.session_ids)

    def control(self, url: str) -> ServerControl:
        """Return the client of the server at an address of :attr:`urls`."""
        return self._controls[url]

    @property
    def living(self) -> tuple[ServerControl, ...]:
        """Return the servers that are not known to be gone; before the first contact all of them."""
        there = self.fleet.having(State.STALE, State.SERVING, State.SUSPECT)
        none_met = self.fleet.having(State.STARTING) == self.urls
        return tuple(control for control in self.controls if none_met or control.url in there)

    @property
    def sessions(self) -> tuple[tuple[str, str], ...]:
        """Return the address and session of each live server: a new session is another engine."""
        return tuple((control.url, self.fleet.session(control.url)) for control in self.living)

    def on_all(self, call: Callable[[ServerControl], T], *, together: bool = False) -> list[T]:
        """Call every live server concurrently; return results in the order of the servers.

        A server that does not answer is considered dead and left out, if there is another one. So is one that the fleet
        gives up meanwhile, unless the others cannot go on without it: ``together``.

        Raises:
            EngineUnreachable: one was given up and all must go on ``together``. The first error, without waiting
            for the other servers, which may hang for the same reason.
        """
        return [result for _, result in self.on_each(call, together=together)]

    def on_each(self, call: Callable[[ServerControl], T], *, together: bool = False) -> list[tuple[ServerControl, T]]:
        """Do as :meth:`on_all`, and return each result with its server."""
        living = self.living
        if not living:
            raise nobody_serves(self.fleet)

        def reached(control: ServerControl) -> T | EngineUnreachable:
            try:
                return call(control)
            except EngineUnreachable as error:
                if len(living) == 1:
                    raise
                return error

        def given_up(control: ServerControl) -> EngineUnreachable:
            reason = self.fleet.reason(control.url)
            error = EngineUnreachable(f"the run has given up the engine at {control.url}: {reason}")
            if together:
                raise error
            return error

        found = list(zip(living, self._on(living, reached, given_up=given_up), strict=True))
        lost = [(control, result) for control, result in found if isinstance(result, EngineUnreachable)]
        if len(lost) == len(living):
            raise lost[0][1]
        for control, error in lost:
            logger.warning("the engine at %s is gone and the others continue: %s", control.url, error.message)
            self.fleet.died(control.url, error.message)
        return [(control, result) for control, result in found if not isinstance(result, EngineUnreachable)]

    def lose_silent(self, call: Callable[[ServerControl], object], *, reason: str) -> bool:
        """Declare servers dead that do not answer ``call`` in time, if others do; return True if there were any.

        The content of answers is ignored.
        """

        def answered(control: ServerControl) -> bool:
            try:
                call(control)
            except (DeadlineExceeded, EngineUnreachable):
                return False
            except LachesisError:
                pass
            return True

        living = self.living
        silent = [one for one, there in zip(living, self._on(living, answered), strict=True) if not there]
        if len(silent) == len(living):
            return False
        for control in silent:
            self.fleet.died(control.url, reason)
        return bool(silent)

    def look(self, *, quiet_s: float = 0.0) -> None:
        """Check the servers that are believed to be alive; one that does not answer is considered dead.

        Servers that have answered anything within the last ``quiet_s`` seconds are not asked.

        Raises:
            EngineUnreachable: no server is left.
        """
        self._on([server for server in self.living if server.quiet_s >= quiet_s], lambda s: visit(self.fleet, s))
        if not self.living:
            raise nobody_serves(self.fleet)

    def greet(self, url: str, *, deadline: Deadline) -> None:
        """Connect to a server that was dead or has joined, in any session, and claim it like the others.

        Raises:
            EngineError, DeadlineExceeded: it does not answer, serves another model, or another run has claimed it.
        """
        control = self.control(url)
        info = control.info(deadline=deadline)
        others = [one for one in self.living if one.url != url]
        if others:
            _check_same_model(others[0].info(deadline=deadline), info)
        if self._owner:
            control.claim(self._owner, deadline=deadline)
        self.fleet.met(url, info.session_id)

    def _on(
        self,
        controls: Sequence[ServerControl],
        call: Callable[[ServerControl], T],
        *,
        given_up: Callable[[ServerControl], T] | None = None,
    ) -> list[T]:
        """Return results in order, or raise the first error without waiting for the others.

        ``given_up`` makes the result of a server that the fleet declares dead before it answers.
        """
        self._check_open()
        if len(controls) == 1:
            return [call(controls[0])]
        futures = {self._threads.submit(call, control): control for control in controls}
        results: dict[ServerControl, T] = {}
        while len(results) < len(controls):
            done, waiting = wait(futures, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in done and (error := future.exception()) is not None:
                    raise error
            results = {futures[future]: future.result() for future in done}
            for control in (futures[future] for future in waiting):
                if given_up is not None and self.fleet.state(control.url) is State.DEAD:
                    results[control] = given_up(control)
        return [results[control] for control in controls]

    def claim(self, owner: str, *, takeover: bool = False, deadline: Deadline) -> None:
        """Claim every server for ``owner``; see :meth:`ServerControl.claim`."""
        self._owner = owner
        self.on_all(lambda server: server.claim(owner, takeover=takeover, deadline=deadline))

    def release(self, owner: str, *, deadline: Deadline) -> None:
        """Release the claims of ``owner``; see :meth:`ServerControl.release`."""
        self.on_all(lambda server: server.release(owner, deadline=deadline))

    def generate(
        self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """See :meth:`Engine.generate`. One failed request fails the call and cancels the others.

        A request whose server is lost does not fail: it is resent to another one, with its seed.
        """
        self._check_open()
        if not requests:
            return []
        _ = self.session_ids
        if not self.fleet.admitted:
            for url in self.fleet.having(State.SUSPECT):
                self.check_session(self.control(url), self.control(url).info(deadline=deadline).session_id)
                self.fleet.met(url, self.fleet.session(url))
        completions = self._loop.run(self._calls.generate(requests, deadline=deadline, finished=finished))
        deadline.check(f"all {len(requests)} requests have finished, but too late")
        return completions

    def canary(self, token_ids: Sequence[int], *, deadline: Deadline | None = None) -> CanaryReading:
        """Read the canary from every server and return the first reading, with which all others must agree.

        Raises:
            StaleWeights: readings differ in version or by more than the tolerance, or a server was restarted.
        """
        limit = deadline or self._deadline("reading the canary")
        (one, first), *others = self._readings(lambda server: server.canary(token_ids, deadline=limit))
        for control, reading in others:
            worst = largest_difference(first.logprobs, reading.logprobs)
            if not worst <= self._tolerance:
                raise StaleWeights(
                    f"at version {first.version} the canary logprobs of {control.url} and {one.url} "
                    f"differ by up to {worst:.4g} (allowed {self._tolerance:g})",
                    remedy="one of the servers did not get the weights; look at their logs",
                )
        return replace(first, session_id=self.session_id)

    def set_version(self, version: int) -> None:
        deadline = self._deadline(f"announcing weight version {version}")
        self.on_all(lambda server: server.set_version(version, deadline=deadline))

    def health(self) -> EngineHealth:
        """Return the health: ready if all servers met so far are; else ``detail`` names the others and their states."""
        sessions = self.session_ids
        deadline = self._deadline("asking for the engine's health")
        met = [control for control in self.controls if self.fleet.session(control.url)]
        found = self._on(met, lambda server: _info_or_reason(server, deadline))
        infos = [entry for entry in found if isinstance(entry, ServerInfo)]
        details = [entry for entry in found if isinstance(entry, str)]
        details += [f"{info.url} is paused" for info in infos if info.paused]
        details += [f"{info.url} is asleep" for info in infos if info.sleeping]
        versions = {info.weight_version for info in infos}
        if len(versions) > 1:
            details.append("the servers are at weight versions " + ", ".join(map(str, sorted(versions))))
        now = tuple(info.session_id for info in infos)
        if len(infos) == len(found) and now != sessions:
            details.append(f"a server was restarted: sessions {','.join(now)}, originally {','.join(sessions)}")
        return EngineHealth(
            ready=not details,
            version=min(versions, default=-1),
            session_id=",".join(sessions),
            paused=any(info.paused for info in infos),
            detail="; ".join(details),
            others_serve=bool(details) and any(map(self._serves, met, found)),
        )

    def _serves(self, control: ServerControl, found: ServerInfo | str) -> bool:
        """Return True if a server answers, awake and in the session in which it was met."""
        if isinstance(found, str):
            return False
        return not found.sleeping and found.session_id == self.fleet.session(control.url)

    def metrics(self) -> dict[str, MetricValue]:
        """Return metrics since the last call.

        They are the busy seconds of each of several servers, and the hit rates of their prefix caches.
        """
        busy = {url: Mean(seconds) for url, seconds in self._calls.take_busy().items()}
        hits = self._calls.take_prefix_hits()
        whole: dict[str, MetricValue] = {PREFIX_HITS: reduce(Mean.merge, hits.values())} if hits else {}
        return _of_several(GENERATION_OF, busy) | whole | _of_several(PREFIX_HITS_OF, hits)

    def pause(self, *, mode: PauseMode = "keep") -> None:
        """See :meth:`Engine.pause`. If a server cannot be paused, the others are resumed."""
        deadline = self._deadline("pausing the engine")
        try:
            self.on_all(lambda server: server.pause(mode=mode, deadline=deadline))
        except LachesisError:
            with suppress(LachesisError):  # report the first error
                self.resume()
            raise

    def resume(self) -> None:
        deadline = self._deadline("resuming the engine")
        self.on_all(lambda server: server.resume(deadline=deadline))

    def sleep(self, *, level: int = 1) -> None:
        """Release the GPU memory of all servers; requests wait until :meth:`wake_up`."""
        deadline = self._deadline("putting the engine to sleep")
        self.on_all(lambda server: server.sleep(level=level, deadline=deadline))

    def wake_up(self, tags: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Undo :meth:`sleep`, for all or only these parts of the memory. Idempotent."""
        deadline = self._deadline("waking up the engine")
        self.on_all(lambda server: server.wake_up(tags, deadline=deadline))

    def close(self) -> None:
        """Close the connections; requests in flight end with EngineError. The servers keep running."""
        if self._closed:
            return
        self._closed = True
        self._loop.close(self._calls.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for control in self._controls.values():
            control.close()

    def _deadline(self, what: str) -> Deadline:
        self._check_open()
        return Deadline(f"{what} ({len(self.controls)} inference servers)", self._control_s, "deadlines.sync_s")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine client is closed", remedy="create a new one")

    def check_session(self, control: ServerControl, session_id: str) -> None:
        """Raise StaleWeights unless the session of an answer is the one recorded for the server."""
        _ = self.session_ids  # of the first contact, which comes before
        expected = self.fleet.session(control.url)
        if session_id != expected:
            raise StaleWeights(
                f"the server at {control.url} has session {session_id}, but this run works with {expected}",
                remedy="it was restarted or replaced: send it the weights again, or stop the program on its port",
            )

    def _readings(self, call: Callable[[ServerControl], CanaryReading]) -> list[tuple[ServerControl, CanaryReading]]:
        """Read from each server; raise StaleWeights unless each is in its session and all are at one version."""
        _ = self.session_ids  # of the first contact, which comes before
        readings = self.on_each(call)
        for control, reading in readings:
            self.check_session(control, reading.session_id)
        if len({reading.version for _, reading in readings}) > 1:
            shown = ", ".join(f"{control.url}: {reading.version}" for control, reading in readings)
            raise StaleWeights(
                f"the servers are at different weight versions ({shown})",
                remedy="a transfer did not reach all of them; look at their logs",
            )
        return readings


def _of_several(name: str, values: Mapping[str, Mean]) -> dict[str, MetricValue]:
    """Return a metric of each server, if there are several."""
    return {f"{name}{urlsplit(url).netloc}": value for url, value in values.items() if len(values) > 1}


def _check_same_model(one: ServerInfo, other: ServerInfo) -> None:
    """Raise EngineError unless both serve the same model."""
    ours, theirs = (f"{m.model} ({m.dtype}, {m.vocab_size} tokens)" for m in (one.model, other.model))
    if ours != theirs:
        raise EngineError(
            f"the servers serve different models: {one.url} has {ours}, but {other.url} has {theirs}",
            remedy="start all of them with the same model and dtype",
        )


def _info_or_reason(server: ServerControl, deadline: Deadline) -> ServerInfo | str:
    try:
        return server.info(deadline=deadline)
    except LachesisError as error:
        return error.message
