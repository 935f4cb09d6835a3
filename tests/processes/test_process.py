"""Real processes: servers of a few lines that are started, watched, killed, and never left behind."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError
from lachesis.process.managed import (
    ManagedProcess,
    check_port_free,
    last_lines,
    launch_together,
    remedy_of,
    wait_together,
    who_listens,
)
from tests.paths import SOURCE
from tests.ports import free_port
from tests.waiting import LONG_S, LateDeadline

# Answers every GET with 200, and has a child of its own, as an engine has workers. Of the pids the log tells.
SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print("pids", os.getpid(), child.pid, os.environ.get("MARK"), os.environ.get("GONE"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/exit":
            print("ValueError: the cause", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
# Has a server, says so, and waits for the end of its input; a forked child may keep all its files open.
PARENT = """
import os, sys, time
from pathlib import Path
from lachesis.common.deadline import Deadline
from lachesis.process.managed import ManagedProcess
program, port, url, log, *more = sys.argv[1:]
command, log = [sys.executable, "-m", program, port], Path(log)
process = ManagedProcess(command, url=url, log_path=log, grace_s=2)
process.start(deadline=Deadline("start", 60))
if more and os.fork() == 0:
    time.sleep(600)
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


def soon(seconds: float = LONG_S) -> Deadline:
    return Deadline("the server's start", seconds, "deadlines.engine_start_s")


