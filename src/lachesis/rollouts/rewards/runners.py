"""Runners of reward functions: on a thread of this process, or in the main threads of worker processes."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from lachesis.common.deadline import Deadline, waits_writers
from lachesis.common.errors import RewardError
from lachesis.process.threads import Caller, CallOutcome, CallThread, begin
from lachesis.process.watchdog import Watchdog
from lachesis.process.workers import WorkerError, WorkerPool
from lachesis.rollouts.rewards.functions import (
    Answer,
    RewardCall,
    RewardFailure,
    Signature,
    answer_of,
    hung,
    signature_of,
)
from lachesis.rollouts.rewards.loading import ImportPath, load_named

logger = logging.getLogger(__name__)

# Seconds that an idle process has to end by itself and close the files and connections of its functions.
_GRACE_S = 2.0
_DEATH_REMEDY = "find out why it ended its process (out of memory, a crash in native code, os._exit)"


class RewardRunner(Protocol):
    """Runner of one function; up to ``width`` calls of it at a time."""

    @property
    def width(self) -> int: ...

    @property
    def signature(self) -> Signature: ...

    def run(self, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        """Return an answer for each of at most ``width`` calls, which run at once and have ``timeout_s`` each."""
        ...


class ThreadRunner:
    """Runner of a function on a thread of this process, which ``watchdog`` ends if the function blocks Python."""

    width = 1

    def __init__(self, function: Callable[..., Any], thread: CallThread, watchdog: Watchdog) -> None:
        self.signature = signature_of(function)
        self._function = function
        self._thread = thread
        self._watchdog = watchdog

    def run(self, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        words = (
            f"reward function {getattr(self._function, '__name__', 'of a class')!r} holds Python's interpreter "
            f"lock and did not return within {timeout_s:g} s -> avoid regular expressions that backtrack and endless "
            "loops, or leave out rewards.num_workers and name it by its file, so that it runs in a separate process"
        )

        def invoke(arguments: Mapping[str, Any]) -> CallOutcome:
            for write in tuple(waits_writers):
                write()
            with self._watchdog.guard(timeout_s, words):
                return self._thread.call(self._function, arguments, timeout_s=timeout_s)

        return [answer_of(self._function, call, invoke, timeout_s=timeout_s) for call in calls]


class RewardWorkers:
    """A pool of ``count`` processes with the same functions; calls run in main threads, where ``signal.alarm`` works.

    The processes import their functions while this one continues: reading a signature, or calling a function,
    waits for them, and raises the error if one cannot be imported.

    Args:
        functions: by their names; only the processes import them.
        start_s: limit of starting the processes, imports included, in seconds.
        one_thread: as of :class:`~lachesis.process.workers.ChildProcess`.
    """

    def __init__(
        self, functions: Sequence[ImportPath], *, count: int, start_s: float = 120.0, one_thread: bool = True
    ) -> None:
        self.count = count
        self._functions = tuple(functions)
        self._start_s = start_s
        self._one_thread = one_thread
        self._starting = begin(self._started, name="lachesis-reward-workers")

    @property
    def pool(self) -> WorkerPool:
        """Return the pool of the processes, once they are ready.

        Raises:
            ConfigError: a function cannot be imported.
            RewardError: a process ended before it was ready.
            DeadlineExceeded: the imports take too long.
        """
        with Deadline("the imports of reward functions", self._start_s).waiting():
            return self._starting.result()

    def wait(self, within_s: float) -> bool:
        """Wait at most ``within_s`` seconds; return True if they are ready. Raises as :attr:`pool`."""
        ready = bool(futures.wait([self._starting], timeout=within_s).done)
        if ready:
            self._starting.result()
        return ready

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """Return the signatures of the functions. Waits and raises as :attr:`pool`."""
        return self.pool.initialized

    def _started(self) -> WorkerPool:
        with _start_errors():
            return WorkerPool(
                self.count,
                _signatures,
                self._functions,
                name="reward workers",
                start_s=self._start_s,
                grace_s=_GRACE_S,
                one_thread=self._one_thread,
            )

    def run(self, index: int, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        """Return an answer for each call of function ``index``; the calls, at most ``count``, run at once.

        A process whose call takes longer than ``timeout_s`` is killed, and another one takes its place before
        the next call.
        """
        with _start_errors():
            results = self.pool.run(
                _call_imported, [(self._functions[index], call) for call in calls], timeout_s=timeout_s
            )
        return [
            Answer(failure=_failure(result, timeout_s)) if isinstance(result, WorkerError) else result
            for result in results
        ]

    def close(self) -> None:
        """End all processes; a later call starts new ones. Idempotent."""
        self._starting.add_done_callback(_close_started)  # called at once if they have started


def _close_started(starting: Future[WorkerPool]) -> None:
    if starting.exception() is None:
        starting.result().close()


class WorkerRunner:
    """Runner of one of the functions of the workers.

    Args:
        here: makes a runner in this process, which takes over at the first call whose values cannot be sent to or
            from another process; without it such a call fails.
    """

    def __init__(self, workers: RewardWorkers, index: int, here: Callable[[], RewardRunner] | None = None) -> None:
        self.width = workers.count
        self._workers = workers
        self._index = index
        self._here = here
        self._moved: RewardRunner | None = None

    @property
    def signature(self) -> Signature:
        return self._workers.signatures[self._index]

    def run(self, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        if self._moved is None:
            answers = self._workers.run(self._index, calls, timeout_s=timeout_s)
            stuck = next((one.failure for one in answers if one.failure and one.failure.between_processes), None)
            if stuck is None or self._here is None:
                return answers
            logger.warning("a reward function %s: from now on it runs on a thread of this process", stuck.what)
            self._moved = self._here()
        return [answer for call in calls for answer in self._moved.run([call], timeout_s=timeout_s)]


def _failure(error: WorkerError, timeout_s: float) -> RewardFailure:
    if error.reason == "timeout":
        return hung(timeout_s)
    if error.reason == "died":
        return RewardFailure(error.message, _DEATH_REMEDY, costly=True, traceable=True)
    if error.reason == "arguments":
        return RewardFailure(
            f"has arguments that cannot be sent to another process ({error.message})",
            "keep plain values in the columns, or set rewards.num_workers to 0",
            between_processes=True,
        )
    return RewardFailure(
        f"logged a value that cannot be sent from its process ({error.message})",
        "log plain values: numbers, texts, lists",
        between_processes=True,
    )


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        what = f"a reward worker {error.message} while it imported the functions"
        raise RewardError(what, remedy=_DEATH_REMEDY) from error


@cache
def _load(path: ImportPath) -> Callable[..., Any]:
    return load_named(path)


# One caller for all calls of a worker process.
_caller = cache(Caller)


def _signatures(paths: Sequence[ImportPath]) -> tuple[Signature, ...]:
    """Import the functions in a worker process, and return their signatures."""
    return tuple(signature_of(_load(path)) for path in paths)


def _call_imported(path: ImportPath, call: RewardCall) -> Answer:
    """Call a function in a worker process. Its exception becomes text: its type may be unknown elsewhere."""
    function = _load(path)

    def invoke(arguments: Mapping[str, Any]) -> CallOutcome:
        try:
            return CallOutcome(result=_caller().call(function, arguments))
        except BaseException as error:
            return CallOutcome(error=error)

    answer = answer_of(function, call, invoke)
    if answer.failure is None or (cause := answer.failure.cause) is None:
        return answer
    return replace(
        answer, failure=replace(answer.failure, cause=RaisedThere("".join(traceback.format_exception(cause))))
    )


class RaisedThere(Exception):
    """Exception of a function in another process: its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
