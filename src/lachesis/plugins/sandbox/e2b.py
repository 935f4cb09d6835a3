"""Remote sandbox, by E2B's HTTP API or a compatible one: a virtual machine for each program.

A machine is made (``POST /sandboxes``), told to run a cell (``POST /execute`` of its code interpreter), and deleted.
The cell is ours: it starts the program as a separate process, with its input, and prints the result.
"""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from lachesis.common.json_values import read_json
from lachesis.plugins.sandbox.records import FunctionTests, Limits, Outcome, Program, SandboxError, Verdict, Wall

KEY_VARIABLE = "E2B_API_KEY"
TEMPLATE = "code-interpreter-v1"
_INTERPRETER_PORT = 49999
_DOMAIN = "e2b.app"
_TOKENS = {"envdAccessToken": "X-Access-Token", "trafficAccessToken": "E2B-Traffic-Access-Token"}
_GRACE_S = 30.0
_CONTROL_S = 60.0
# Pauses before a request that was one too many is made again.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_MARK = "lachesis-outcome:"
_CELL = """
import base64, json, os, resource, signal, subprocess, sys, tempfile
job = json.loads({job!r})
with tempfile.TemporaryDirectory() as directory:
    files = dict(job["files"])
    if job["source"] is not None:
        files["main.py"] = job["source"]
    for name, content in files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    def limit():
        for kind, value in ((resource.RLIMIT_AS, job["memory"]), (resource.RLIMIT_CPU, job["cpu"]),
                            (resource.RLIMIT_FSIZE, job["scratch"])):
            resource.setrlimit(kind, (value, value))
    with open(os.path.join(directory, ".stdout"), "w+b") as out, open(os.path.join(directory, ".stderr"), "w+b") as err:
        process = subprocess.Popen(job["argv"] or [sys.executable, "-I", "main.py"], cwd=directory, stdout=out,
            stderr=err, stdin=subprocess.PIPE, start_new_session=True, preexec_fn=limit)
        late = False
        try:
            process.communicate(base64.b64decode(job["stdin"]), timeout=job["wall"])
        except subprocess.TimeoutExpired:
            late = True
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = process.wait()
        found = []
        for stream in (out, err):
            stream.seek(0)
            found.append(base64.b64encode(stream.read(job["output"] + 1)).decode())
print({mark!r} + json.dumps([late, code, *found]))
"""


@dataclass(frozen=True, slots=True)
class _Machine:
    url: str
    headers: Mapping[str, str]


