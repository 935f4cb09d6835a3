"""Machines of E2B's, by a stand-in that runs what it is given and refuses what E2B's documentation says it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lachesis.plugins.sandbox.choice import open_sandbox
from lachesis.plugins.sandbox.e2b import E2bSandbox
from lachesis.plugins.sandbox.records import FunctionTests, Limits, Outcome, Program, SandboxError

KEY = "e2b_key"


class Machines(ThreadingHTTPServer):
    """``too_fast`` of the requests that come next are one too many; ``silent``: cells are run and nothing is said.

    ``forged``: what a program has printed in place of its cell.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.made: list[dict[str, Any]] = []
        self.alive: set[str] = set()
        self.too_fast = 0
        self.silent = False
        self.forged = ""


class Answers(BaseHTTPRequestHandler):
    server: Machines

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/execute":
            self._execute(body)
        elif self._allowed():
            self._make(body)

    def do_DELETE(self) -> None:
        name = self.path.removeprefix("/sandboxes/")
        if self._allowed():
            known = name in self.server.alive
            self.server.alive.discard(name)
            self._say(204 if known else 404)

    def _allowed(self) -> bool:
        if self.server.too_fast:
            self.server.too_fast -= 1
            self._say(429, {"code": 429, "message": "rate limit exceeded"})
        elif self.headers["X-API-Key"] != KEY:
            self._say(401, {"code": 401, "message": "Invalid API key"})
        else:
            return True
        return False

    def _make(self, body: dict[str, Any]) -> None:
        if body["templateID"] != "code-interpreter-v1":
            self._say(404, {"code": 404, "message": f"template '{body['templateID']}' not found"})
            return
        self.server.made.append(body)
        name = f"sbx{len(self.server.made)}"
        self.server.alive.add(name)
        self._say(201, {"sandboxID": name, "templateID": body["templateID"], "envdAccessToken": f"token of {name}"})

    def _execute(self, body: dict[str, Any]) -> None:
        name = self.headers["E2b-Sandbox-Id"]
        if name not in self.server.alive or self.headers["E2b-Sandbox-Port"] != "49999":
            self._say(502, {"message": "The sandbox was not found"})
        elif self.headers["X-Access-Token"] != f"token of {name}" or self.headers["X-API-Key"]:
            self._say(401, {"message": "unauthorized"})
        elif self.server.silent:
            self._lines({"type": "error", "name": "MemoryError", "value": "no more", "traceback": ""})
        elif self.server.forged:
            self._lines({"type": "stdout", "text": self.server.forged})
        else:
            ran = subprocess.run([sys.executable, "-c", body["code"]], capture_output=True, text=True, check=True)
            half = len(ran.stdout) // 2  # as it comes: in pieces
            self._lines(*({"type": "stdout", "text": part} for part in (ran.stdout[:half], ran.stdout[half:])))

    def _lines(self, *messages: dict[str, Any]) -> None:
        end = {"type": "end_of_execution"}
        self._say(200, b"".join(json.dumps(message).encode() + b"\n" for message in (*messages, end)))

    def _say(self, status: int, body: dict[str, Any] | bytes = b"") -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Machines]:
    with Machines() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        assert not server.alive, "machines go with their programs"
        server.shutdown()


def sandbox(server: Machines, *, key: str = KEY, template: str = "code-interpreter-v1") -> E2bSandbox:
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {"E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
    return E2bSandbox(template, environment=environment, sleep=lambda seconds: None)


def run(where: E2bSandbox, source: str, stdin: bytes = b"", **limits: Any) -> Outcome:
    files = {"data/x.txt": b"here"}
    return where.run(Program(source=source, stdin=stdin, files=files, limits=Limits(**({"wall_s": 20.0} | limits))))


def test_a_program_has_its_input_and_its_files_and_a_machine_without_network(server: Machines):
    source = "import sys\nprint(input().upper(), open('data/x.txt').read())\nprint('no', file=sys.stderr)\nsys.exit(3)"
    outcome = run(sandbox(server), source, b"abc\n")
    assert (outcome.ending, outcome.exit_code, outcome.succeeded) == ("exited", 3, False)
    assert (outcome.stdout, outcome.stderr) == (b"ABC here\n", b"no\n")
    (made,) = server.made
    assert (made["allow_internet_access"], made["timeout"]) == (False, 50)


def test_each_input_has_a_process_of_its_own_until_one_takes_too_long(server: Machines):
    program = Program(source="import time\ntime.sleep(float(input()))\nprint(1)", limits=Limits(wall_s=0.5))
    outcomes = sandbox(server).run_each(program, [b"0", b"60", b"0"])
    assert [outcome.ending for outcome in outcomes] == ["exited", "wall"]
    assert len(server.made) == 1


def test_its_limits(server: Machines):
    assert run(sandbox(server), "print('x' * 1000)", output_bytes=10).ending == "output"
    assert b"MemoryError" in run(sandbox(server), "bytearray(1 << 30)", memory_bytes=1 << 26).stderr


def test_what_it_refuses_is_said_with_what_to_do(server: Machines):
    with pytest.raises(SandboxError, match=r"401: .*Invalid API key") as caught:
        run(sandbox(server, key="other"), "")
    assert "E2B_API_KEY" in str(caught.value.remedy)
    with pytest.raises(SandboxError, match=r"404: .*template 'mine' not found"):
        run(sandbox(server, template="mine"), "")


def test_requests_that_come_too_fast_are_made_again(server: Machines):
    server.too_fast = 5
    assert run(sandbox(server), "print(1)").stdout == b"1\n"
    server.too_fast = 6
    with pytest.raises(SandboxError, match=r"429: .*rate limit exceeded"):
        run(sandbox(server), "")


def test_a_machine_that_says_nothing_is_no_fault_of_the_code(server: Machines):
    server.silent = True
    with pytest.raises(SandboxError, match="did not report a program's result: MemoryError: no more"):
        run(sandbox(server), "")


@pytest.mark.parametrize(
    "said",
    ["[" * 200_000, "[1, 2", "7", "[]", '[false, 0, "a", "b"]', "[false, 0, 1, 2]"],
    ids=["deep", "cut off", "a number", "nothing", "no base64", "no texts"],
)
def test_an_outcome_that_the_program_has_forged_is_none(server: Machines, said: str):
    server.forged = f"lachesis-outcome:{said}"
    with pytest.raises(SandboxError, match="reports something other than the result of a program"):
        run(sandbox(server), "")


def test_a_server_that_is_not_there():
    nowhere = {"E2B_API_KEY": KEY, "E2B_API_URL": "http://127.0.0.1:9"}
    with pytest.raises(SandboxError, match="gives no answer"):
        run(E2bSandbox(environment=nowhere), "")


def test_it_is_named_in_the_configuration(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(SandboxError, match="there is no key of E2B in E2B_API_KEY"):
        open_sandbox("e2b")
    monkeypatch.setenv("E2B_API_KEY", KEY)
    assert str(open_sandbox("e2b:mine").wall) == "remote (mine at https://api.e2b.app)"


def test_tests_of_functions_are_refused(server: Machines):
    with pytest.raises(SandboxError, match="nothing there keeps the test from the code"):
        sandbox(server).test(FunctionTests("", ("assert True",)))
