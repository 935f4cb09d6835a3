"""Calls that may hang, on a daemon thread that is abandoned once nothing waits for it.

Python cannot kill a thread; a daemon never keeps the interpreter alive.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError

T = TypeVar("T")

# Seconds that the interpreter's end waits for calls on separate threads.
_AT_EXIT_S = 5.0
_aside: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

Watch = Callable[[], None]
"""Function called during a wait; it raises if waiting has become useless."""


def call_watched(call: Callable[[], T], *, watch: Watch, every_s: float = 0.2) -> T:
    """Return or raise the outcome of ``call`` on a separate thread, and call ``watch`` every ``every_s`` until then.

    If ``watch`` raises, that is raised at once and the call is abandoned.
    """
    outcome = begin(call, name="lachesis-watched-call")
    while not wait([outcome], timeout=every_s).done:
        watch()
    return outcome.result()


def begin(call: Callable[[], T], *, name: str) -> Future[T]:
    """Call on a separate thread, and return the future of its outcome."""
    worker = DaemonThread(name)
    outcome = worker.submit(call, {})
    worker.abandon()
    return outcome


def call_aside(call: Callable[[], object], *, name: str) -> None:
    """Call on a separate thread that only the interpreter waits for at its end, for some seconds.

    It is for calls that may take long in C++, such as the end of a process group: before Python 3.14, a thread that
    returns from there into an ending interpreter aborts the process.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    _aside.add(thread)
    thread.start()


@atexit.register
def _wait_for_calls_aside() -> None:
    deadline = Deadline("the end of calls aside", _AT_EXIT_S)
    for thread in list(_aside):
        thread.join(deadline.remaining_s())


class CallOutcome(NamedTuple):
    """Outcome of a call: a result, the exception it raised, or neither within the deadline."""

    result: Any = None
    error: BaseException | None = None
    hung: bool = False


class CallThread:
    """Thread that runs calls one at a time, and is replaced only after a call that hung."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._worker: DaemonThread | None = None

    def close(self) -> None:
        """End the thread unless it runs a call that was given up; a later call starts a new one. Idempotent."""
        if not self._lock.acquire(blocking=False):
            return
        if self._worker:
            self._worker.abandon()
        self._worker = None
        self._lock.release()

    def call(self, function: Callable[..., Any], kwargs: Mapping[str, Any], *, timeout_s: float | None) -> CallOutcome:
        """Call ``function(**kwargs)``, and await the result if it is awaitable.

        Its exception, ``SystemExit`` included, comes back in the outcome.
        """
        with self._lock:
            worker, self._worker = self._worker or DaemonThread(self._name), None
            outcome = CallOutcome(hung=True)
            try:
                outcome = _outcome(worker.submit(function, kwargs), timeout_s)
            finally:  # an interrupt leaves the call running, like a hang
                if outcome.hung:
                    worker.abandon()
                else:
                    self._worker = worker
            return outcome


def _outcome(future: Future[Any], timeout_s: float | None) -> CallOutcome:
    try:
        error = future.exception(timeout_s)
    except TimeoutError:  # an error of the wait; the function's own is returned as a value
        return CallOutcome(hung=True)
    return CallOutcome(result=future.result()) if error is None else CallOutcome(error=error)


class Caller:
    """Caller of functions one at a time on one event loop, which awaits awaitable results."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None

    def call(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of ``function(**kwargs)``. For one thread at a time.

        A process that the function forks and that returns or raises too ends here: two would answer one call.
        """
        caller = os.getpid()
        try:
            result = function(**kwargs)
        finally:
            if os.getpid() != caller:
                code = getattr(sys.exception(), "code", sys.exception() is not None) or 0
                os._exit(code if isinstance(code, int) else 1)
        if type(result) is str:  # of most tools: to ask whether one can be awaited takes as long as a quick call
            return result
        return self._runner.run(self._wait(result)) if inspect.isawaitable(result) else result

    def cancel(self) -> None:
        """Cancel the coroutine that is awaited, if any; called from another thread."""
        if task := self._task:
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _wait(self, awaitable: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        return await awaitable

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()


# A function, and its keywords.
_Call: TypeAlias = tuple[Callable[..., Any], Mapping[str, Any]]


class Line:
    """Calls that a thread makes one after the other, unless they are withdrawn.

    A future for each would take longer than a quick tool.

    Args:
        ended: called on the thread after the last call.

    Attributes:
        outcomes: those of the calls that have returned.
    """

    def __init__(self, calls: Sequence[_Call], ended: Callable[[], None]) -> None:
        self.outcomes: list[CallOutcome] = []
        self._calls = list(calls)
        self._ended = ended
        self._changing = threading.Lock()
        self._begun, self._end = 0, len(calls)

    def cut(self) -> int:
        """Withdraw the calls that have not begun, and return the number of those that had."""
        with self._changing:
            self._end = self._begun
            return self._end

    def run(self, caller: Caller) -> None:
        """Make the calls, on the thread."""
        for function, kwargs in self._calls:
            with self._changing:
                if self._begun == self._end:
                    break
                self._begun += 1
            try:
                outcome = CallOutcome(result=caller.call(function, kwargs))
            except BaseException as error:
                outcome = CallOutcome(error=error)
            self.outcomes.append(outcome)
        self._ended()


class DaemonThread:
    """Daemon thread that calls functions, coroutine functions too, in the order of their submission."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[Caller], None] | None] = SimpleQueue()
        self._caller = Caller()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Call ``function(**kwargs)`` once it is its turn."""
        future: Future[Any] = Future()

        def resolve(caller: Caller) -> None:
            if not future.set_running_or_notify_cancel():  # given up before its turn
                return
            try:
                future.set_result(caller.call(function, kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(resolve)
        return future

    def submit_all(self, calls: Sequence[_Call], ended: Callable[[], None]) -> Line:
        """Make these calls once it is their turn, and then call ``ended``."""
        line = Line(calls, ended)
        self._work.put(line.run)
        return line

    def abandon(self) -> None:
        """Cancel a coroutine that hangs, and end the thread when its call returns, if it ever does."""
        self._caller.cancel()
        self._work.put(None)

    def _serve(self) -> None:
        with closing(self._caller):
            while (work := self._work.get()) is not None:
                work(self._caller)


def settle(future: asyncio.Future[T], result: T) -> None:
    """Give a future its result, unless it has one or was cancelled. Called on its loop."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Give a future its error, unless it has a result or was cancelled. Called on its loop."""
    if not future.done():
        future.set_exception(error)


def loop_event() -> tuple[asyncio.Event, Callable[[], None]]:
    """Return an event of the running loop, and a function that sets it from any thread."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def happen() -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits any longer
            loop.call_soon_threadsafe(event.set)

    return event, happen


class LoopThread:
    """Event loop in a daemon thread, started at its first use.

    Args:
        what: its owner, for the error of a call after the end.
    """

    def __init__(self, name: str, *, what: str) -> None:
        self._name = name
        self._what = what
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``work``, which is cancelled with the future."""
        with self._lock:
            if self._closed:
                work.close()
                raise EngineError(f"{self._what} is closed", remedy="make a new one")
            return asyncio.run_coroutine_threadsafe(work, self._started())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, which is cancelled if the wait for it is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``last`` and stop the thread. Idempotent."""
        with self._lock:
            self._closed = True
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(last(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop to its end.

        A library that calls ``sys.exit`` ends only its own call.
        """
        while True:
            with suppress(SystemExit):
                loop.run_forever()
                return