class E2bSandbox:
    """Runs programs with their input, each in its own machine without a network, which is deleted afterwards.

    The memory limit is one of address space, for each process. Tests of functions are refused, as by any server that
    only returns what a program printed.

    Args:
        template: of the machines; one with E2B's code interpreter.
        environment: ``E2B_API_KEY``, and for a self-hosted server ``E2B_DOMAIN``, or its URLs (``E2B_API_URL``,
            ``E2B_SANDBOX_URL``).
        sleep: waits the given seconds.

    Raises:
        SandboxError: there is no key.
    """

    def __init__(
        self,
        template: str = TEMPLATE,
        *,
        environment: Mapping[str, str] = os.environ,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        key = environment.get(KEY_VARIABLE)
        if not key:
            raise SandboxError(f"there is no key of E2B in {KEY_VARIABLE}", remedy=f"set {KEY_VARIABLE}")
        self._domain = environment.get("E2B_DOMAIN") or _DOMAIN
        self._api = (environment.get("E2B_API_URL") or f"https://api.{self._domain}").rstrip("/")
        self._machines = environment.get("E2B_SANDBOX_URL")
        self._headers = {"X-API-Key": key, "Content-Type": "application/json"}
        self._template = template
        self._sleep = sleep
        self.wall = Wall("remote", (f"{template} at {self._api}",))

    def run(self, program: Program) -> Outcome:
        """Run a program to its end. Raises SandboxError where the server does not say what came of it."""
        return self.run_each(program, [program.stdin])[0]

    def run_each(self, program: Program, inputs: Sequence[bytes]) -> list[Outcome]:
        """Run a program with one input after the other, until one takes too long. Raises as :meth:`run`."""
        outcomes: list[Outcome] = []
        with self._machine(life_s=len(inputs) * (program.limits.wall_s + _GRACE_S)) as machine:
            for stdin in inputs:
                if outcomes and outcomes[-1].ending == "wall":
                    break
                outcomes.append(self._execute(machine, program, stdin))
        return outcomes

    def test(self, tests: FunctionTests) -> list[Verdict]:
        """Raises SandboxError: what such a machine prints, the code could print as well."""
        raise SandboxError(
            "a remote sandbox cannot run tests of functions: nothing there keeps the test from the code",
            remedy="set rewards.sandbox to auto, or give tests as input and output",
        )

    def close(self) -> None:
        """Do nothing: each machine is deleted with its program."""

    @contextmanager
    def _machine(self, *, life_s: float) -> Iterator[_Machine]:
        """Make a machine for the context, which also ends by itself after ``life_s`` seconds if nobody deletes it."""
        asked = {"templateID": self._template, "timeout": round(life_s), "allow_internet_access": False, "secure": True}
        said = self._request("POST", f"{self._api}/sandboxes", asked, self._headers, _CONTROL_S)
        try:
            answer = read_json(said)
            name = str(answer["sandboxID"])
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"{self._api} made a machine without a sandboxID", remedy="see its log") from error
        domain = answer.get("domain") or self._domain
        headers = {"E2b-Sandbox-Id": name, "E2b-Sandbox-Port": str(_INTERPRETER_PORT)} | self._headers
        headers.pop("X-API-Key")
        for field, header in _TOKENS.items():
            if answer.get(field):
                headers[header] = answer[field]
        try:
            yield _Machine(self._machines or f"https://{_INTERPRETER_PORT}-{name}.{domain}", headers)
        finally:
            self._request("DELETE", f"{self._api}/sandboxes/{name}", None, self._headers, _CONTROL_S, gone_is_well=True)

    def _execute(self, machine: _Machine, program: Program, stdin: bytes) -> Outcome:
        started = time.monotonic()
        cell = {"code": _CELL.format(job=json.dumps(_job(program, stdin)), mark=_MARK), "language": "python"}
        url, limit_s = f"{machine.url}/execute", program.limits.wall_s + _GRACE_S
        lines = self._request("POST", url, cell, machine.headers, limit_s).splitlines()
        try:
            messages = [read_json(line) for line in lines if line]
        except ValueError as error:
            raise SandboxError(f"{url} answers no lines of JSON: {error}", remedy="see its log") from error
        printed = "".join(str(one.get("text", "")) for one in messages if one.get("type") == "stdout")
        if _MARK not in printed:
            why = next((f"{one.get('name')}: {one.get('value')}" for one in messages if one.get("type") == "error"), "")
            raise SandboxError(f"{machine.url} did not report a program's result: {why[:200]}", remedy="see its log")
        seconds = time.monotonic() - started
        try:
            return _outcome(*read_json(printed.rpartition(_MARK)[2]), limits=program.limits, seconds=seconds)
        except (ValueError, TypeError) as error:  # the program has found where the cell prints
            raise SandboxError(
                f"{machine.url} reports something other than the result of a program: {error}",
                remedy="check the program",
            ) from error

    def _request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        timeout_s: float,
        *,
        gone_is_well: bool = False,
    ) -> bytes:
        """Send a request and return the body of the answer; retries after a pause if requests come too fast."""
        data = None if body is None else json.dumps(body).encode()
        for pause_s in (*_PAUSES_S, None):
            request = urllib.request.Request(url, data, dict(headers), method=method)
            try:
                with urllib.request.urlopen(request, timeout=timeout_s) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                if gone_is_well and error.code == 404:
                    return b""
                if error.code != 429 or pause_s is None:
                    _refused(error, url, self._template)
                self._sleep(pause_s)
            except (OSError, ValueError) as error:
                raise SandboxError(f"{url} gives no answer ({error})", remedy="see whether it is up") from error
        raise AssertionError("unreachable")


def _refused(error: urllib.error.HTTPError, url: str, template: str) -> NoReturn:
    said = error.read(500).decode("utf-8", "replace")
    remedy = {
        401: f"correct {KEY_VARIABLE}",
        404: f"see whether there is a template {template!r} (rewards.sandbox: e2b:TEMPLATE)",
        429: "run fewer programs at once, or ask for a higher limit",
    }.get(error.code, "see the server's log")
    raise SandboxError(f"{url} answers {error.code}: {said}", remedy=remedy) from error


def _job(program: Program, stdin: bytes) -> dict[str, Any]:
    limits = program.limits
    return {
        "source": None if program.source is None else base64.b64encode(program.source.encode()).decode(),
        "argv": list(program.argv),
        "stdin": base64.b64encode(stdin).decode(),
        "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        "memory": limits.memory_bytes + (256 << 20),  # the interpreter's own
        "cpu": max(1, round(limits.cpu_s + 0.5)),
        "scratch": limits.scratch_bytes,
        "wall": limits.wall_s,
        "output": limits.output_bytes,
    }


def _outcome(late: bool, code: int, stdout: str, stderr: str, *, limits: Limits, seconds: float) -> Outcome:
    out, err = (base64.b64decode(text) for text in (stdout, stderr))
    too_much = max(len(out), len(err)) > limits.output_bytes
    ending = "wall" if late else "output" if too_much else "exited"
    return Outcome(ending, code, out[: limits.output_bytes], err[: limits.output_bytes], seconds)
