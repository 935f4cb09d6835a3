"""Gate to the embedded engine's model: generation makes room for others between two tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.engines.base import PauseMode


class EnginePaused(EngineError):
    """Refusal of a call because the engine is paused; it can be made again after ``resume``."""


class TokenGate:
    """Lock around the model: one call generates at a time, and gives way between two tokens.

    It gives way to guests, and waits there while paused with ``keep``. Only this class knows whether the engine is
    paused, asleep or closed.

    Attributes:
        changed: held to change this state together with other state, and notified of every change.
        mode: how the engine is paused; ``None`` if it is not.
        asleep: True while running calls are held because the model is away, whatever ``mode`` is.
        closed: True once the engine is closed.
    """

    def __init__(self) -> None:
        # Reentrant, so that a signal handler that pauses or closes does not wait for the call it interrupted.
        self._model = threading.RLock()
        self.changed = threading.Condition(threading.RLock())
        self.mode: PauseMode | None = None
        self.asleep = self.closed = False
        # Calls that have begun and not ended; how many of them are held between tokens; who wants the model.
        self._calls = self._waiting = self._guests = 0
        self._caller: int | None = None

    @property
    def paused(self) -> bool:
        """Return True if new calls are refused."""
        return self.mode is not None or self.asleep

    @property
    def aborting(self) -> bool:
        """Return True if a running call is to end at its next token."""
        return self.mode == "abort"

    def check_open(self) -> None:
        """Raise EngineError once the engine is closed."""
        if self.closed:
            raise EngineError("the embedded engine is closed", remedy="make a new engine")

    @contextmanager
    def generating(self, deadline: Deadline) -> Iterator[None]:
        """Hold the right to generate, once no other call does.

        Raises:
            EnginePaused: paused.
            EngineError: closed.
            DeadlineExceeded: another call went on for too long.
        """
        remaining = deadline.remaining_s()
        if not self._model.acquire(timeout=-1 if remaining is None else remaining):
            deadline.check("another call is still generating")
            raise EngineError("another call is still generating", remedy="wait for it, or raise the deadline")
        try:
            with self.changed:
                self.check_open()
                if self.paused:
                    raise EnginePaused(
                        "the embedded engine is paused and generates nothing",
                        remedy="resume it after the weights have changed",
                    )
                self._calls += 1
            try:
                self._caller = threading.get_ident()
                yield
            finally:
                with self.changed:
                    self._caller = None
                    self._calls -= 1
                    self.changed.notify_all()
        finally:
            self._model.release()

    def between_tokens(
        self, deadline: Deadline, *, mode: ExitStack, enter: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Give way to others between two tokens, and return when generation may continue.

        Called by the generating thread.

        Args:
            deadline: of the call; time spent waiting here counts.
            mode: contexts that generation needs, which are left while waiting.
            enter: enters them again.

        Raises:
            EngineError: closed meanwhile.
            DeadlineExceeded: the deadline passed meanwhile.
        """
        while self._must_wait():
            mode.close()
            with self.changed:
                self._waiting += 1
                self.changed.notify_all()
            self._model.release()
            try:
                with self.changed:
                    self.changed.wait_for(lambda: not self._must_wait(), timeout=deadline.remaining_s())
                    # In one go with the test, so that a pause that comes now waits for the next token.
                    self._waiting -= 1
            finally:
                self._model.acquire()
                self._caller = threading.get_ident()
            deadline.check("generation was paused or had to make room")
            mode.enter_context(enter())
        if self.closed:
            raise EngineError("the embedded engine was closed while it generated", remedy="close it after generating")

    @contextmanager
    def guest(self) -> Iterator[None]:
        """Hold the model alone between two tokens of whatever is being generated; also while paused."""
        with self.changed:
            self._guests += 1
        try:
            with self._model:
                self.check_open()
                yield
        finally:
            with self.changed:
                self._guests -= 1
                self.changed.notify_all()

    def begin_pause(self, mode: PauseMode) -> None:
        """Refuse new calls from now on, and have running ones held or ended at their next token."""
        with self.changed:
            self.mode = mode
            self.changed.notify_all()

    def wait_for_pause(self, mode: PauseMode) -> None:
        """Return when running calls are held (``keep``) or have ended (``drain``, ``abort``), or were resumed."""
        self._wait_for_rest(lambda: self.mode == mode)

    def resume(self) -> None:
        """Admit calls again and continue those that were held; if the engine sleeps, once it is awake."""
        with self.changed:
            self.mode = None
            self.changed.notify_all()

    def sleep(self) -> None:
        """Refuse new calls, and return when running ones are held."""
        with self.changed:
            self.asleep = True
            self.changed.notify_all()
        self._wait_for_rest(lambda: self.asleep)

    def wake(self) -> None:
        """Undo :meth:`sleep`; paused calls stay paused."""
        with self.changed:
            self.asleep = False
            self.changed.notify_all()

    def close(self) -> None:
        """End running calls with an error, and return when they have left the model alone. Idempotent."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        with self._model:
            pass

    def _wait_for_rest(self, wanted: Callable[[], bool]) -> None:
        """Return when no call computes any more, or ``wanted`` no longer holds."""
        with self.changed:
            # A signal handler in the generating thread cannot wait for it.
            if self._caller != threading.get_ident():
                self.changed.wait_for(
                    lambda: self.closed or not wanted() or self._calls == (self._waiting if self._held() else 0)
                )

    def _held(self) -> bool:
        """Return True if running calls wait at their next token.

        Calls that are being aborted do not wait, since they need no model.
        """
        return self.mode == "keep" or (self.asleep and not self.aborting)

    def _must_wait(self) -> bool:
        return not self.closed and (self._guests > 0 or self._held())
