"""Where a reward function runs: on a thread of this process, or in the main threads of worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from lachesis.common.errors import RewardError
from lachesis.process.threads import Caller, CallOutcome, CallThread
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

_DEATH_REMEDY = "find out why it ends its process (memory, a crash in native code, os._exit)"


class RewardRunner(Protocol):
    """Runs one function; up to ``width`` calls of it at a time."""

    @property
    def width(self) -> int: ...

    @property
    def signature(self) -> Signature: ...

    def run(self, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        """An answer for each of at most ``width`` calls, which run at once and have ``timeout_s`` each."""
        ...


class ThreadRunner:
    """Runs a function on a thread of this process."""

    width = 1

    def __init__(self, function: Callable[..., Any], thread: CallThread) -> None:
        self.signature = signature_of(function)
        self._function = function
        self._thread = thread

    def run(self, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        def invoke(arguments: Mapping[str, Any]) -> CallOutcome:
            return self._thread.call(self._function, arguments, timeout_s=timeout_s)

        return [answer_of(self._function, call, invoke, timeout_s=timeout_s) for call in calls]


class RewardWorkers:
    """``count`` processes that all have the same functions, each call in a main thread, where ``signal.alarm`` works.

    Args:
        functions: by their names; only the processes import them.
        start_s: limit of starting the processes, imports included, in seconds.

    Raises:
        ConfigError: a function cannot be imported.
        RewardError: a process ended before it was ready.
        DeadlineExceeded: the imports take too long.
    """

    def __init__(self, functions: Sequence[ImportPath], *, count: int, start_s: float = 120.0) -> None:
        self.count = count
        self._functions = tuple(functions)
        with _start_errors():
            self.pool = WorkerPool(count, _signatures, self._functions, name="reward workers", start_s=start_s)
        self.signatures: tuple[Signature, ...] = self.pool.initialized

    def run(self, index: int, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        """An answer for each call of function ``index``; the calls, at most ``count``, run at once.

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
        self.pool.close()


class WorkerRunner:
    """Runs one of the functions of the workers."""

    def __init__(self, workers: RewardWorkers, index: int) -> None:
        self.width = workers.count
        self.signature = workers.signatures[index]
        self._workers = workers
        self._index = index

    def run(self, calls: Sequence[RewardCall], *, timeout_s: float) -> list[Answer]:
        return self._workers.run(self._index, calls, timeout_s=timeout_s)


def _failure(error: WorkerError, timeout_s: float) -> RewardFailure:
    if error.reason == "timeout":
        return hung(timeout_s)
    if error.reason == "died":
        return RewardFailure(error.message, _DEATH_REMEDY, costly=True, traceable=True)
    if error.reason == "arguments":
        return RewardFailure(
            f"cannot be given its arguments in another process ({error.message})",
            "keep plain values in the columns, or set rewards.num_workers to 0",
        )
    return RewardFailure(
        f"logged something that cannot leave its process ({error.message})", "log plain values: numbers, texts, lists"
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


# One for all calls of a worker process.
_caller = cache(Caller)


def _signatures(paths: Sequence[ImportPath]) -> tuple[Signature, ...]:
    """In a worker process: import the functions."""
    return tuple(signature_of(_load(path)) for path in paths)


def _call_imported(path: ImportPath, call: RewardCall) -> Answer:
    """In a worker process: call a function. Its exception stays here, as the type may not be known elsewhere."""
    function = _load(path)

    def invoke(arguments: Mapping[str, Any]) -> CallOutcome:
        try:
            return CallOutcome(result=_caller().call(function, arguments))
        except BaseException as error:
            return CallOutcome(error=error)

    answer = answer_of(function, call, invoke)
    return replace(answer, failure=answer.failure and replace(answer.failure, cause=None))
