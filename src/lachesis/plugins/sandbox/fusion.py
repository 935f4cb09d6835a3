"""A sandbox elsewhere, by SandboxFusion's HTTP API (``POST /run_code``)."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lachesis.common.json_values import read_json
from lachesis.plugins.sandbox.records import FunctionTests, Outcome, Program, SandboxError, Verdict, Wall

_GRACE_S = 30.0
_REMEDY = "see whether the sandbox's server is up, and its log"


class FusionSandbox:
    """Runs programs with their input on a server of SandboxFusion's, whose limits are the server's own.

    Tests of functions need a process that is asked again and again, which that API does not have: they are refused.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.wall = Wall("remote", (self._url,))

    def run(self, program: Program) -> Outcome:
        """Run a program to its end. Raises SandboxError where the server does not say what came of it."""
        if program.source is None:
            raise SandboxError("a remote sandbox runs Python sources, not command lines", remedy="give it a source")
        started = time.monotonic()
        answer = self._post(
            {
                "code": program.source,
                "language": "python",
                "stdin": program.stdin.decode("utf-8", "replace"),
                "run_timeout": program.limits.wall_s,
                "memory_limit_MB": program.limits.memory_bytes >> 20,
                "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
            },
            timeout_s=program.limits.wall_s + _GRACE_S,
        )
        result = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            raise SandboxError(f"{self._url} failed: {str(answer.get('message'))[:200]}", remedy=_REMEDY)
        limit = program.limits.output_bytes
        stdout, stderr = (str(result.get(name) or "").encode() for name in ("stdout", "stderr"))
        late = result.get("status") == "TimeLimitExceeded"
        code = result.get("return_code")
        return Outcome(
            ending="wall" if late else "output" if max(len(stdout), len(stderr)) > limit else "exited",
            exit_code=code if isinstance(code, int) else -9,
            stdout=stdout[:limit],
            stderr=stderr[:limit],
            seconds=time.monotonic() - started,
        )

    def run_each(self, program: Program, inputs: Sequence[bytes]) -> list[Outcome]:
        """Run a program with one input after the other, until one takes too long. Raises as :meth:`run`."""
        outcomes: list[Outcome] = []
        for stdin in inputs:
            if outcomes and outcomes[-1].ending == "wall":
                break
            outcomes.append(self.run(replace(program, stdin=stdin)))
        return outcomes

    def test(self, tests: FunctionTests) -> list[Verdict]:
        """Raises SandboxError: what such a server prints, the code could print as well."""
        raise SandboxError(
            "a remote sandbox cannot run tests of functions: nothing there keeps the test from the code",
            remedy="set rewards.sandbox to auto, or give tests as input and output",
        )

    def close(self) -> None:
        """Do nothing: the server keeps no state of ours."""

    def _post(self, body: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        request = urllib.request.Request(
            f"{self._url}/run_code", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer = read_json(response.read())
        except (OSError, ValueError) as error:
            raise SandboxError(f"{self._url} gives no answer ({error})", remedy=_REMEDY) from error
        if not isinstance(answer, dict):
            raise SandboxError(f"{self._url} answers with something else", remedy=_REMEDY)
        return answer
