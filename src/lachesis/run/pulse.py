"""The pulse of what a run waits for: a server or an environment that is stopped or silent is told within seconds.

Deadlines end a wait after minutes, as slow is not dead. Somebody who watches a run wants to know before.
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
# How long a server may leave a question about its health open.
SILENCE_S = 4.0
# How much longer than twice the longest one before a transfer may take; and the first one of a run.
LATE_S, FIRST_TRANSFER_S = 4.0, 30.0
# The names of their waits begin so (:mod:`lachesis.bridges.base`).
TRANSFER = "the transfer of weight version"


@dataclass(slots=True)
class Pulse:
    """Server or program, and whether it was last found stopped or silent.

    Args:
        name: what messages call it.
        health_url: what it answers as long as it is well; ``None`` if there is nothing to ask.
        pid: of its main process, if that is one of this machine's.
    """

    name: str
    health_url: str | None
    pid: Callable[[], int | None]
    trouble: str = ""
    _since: float = 0.0
    _heard: bool = field(default=False, repr=False)

    def look(self, client: httpx.Client) -> None:
        """Say what has changed since the last look: that it is stopped or silent, or that it goes on."""
        found = self._stopped() or self._silent(client)
        if found and not self.trouble:
            self._since = time.monotonic()
            logger.warning("%s %s", self.name, found)
        elif self.trouble and not found:
            logger.warning("%s has resumed after %.0f s", self.name, time.monotonic() - self._since)
        self.trouble = found

    def _stopped(self) -> str:
        """Say which of its processes a signal has stopped, and how it goes on."""
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
        """Say that it accepts connections and does not answer; a lost request reports one that is gone."""
        if self.health_url is None:
            return ""
        before = paused_s()
        try:
            client.get(self.health_url)
        except httpx.TimeoutException:
            return f"has not answered for {SILENCE_S:g} s" if self._heard and paused_s() == before else ""
        except (httpx.HTTPError, OSError):
            return self.trouble
        self._heard = True
        return ""


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


@dataclass(slots=True)
class TransferPulse:
    """Watch over a transfer of weights that takes much longer than those before it, as its engine does not go on."""

    _longest_s: float = 0.0
    _under_way: Deadline | None = None
    _seconds: float = 0.0
    _told: bool = False

    def look(self) -> None:
        """Say once that the transfer is late, and that it goes on or has ended."""
        found = next((one.deadline for one in waits_now() if one.deadline.name.startswith(TRANSFER)), None)
        if found is not self._under_way:
            if self._told:
                logger.warning("the transfer has ended, after %.0f s", self._seconds)
            self._longest_s = max(self._longest_s, self._seconds)
            self._under_way, self._seconds, self._told = found, 0.0, False
        if found is None:
            return
        self._seconds = found.counted_s()
        usual_s = 2 * self._longest_s + LATE_S if self._longest_s else FIRST_TRANSFER_S
        if self._seconds > usual_s and not self._told:
            self._told = True
            logger.warning(
                "%s has taken %.0f s, and the longest before it %.1f s; see the engine's log (logs/engine.log)",
                found.name,
                self._seconds,
                self._longest_s,
            )


def server_pulse(url: str) -> Pulse:
    """Return the pulse of an inference server; its session names the process if it runs on this machine."""

    def pid() -> int | None:
        try:
            session = read_session(url)
        except LachesisError:  # what is wrong with the file is told by whoever needs the session
            return None
        return None if session is None else session.pid

    return Pulse(f"the engine at {url}", f"{url}/health", pid)


@contextmanager
def pulses_felt(find: Callable[[], Sequence[Pulse]], *, every_s: float = LOOK_S) -> Iterator[None]:
    """Check each pulse from a thread of its own every ``every_s`` seconds while the block runs.

    Args:
        find: what there is now; what is equal by name is the same.
    """
    ended = threading.Event()
    threads: dict[str, threading.Thread] = {}

    def feel(pulse: Pulse) -> None:
        with httpx.Client(trust_env=False, timeout=SILENCE_S) as client:
            while not ended.wait(every_s) and pulse.name in found_now:
                pulse.look(client)

    def watch() -> None:
        while True:
            transfer.look()
            pulses = {pulse.name: pulse for pulse in find()}
            found_now.clear()
            found_now.update(pulses)
            for name, pulse in pulses.items():
                if name not in threads or not threads[name].is_alive():
                    threads[name] = threading.Thread(target=feel, args=(pulse,), name="lachesis-pulse", daemon=True)
                    threads[name].start()
            if ended.wait(every_s):
                return

    found_now: dict[str, Pulse] = {}
    transfer = TransferPulse()
    watcher = threading.Thread(target=watch, name="lachesis-pulses", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(SILENCE_S + 1.0)
