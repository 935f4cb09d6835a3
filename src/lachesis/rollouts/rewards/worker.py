"""The process that reward functions run in, each call in its main thread, where ``signal.alarm`` works.

It speaks over a pipe of its own: what functions print goes to the standard error of the run. It ends when the
other end of the pipe is closed, in the middle of a call too.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lachesis.common.errors import LachesisError
from lachesis.common.imports import load_function
from lachesis.rollouts.rewards.runners import Answer, Call, Failure, Signature, answer_of, raised, signature_of
from lachesis.rollouts.rewards.state import CallLog


@dataclass(frozen=True, slots=True)
class ImportPath:
    """A function by its name, which only the process that it runs in imports."""

    spec: str
    base_dir: Path


@dataclass(frozen=True, slots=True)
class Load:
    """Import these functions."""

    functions: tuple[ImportPath, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the functions take; or why one of them cannot be imported."""

    signatures: tuple[Signature, ...] = ()
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """Call the function of this index among those loaded."""

    index: int
    call: Call


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A request that came, and cannot be read here."""

    failure: Failure


def unsendable_arguments(error: Exception) -> Failure:
    """Arguments of a call cannot be given to another process: they cannot be pickled, or not be read there."""
    what = f"cannot be given its arguments in another process ({error})"
    return Failure(what, "keep plain values in the columns, or set rewards.num_workers to 0")


def unsendable_logs(error: Exception) -> Failure:
    """The same of what a call logged."""
    return Failure(
        f"logged something that cannot leave its process ({error})", "log plain values: numbers, texts, lists"
    )


def serve(descriptor: int) -> None:
    """Answer requests that come over the pipe, one after the other."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    requests: SimpleQueue[Load | Work | Unreadable] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    functions: list[Callable[..., Any]] = []
    with asyncio.Runner() as runner:
        while True:
            request = requests.get()
            if isinstance(request, Load):
                functions, loaded = _load(request)
                connection.send(loaded)
            elif isinstance(request, Unreadable):
                _reply(connection, Answer(failure=request.failure))
            else:
                _reply(connection, _answer(functions[request.index], request.call, runner))


def _receive(connection: Connection, requests: SimpleQueue[Load | Work | Unreadable]) -> None:
    while True:
        try:
            content = connection.recv_bytes()
        except (EOFError, OSError):  # the trainer closed the pipe or died: nobody waits for an answer
            os.killpg(0, signal.SIGKILL)
            return
        try:
            requests.put(pickle.loads(content))
        except Exception as error:  # reading a column runs code of its type, whose module may not be here
            requests.put(Unreadable(unsendable_arguments(error)))


def _load(request: Load) -> tuple[list[Callable[..., Any]], Loaded]:
    try:
        functions = [load_function(path.spec, path.base_dir) for path in request.functions]
    except LachesisError as error:
        return [], Loaded(problem=error.message, remedy=error.remedy)
    return functions, Loaded(tuple(signature_of(function) for function in functions))


def _answer(function: Callable[..., Any], call: Call, runner: asyncio.Runner) -> Answer:
    """What came of the call, as plain data: results and exceptions of the user's types may not travel."""
    log = CallLog(call.count)
    try:
        result = function(**call.arguments, **log.arguments(call.logs))
        if inspect.isawaitable(result):
            result = runner.run(_wait(result))
    except BaseException as error:
        return Answer(failure=replace(raised(function, error), cause=None))
    return answer_of(result, call.count, log.logged())


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _reply(connection: Connection, answer: Answer) -> None:
    try:
        connection.send(answer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        connection.send(Answer(failure=unsendable_logs(error)))
