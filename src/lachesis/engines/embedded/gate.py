"""Who may use the embedded engine's model, and when: generation makes room for others between two tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.engines.base import PauseMode


class EnginePaused(EngineError):
    """A call was refused because the engine is paused; it can be made again after ``resume``."""


class TokenGate:
    """One call generates at a time. Between two tokens it gives way to guests, and while paused by ``keep``.

    ``calls`` is how many calls have begun and not ended, ``waiting`` how many of them are held between tokens.
    """

    def __init__(self) -> None:
        # Reentrant, so that a signal handler that pauses or closes does not wait for the call it interrupted.
        self._model = threading.RLock()
        self._state = threading.Condition(threading.RLock())
        self._mode: PauseMode | None = None
        self._closed = False
        self._guests = self._calls = self._waiting = 0
        self._caller: int | None = None

    @property
    def paused(self) -> bool:
        """Whether new calls are refused."""
        return self._mode is not None

    @property
    def aborting(self) -> bool:
        """Whether a running call is to end at its next token."""
        return self._mode == "abort"

    def check_open(self) -> None:
        """Raise EngineError once the engine is closed."""
        if self._closed:
            raise EngineError("the embedded engine is closed", remedy="make a new engine")

    @contextmanager
    def generating(self, deadline: Deadline) -> Iterator[None]:
        """The right to generate, once no other call does.

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
            with self._state:
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
                with self._state:
                    self._caller = None
                    self._calls -= 1
                    self._state.notify_all()
        finally:
            self._model.release()

    def between_tokens(
        self, deadline: Deadline, *, mode: ExitStack, enter: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Called by the generating thread where the model is at rest: give way, and return when it may go on.

        Args:
            deadline: of the call; time spent waiting here counts.
            mode: the contexts that generation needs, which are left while waiting.
            enter: enters them again.

        Raises:
            EngineError: closed meanwhile.
            DeadlineExceeded: the deadline passed meanwhile.
        """
        while not self._closed and (self._guests or self._mode == "keep"):
            mode.close()
            with self._state:
                self._waiting += 1
                self._state.notify_all()
            self._model.release()
            try:
                with self._state:
                    self._state.wait_for(self._may_go_on, timeout=deadline.remaining_s())
                    # In one go with the test, so that a pause that comes now waits for the next token.
                    self._waiting -= 1
            finally:
                self._model.acquire()
                self._caller = threading.get_ident()
            deadline.check("generation was paused or had to make room")
            mode.enter_context(enter())
        if self._closed:
            raise EngineError("the embedded engine was closed while it generated", remedy="close it after generating")

    @contextmanager
    def guest(self) -> Iterator[None]:
        """The model to oneself between two tokens of whatever is being generated; also while paused."""
        with self._state:
            self._guests += 1
        try:
            with self._model:
                self.check_open()
                yield
        finally:
            with self._state:
                self._guests -= 1
                self._state.notify_all()

    def begin_pause(self, mode: PauseMode) -> None:
        """Refuse new calls from now on, and have running ones held or ended at their next token."""
        with self._state:
            self._mode = mode
            self._state.notify_all()

    def wait_for_pause(self, mode: PauseMode) -> None:
        """Return when running calls are held (``keep``) or have ended (``drain``, ``abort``), or were resumed."""
        with self._state:
            # A signal handler in the generating thread cannot wait for it.
            if self._caller != threading.get_ident():
                self._state.wait_for(lambda: self._at_rest(mode))

    def resume(self) -> None:
        """Admit calls again; those that were held go on."""
        with self._state:
            self._mode = None
            self._state.notify_all()

    def close(self) -> None:
        """End running calls with an error, and return when they have left the model alone. Idempotent."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        with self._model:
            pass

    def _may_go_on(self) -> bool:
        return self._closed or not (self._guests or self._mode == "keep")

    def _at_rest(self, mode: PauseMode) -> bool:
        if self._closed or self._mode != mode:
            return True
        return self._calls == (self._waiting if mode == "keep" else 0)
