"""The lock on the embedded engine's model: generation yields to others between two tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.engines.base import PauseMode


class EnginePaused(EngineError):
    """The error for a call to a paused engine; the call can be repeated after ``resume``."""


class TokenGate:
    """A lock on the model: one call generates at a time, and yields between two tokens.

    It yields to guests, and waits there while paused with ``keep``. This class holds whether the engine is paused,
    asleep or closed.

    Attributes:
        changed: the condition to hold while changing this state together with other state; notified of every change.
        mode: how the engine is paused; ``None`` if it is not.
        asleep: True while running calls are held because the model is away, whatever ``mode`` is.
        closed: True once the engine is closed.
    """

    def __init__(self) -> None:
        # Reentrant, so that a signal handler that pauses or closes does not deadlock with the call it interrupted.
        self._model = threading.RLock()
        self.changed = threading.Condition(threading.RLock())
        self.mode: PauseMode | None = None
        self.asleep = self.closed = False
        # Running calls; how many of them are held between tokens; guests that want the model.
        self._calls = self._waiting = self._guests = 0
        self._caller: int | None = None

    @property
    def paused(self) -> bool:
        """Return True if new calls are refused."""
        return self.mode is not None or self.asleep

    @property
    def aborting(self) -> bool:
        """Return True if running calls must end at their next token."""
        return self.mode == "abort"

    def check_open(self) -> None:
        """Raise EngineError once the engine is closed."""
        if self.closed:
            raise EngineError("the embedded engine is closed", remedy="create a new engine")

    @contextmanager
    def generating(self, deadline: Deadline) -> Iterator[None]:
        """Wait until no other call generates, then hold the right to generate.

        Raises:
            EnginePaused: paused.
            EngineError: closed.
            DeadlineExceeded: another call did not end in time.
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
                        "the embedded engine is paused, so it generates nothing",
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
        """Yield to others between two tokens, and return when generation may continue.

        Called by the generating thread.

        Args:
            deadline: the deadline of the call, which includes time spent waiting here.
            mode: the contexts that generation needs; they are exited while waiting.
            enter: returns a context that enters them again.

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
                    # Atomic with the test, so that a pause that arrives now waits for the next token.
                    self._waiting -= 1
            finally:
                self._model.acquire()
                self._caller = threading.get_ident()
            deadline.check("generation was paused or had to wait for another user of the model")
            mode.enter_context(enter())
        if self.closed:
            raise EngineError("the embedded engine was closed during generation", remedy="close it after generating")

    @contextmanager
    def guest(self) -> Iterator[None]:
        """Hold the model exclusively, between two tokens of a running call; works while paused."""
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
        """Refuse new calls from now on, and hold or end running calls at their next token."""
        with self.changed:
            self.mode = mode
            self.changed.notify_all()

    def wait_for_pause(self, mode: PauseMode) -> None:
        """Wait until running calls are held (``keep``) or have ended (``drain``, ``abort``), or were resumed."""
        self._wait_for_rest(lambda: self.mode == mode)

    def resume(self) -> None:
        """Admit calls again and continue held ones; if the engine sleeps, only after it wakes up."""
        with self.changed:
            self.mode = None
            self.changed.notify_all()

    def sleep(self) -> None:
        """Refuse new calls, and wait until running ones are held."""
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
        """End running calls with an error, and wait until they have released the model. Idempotent."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        with self._model:
            pass

    def _wait_for_rest(self, wanted: Callable[[], bool]) -> None:
        """Wait until no call computes any more, or ``wanted`` returns False."""
        with self.changed:
            # A signal handler in the generating thread cannot wait for it.
            if self._caller != threading.get_ident():
                self.changed.wait_for(
                    lambda: self.closed or not wanted() or self._calls == (self._waiting if self._held() else 0)
                )

    def _held(self) -> bool:
        """Return True if running calls wait at their next token.

        Aborted calls do not wait, because they no longer need the model.
        """
        return self.mode == "keep" or (self.asleep and not self.aborting)

    def _must_wait(self) -> bool:
        return not self.closed and (self._guests > 0 or self._held())