class Server:
    """A ManagedProcess over a small server, and what it did."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "logs" / "engine.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.deaths: queue.Queue[EngineError] = queue.Queue()
        self.programs = directory / "programs"
        self.programs.mkdir(parents=True)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [self.programs, SOURCE]))}
        self.process = self.running(SERVER)

    def program(self, code: str) -> str:
        """The name of a module with that code."""
        name = f"program_{zlib.crc32(code.encode())}"
        (self.programs / f"{name}.py").write_text(code)
        return name

    def command(self, code: str) -> list[str]:
        return [sys.executable, "-m", self.program(code), str(self.port)]

    def running(self, code: str, **settings: Any) -> ManagedProcess:
        own = {"PYTHONPATH": self.environment["PYTHONPATH"]}
        self.process = ManagedProcess(
            self.command(code),
            url=self.url,
            log_path=self.log,
            env=own | settings.pop("env", {}),
            **{"grace_s": LONG_S, "on_death": self.deaths.put, **settings},
        )
        return self.process

    def start(self) -> list[int]:
        """The pids of the server and of its child."""
        self.process.start(deadline=soon())
        return self.pids()

    def pids(self) -> list[int]:
        lines = [line.split() for line in self.log.read_text().splitlines() if line.startswith("pids")]
        return [int(word) for word in lines[-1][1:3]]

    def close(self) -> None:
        self.process.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def gone(pids: list[int], *, timeout: float = LONG_S) -> bool:
    """Whether all end soon. A zombie has ended, unless it is ours to wait for."""
    until = time.monotonic() + timeout
    while any(map(runs, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.ppid() == os.getpid()
    except psutil.NoSuchProcess:
        return False


def test_it_starts_serves_and_stops_with_its_group(server: Server):
    before = psutil.Process().children()
    pids = server.start()
    assert server.process.pid == pids[0] == os.getpgid(pids[0]) == os.getpgid(pids[1]) != os.getpgid(0)
    assert os.getsid(pids[0]) != os.getsid(0)
    server.process.check()
    server.process.stop()
    server.process.stop()
    assert gone(pids) and server.process.pid is None
    assert psutil.Process().children() == before, "a zombie is left"
    assert server.deaths.empty(), "a stop is no death"
    with pytest.raises(EngineError, match="was stopped"):
        server.process.check()
    check_port_free(server.url)


def test_what_comes_after_another_starts_once_that_one_serves(server: Server, tmp_path: Path):
    first, other = server.process, Server(tmp_path / "second")
    second = other.running(SERVER, after=first)
    try:
        launch_together([first, second])
        assert second.pid is None
        wait_together([first, second], deadline=soon())
        assert first.pid is not None and second.pid is not None
        begun = [psutil.Process(process.pid).create_time() for process in (first, second)]
        assert begun[1] > begun[0]
    finally:
        second.stop()


def test_its_environment(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GONE", "here")
    server.running(SERVER, env={"MARK": "yes", "GONE": None})
    server.start()
    assert server.log.read_text().splitlines()[-1].split()[3:] == ["yes", "None"]


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_its_death_is_noticed_at_once(server: Server, number: int, cause: str):
    pids = server.start()
    os.kill(pids[0], number)
    error = server.deaths.get(timeout=LONG_S)
    assert cause in error.message and str(server.log) in error.message
    assert gone(pids), "its children are ended with it"
    with pytest.raises(EngineError, match=cause):
        server.process.check()
    server.process.stop()


def test_the_error_has_the_end_of_the_log(server: Server):
    server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /exit HTTP/1.0\r\n\r\n")
        error = server.deaths.get(timeout=LONG_S)
    assert "exit code 3" in error.message and "| ValueError: the cause" in error.message
    assert error.remedy


def test_dying_while_it_starts_is_an_error_not_a_timeout(server: Server):
    server.running("print('CUDA out of memory'); raise SystemExit(4)")
    with pytest.raises(EngineError, match=r"exit code 4(.|\n)*CUDA out of memory") as caught:
        server.process.start(deadline=soon())
    assert "gpu-memory-utilization" in caught.value.remedy


def test_a_start_that_takes_too_long_is_stopped(server: Server):
    server.running("import time; print('loading', flush=True); time.sleep(600)")
    said = lambda: server.log.exists() and "loading" in server.log.read_text()  # noqa: E731
    deadline = LateDeadline("the server's start", 0.1, "deadlines.engine_start_s", begun=said)
    with pytest.raises(DeadlineExceeded, match=r"the server's start(.|\n)*/health(.|\n)*loading") as caught:
        server.process.start(deadline=deadline)
    assert "deadlines.engine_start_s" in caught.value.remedy
    assert server.process.pid is None
    assert server.deaths.empty()


def test_what_ignores_sigterm_is_killed(server: Server):
    server.running(STUBBORN, grace_s=0.2)
    pids = server.start()
    server.process.stop()
    assert gone(pids)


def test_restart_with_another_command(server: Server):
    first = server.start()
    server.process.stop()
    server.process.command = tuple(server.command(f"print('second', flush=True)\n{SERVER}"))
    server.process.start(deadline=soon())
    assert gone(first) and server.process.pid not in (None, first[0])
    life = server.process._life
    assert life is not None
    assert last_lines(server.log, start=life.log_start)[0] == "second", "the log of the start before is not this one's"
    assert server.deaths.empty()


def test_it_can_be_restarted_from_the_callback(server: Server):
    """Which runs in the thread that watches."""
    started: queue.Queue[int | None] = queue.Queue()

    def restart(error: EngineError) -> None:
        server.process.stop()
        server.process.start(deadline=soon())
        started.put(server.process.pid)

    server.running(SERVER, on_death=restart)
    first = server.start()[0]
    os.kill(first, signal.SIGKILL)
    assert started.get(timeout=LONG_S) not in (None, first)
    server.process.check()


def test_a_taken_port_is_noticed_before_the_start(server: Server):
    with socket.create_server(("127.0.0.1", server.port)), pytest.raises(EngineError) as caught:
        server.process.start(deadline=soon())
    assert f"port {server.port}" in caught.value.message and f"pid {os.getpid()}" in caught.value.message
    assert not server.log.exists(), "nothing was started"


def test_nobody_to_be_found_on_a_port():
    assert who_listens(1) == "a process of another user"


def test_an_address_that_is_not_known():
    with pytest.raises(ConfigError, match="not known"):
        check_port_free("http://no-such-host.invalid:9001")
    check_port_free("http://192.0.2.1:9001")


@pytest.mark.parametrize("command", [["no-such-program"], ["/no/such/program"], ["/"]])
def test_a_command_that_cannot_be_run(tmp_path: Path, command: list[str]):
    process = ManagedProcess(command, url=f"http://127.0.0.1:{free_port()}", log_path=tmp_path / "log")
    with pytest.raises(EngineError, match="the command"):
        process.start(deadline=soon())


def test_a_program_that_the_system_refuses(tmp_path: Path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    process = ManagedProcess([str(program)], url=f"http://127.0.0.1:{free_port()}", log_path=tmp_path / "log")
    with pytest.raises(EngineError, match="cannot be run"):
        process.start(deadline=soon())
    assert process.pid is None


def test_starting_twice_is_refused(server: Server):
    server.start()
    with pytest.raises(EngineError, match="runs already"):
        server.process.launch()


def test_a_log_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    process = ManagedProcess([sys.executable], url="http://127.0.0.1:1", log_path=tmp_path / "file" / "log")
    with pytest.raises(EngineError, match="the log"):
        process.launch()


def supervisor_of(pids: Sequence[int]) -> psutil.Process:
    supervisor = psutil.Process(pids[0]).parent()
    assert supervisor is not None and supervisor.pid != os.getpid()
    return supervisor


def test_a_killed_supervisor_leaves_nothing_behind(server: Server):
    pids = server.start()
    supervisor_of(pids).kill()
    assert "lost its supervisor" in server.deaths.get(timeout=LONG_S).message
    # By then all have ended, so that another may take the port.
    assert not any(map(runs, pids))
    check_port_free(server.url)


def test_where_nobody_else_is_left_a_server_ends_with_its_supervisor(server: Server):
    """As where both are killed at once: nobody closes the socket for it, or reads it."""
    pids = server.start()
    supervisor = supervisor_of(pids)
    server.process._life._kill = lambda: None  # type: ignore[union-attr, method-assign]
    supervisor.kill()
    assert gone(pids[:1])
    os.kill(pids[1], signal.SIGKILL)


def parent_of(server: Server, *arguments: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-c", PARENT, server.program(SERVER), str(server.port), server.url, str(server.log),
        *arguments,
    ]  # fmt: skip
    return subprocess.Popen(command, env=server.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_parent_killed_with_a_forked_child_leaves_nothing_behind(server: Server):
    with parent_of(server, "fork") as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        pids, supervisor = server.pids(), supervisor_of(server.pids())
        own = {supervisor.pid, supervisor.ppid(), *pids}
        (child,) = [child for child in psutil.Process(parent.pid).children() if child.pid not in own]
        assert not gone(pids, timeout=0)
        parent.kill()
        parent.wait()
    try:
        assert gone([*pids, *own])
    finally:
        child.kill()


@pytest.mark.parametrize("ending", ["end of input", "SIGTERM"])
def test_the_end_of_a_program_ends_its_servers(server: Server, ending: str):
    with parent_of(server) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        if ending == "SIGTERM":
            parent.terminate()
    assert parent.returncode == (-signal.SIGTERM if ending == "SIGTERM" else 0)
    assert gone(server.pids())


class TestLogs:
    def test_causes_come_before_the_end(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("before\nKeyError: the cause\n" + "".join(f"line {i}\n" for i in range(40)))
        lines = last_lines(path)
        assert (lines[0], lines[1], lines[-1]) == ("KeyError: the cause", "line 28", "line 39")
        assert last_lines(path, start=path.stat().st_size) == []

    def test_colours_and_progress_bars(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_bytes(b"\x1b[31mred\x1b[0m\n 10%\r 50%\r100% \xff\n\n")
        assert last_lines(path) == ["red", "100% �"]

    def test_no_log(self, tmp_path: Path):
        with pytest.raises(EngineError, match="cannot be read"):
            last_lines(tmp_path / "none")

    def test_advice(self):
        advice: Callable[..., str] = remedy_of
        assert "--gpu-memory" in advice(["torch.OutOfMemoryError: CUDA out of memory."], killed=False)
        assert "ran out of memory" in advice(["x"], killed=True)
        assert advice(["x"], killed=False) == ""
