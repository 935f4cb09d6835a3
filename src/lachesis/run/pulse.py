"""Pulses: checks of the servers and environments that a run waits for, which report a stopped or silent one in seconds.

Deadlines end a wait only after minutes, because slow is not dead. A user who watches a run wants to know earlier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from lachesis.common.deadline import Deadline, paused_s, waits_now
from lachesis.common.errors import LachesisError
from lachesis.engines.serving.session import read_session

logger = logging.getLogger("lachesis")

LOOK_S = 1.0
# Time limit of a health request, in seconds. With the pause before it, a silent server is reported within 5 s.
SILENCE_S = 3.5
# Seconds that a transfer may take beyond twice the last one; and the limit of a run's first transfer.
LATE_S, FIRST_TRANSFER_S = 3.5, 4.5
# A late transfer gives up a stopped server at once, and a silent one only after this many seconds: it may be busy and
# still get its weights.
GIVEN_UP_S = 15.0
# The names of waits for transfers begin with this (:mod:`lachesis.bridges.base`).
TRANSFER = "the transfer of weight version"
# The names of waits for groups from external environments.
FROM_OTHERS = "sequences from"


@dataclass(slots=True)
class Pulse:
    """The pulse of a server or program: whether it was last found stopped or silent.

    Args:
        name: its name in messages.
        health_url: the URL that it answers while it is healthy; ``None`` if it has none.
        pid: the id of its main process, if that runs on this machine.
        give_up: called with the trouble, once a transfer is late that waits for it.
    """

    name: str
    health_url: str | None
    pid: Callable[[], int | None]
    give_up: Callable[[str], None] = lambda trouble: None
    trouble: str = ""
    _is_stopped: bool = False
    _since: float = 0.0
    _heard: bool = field(default=False, repr=False)

    def look(self, client: httpx.Client) -> None:
        """Log a change since the last look: it has stopped, is silent, or has resumed."""
        stopped = self._stopped()
        self._is_stopped = bool(stopped)
        found = stopped or self._silent(client)
        if found and not self.trouble:
            self._since = time.monotonic()
            logger.warning("%s %s", self.name, found)
        elif self.trouble and not found:
            logger.warning("%s has resumed after %.0f s", self.name, time.monotonic() - self._since)
        self.trouble = found

    def miss_transfer(self) -> None:
        """Give the server up if it is stopped, or has long been silent, because a transfer is late."""
        if self.trouble and (self._is_stopped or time.monotonic() - self._since > GIVEN_UP_S):
            self.give_up(f"it {self.trouble.partition(',')[0]}")

    def _stopped(self) -> str:
        """Return a sentence on the process that a signal has stopped and how to resume it; empty if none is stopped."""
        pid = self.pid()
        if pid is None:
            return ""
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            return ""
        stopped = [one.pid for one in family if _is_stopped(one)]
        if not stopped:
            return ""
        number = " ".join(map(str, stopped))
        return f"is stopped by a signal, and the run waits for it; resume it with: kill -CONT {number}"

    def _silent(self, client: httpx.Client) -> str:
        """Return a sentence if the server accepts connections but does not answer; lost requests report a dead one."""
        if self.health_url is None:
            return ""
        before = paused_s()
        try:
            trouble = self.read(client.get(self.health_url))
        except httpx.TimeoutException:
            return f"has not answered for {SILENCE_S:g} s" if self._heard and paused_s() == before else ""
        except (httpx.HTTPError, OSError, ValueError):
            return self.trouble
        self._heard = True
        return trouble

    def read(self, answer: httpx.Response) -> str:
        """Return a sentence if an answer shows a problem, else an empty text."""
        return ""


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


@dataclass(slots=True)
class TransferPulse:
    """The pulse of weight transfers: reports one that takes much longer than the last, because its engine hangs."""

    last_s: Callable[[], float | None]
    _told: Deadline | None = None

    def look(self) -> bool:
        """Log once that a transfer is late, and later that it has ended. Returns True while it is late."""
        found = next((one.deadline for one in waits_now() if one.deadline.name.startswith(TRANSFER)), None)
        if self._told is not None and found is not self._told:
            logger.warning("the transfer has ended, after %.0f s", self._told.elapsed_s())
            self._told = None
        if found is None or found is self._told:
            return found is not None
        last_s = self.last_s()
        if found.counted_s() > (FIRST_TRANSFER_S if last_s is None else 2 * last_s + LATE_S):
            self._told = found
            before = " (the first may take long)" if last_s is None else f", and the one before it took {last_s:.1f} s"
            logger.warning(f"{found.name} has taken {found.counted_s():.0f} s{before}; see the engine's log")
        return self._told is not None


@dataclass(slots=True)
class ServerPulse(Pulse):
    """The pulse of an inference server, which may answer and still generate nothing.

    Such a server may also be waiting for a slow environment. Each report that turns out to be such a pause doubles the
    time until the next report, and there is none before an environment's first request, which may be long in coming.

    Attributes:
        has_requests: returns True while the server has requests of this process.
    """

    has_requests: Callable[[], bool] = lambda: False
    _tokens: int | None = None
    _tokens_since: float = 0.0
    _patience_s: float = field(default_factory=lambda: SILENCE_S)
    _is_told: bool = False
    _has_generated: bool = False
    _was_for_others: bool = False

    def read(self, answer: httpx.Response) -> str:
        """Return a sentence if the server has generated nothing although the run waits for it."""
        found = answer.json() if answer.is_success else {}
        tokens, waits = found.get("generated_tokens"), [one.deadline.name for one in waits_now()]
        for_others = any(FROM_OTHERS in name for name in waits)
        self._has_generated |= for_others and self._was_for_others and tokens != self._tokens
        self._was_for_others = for_others  # tokens of a wait that has just begun may be those of the proof
        is_asked = self.has_requests() or (self._has_generated and for_others)
        rests = tokens is None or found["paused"] or found["sleeping"]
        if rests or not is_asked or tokens != self._tokens or any(name.startswith(TRANSFER) for name in waits):
            if self._is_told:
                self._patience_s *= 2
            self._tokens, self._tokens_since, self._is_told = tokens, time.monotonic(), False
            return ""
        self._is_told = time.monotonic() - self._tokens_since > self._patience_s
        if not self._is_told:
            return ""
        return f"answers but has generated nothing for {self._patience_s:g} s, and the run waits for it"


def server_pulse(
    url: str,
    *,
    has_requests: Callable[[], bool] = lambda: False,
    give_up: Callable[[str], None] = lambda trouble: None,
) -> Pulse:
    """Return the pulse of an inference server; its session file names the process if it runs on this machine."""

    def pid() -> int | None:
        try:
            session = read_session(url)
        except LachesisError:  # the code that needs the session reports problems with the file
            return None
        return None if session is None else session.pid

    return ServerPulse(f"the engine at {url}", f"{url}/bridge/info", pid, give_up, has_requests=has_requests)


@contextmanager
def pulses_felt(
    find: Callable[[], Sequence[Pulse]],
    *,
    last_transfer_s: Callable[[], float | None] = lambda: None,
    every_s: float = LOOK_S,
) -> Iterator[None]:
    """Check each pulse from a separate thread every ``every_s`` seconds while the block runs.

    Args:
        find: returns the current pulses; pulses with equal names are the same.
        last_transfer_s: returns the duration of the last transfer of weights, in seconds.
        every_s: the pause between two looks.
    """
    ended = threading.Event()
    threads: dict[str, tuple[threading.Thread, Pulse]] = {}

    def feel(pulse: Pulse) -> None:
        with httpx.Client(trust_env=False, timeout=SILENCE_S) as client:
            while not ended.wait(every_s) and pulse.name in found_now:
                pulse.look(client)

    def watch() -> None:
        while True:
            pulses = {pulse.name: pulse for pulse in find()}
            if pulses and transfer.look():  # within the trainer's process there is nothing else to hang
                for _, felt in threads.values():
                    felt.miss_transfer()
            found_now.clear()
            found_now.update(pulses)
            for name, pulse in pulses.items():
                if name not in threads or not threads[name][0].is_alive():
                    thread = threading.Thread(target=feel, args=(pulse,), name="lachesis-pulse", daemon=True)
                    threads[name] = thread, pulse
                    thread.start()
            if ended.wait(every_s):
                return

    found_now: dict[str, Pulse] = {}
    transfer = TransferPulse(last_transfer_s)
    watcher = threading.Thread(target=watch, name="lachesis-pulses", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(SILENCE_S + 1.0)
