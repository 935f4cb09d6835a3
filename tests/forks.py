"""``-p tests.forks --forks 2``: processes that share the files out, forked once all are imported and collected.

Tests with the mark ``together(name)`` count as a file of that name, wherever they are.

Importing what the tests import takes as long as a fifth of the tests, and pytest-xdist did it in each of its workers.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from _pytest.config import create_terminal_writer

from tests import forkserver

_NUMBER_BYTES = 4
# Taken first, for none of them is to be begun when the others end: with few tests they take long, compiling or waiting.
_LONG = ("test_broadcast", "test_router_replay", "test_attention", "test_engine", "test_channel")
_codes: list[int] = []
_FORK = get_context("fork")
Files = Sequence[Sequence[pytest.Item]]


def _end() -> None:
    """Python takes seconds to take down what all tests import; whatever else waits for the end comes before."""
    if _codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_codes[-1])


if __name__ in sys.argv:  # not where the tests of this file run sessions in a session
    atexit.register(_end)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="How many processes share the files.")
    parser.addoption("--forks-in-order", action="store_true", help="Deal the files out in the order of collection.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Literal[True] | None:
    count = session.config.getoption("--forks")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    files = _files(session.items)
    if not session.config.option.forks_in_order:
        files.sort(key=_place)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # theirs too, and removed by this one
    numbers = _queue(len(files))
    children = [_Child(session, files, numbers) for _ in range(count)]
    os.close(numbers)
    try:
        _listen(session, children)
    except BaseException:
        for child in children:
            child.process.terminate()
        raise
    finally:
        for child in children:
            child.process.join()
    return True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _codes.append(int(exitstatus))


def _files(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("together")
        found.setdefault(mark.args[0] if mark else item.nodeid.partition("::")[0], []).append(item)
    return [*found.values()]


def _place(items: Sequence[pytest.Item]) -> tuple[bool, int]:
    return items[0].path.stem not in _LONG, -len(items)


def _queue(count: int) -> int:
    """The end of a pipe out of which each process reads the number of the file that is its next."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(count)))
    os.close(writing)
    return reading


class _Child:
    """A process that runs tests, as this one sees it."""

    def __init__(self, session: pytest.Session, files: Files, numbers: int) -> None:
        self.reports, theirs = _FORK.Pipe(duplex=False)
        self.running: tuple[str, Any] | None = None
        self.process: ForkProcess = _FORK.Process(target=_run_files, args=(session, files, numbers, theirs))
        self.process.start()
        theirs.close()

    def died(self) -> pytest.TestReport:
        """Of the test in the middle of which it did."""
        assert self.running is not None
        self.process.join()
        said = f"its process ended with code {self.process.exitcode}: what comes after it in the file is not run"
        return pytest.TestReport(*self.running, {}, "failed", said, "call")


def _listen(session: pytest.Session, children: Sequence[_Child]) -> None:
    """What the processes report is reported here, until all have ended or a failure is the last that is wanted."""
    hook = session.config.hook
    talking = {child.reports: child for child in children}
    while talking:
        for reports in connection.wait(list(talking)):
            child = talking[reports]  # type: ignore[index]
            try:
                told = child.reports.recv()
            except EOFError:
                del talking[child.reports]
                if child.running:
                    hook.pytest_runtest_logreport(report=child.died())
                continue
            for name, values in told:
                _report(session, child, name, values)


def _report(session: pytest.Session, child: _Child, name: str, values: dict[str, Any]) -> None:
    hook = session.config.hook
    if name == "pytest_warning_recorded":
        hook.pytest_warning_recorded.call_historic(kwargs=values)
        return
    if name == "pytest_runtest_logreport":
        values = {"report": hook.pytest_report_from_serializable(config=session.config, data=values)}
    else:
        child.running = (values["nodeid"], values["location"]) if name == "pytest_runtest_logstart" else None
    getattr(hook, name)(**values)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


class _Told:
    """What pytest would print here goes to the process that prints.

    A message a test, of how the one before it ended and that it starts; what failed is told at once.
    """

    def __init__(self, config: pytest.Config, reports: Connection) -> None:
        self._config, self._reports = config, reports
        self._untold: list[tuple[str, dict[str, Any]]] = []

    def tell(self) -> None:
        self._reports.send(self._untold)
        self._untold = []

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._untold.append(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))
        self.tell()

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._untold.append(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._untold.append(("pytest_runtest_logreport", data))
        if report.failed:
            self.tell()

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        text = UserWarning(f"{warning_message.category.__name__}: {warning_message.message}")
        told = warnings.WarningMessage(text, UserWarning, warning_message.filename, warning_message.lineno)
        values = {"warning_message": told, "when": when, "nodeid": nodeid, "location": location}
        self._untold.append(("pytest_warning_recorded", values))


def _run_files(session: pytest.Session, files: Files, numbers: int, reports: Connection) -> None:
    """In the new process: run file after file. Fixtures of the session stay till the last one's end."""
    forkserver.take_over()
    plugins, config = session.config.pluginmanager, session.config
    plugins.unregister(name="terminalreporter")
    # Where the limit of a test's time writes what all threads were at: to the output that is captured.
    # pytest-rerunfailures counts in its statistics.
    stacks = SimpleNamespace(_tw=create_terminal_writer(config, sys.__stderr__), stats={})
    plugins.register(stacks, "terminalreporter")
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # into a file that the processes would share
    capture.start_global_capturing()
    capture.suspend_global_capture()
    told = _Told(config, reports)
    plugins.register(told)
    items = itertools.chain.from_iterable(files[number] for number in _numbers(numbers))
    for item, following in itertools.pairwise(itertools.chain(items, [None])):
        assert item is not None
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    told.tell()
    reports.close()
    os._exit(0)  # not waiting for threads that tests have left behind in a wait of half a minute


def _numbers(queue: int) -> Iterator[int]:
    while number := os.read(queue, _NUMBER_BYTES):
        yield int.from_bytes(number)
