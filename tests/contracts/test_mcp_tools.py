"""Tools of a real MCP server, over standard streams and over HTTP: calls, errors, limits, and a server that dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.schema import McpServerConfig
from lachesis.process.threads import LoopThread
from lachesis.rollouts.tools import Toolbox, load_tools, tool_schemas
from lachesis.rollouts.tools.parsers import ToolCall
from lachesis.rollouts.tools.toolbox import Observation
from tests.ports import free_port
from tests.waiting import until

PROGRAM = str(Path(__file__).with_name("mcp_program.py"))


class Live:
    """A toolbox over a server that may be started again."""

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.restart()
        url = "" if port is None else f"http://127.0.0.1:{port}/mcp"
        command = [] if url else [sys.executable, PROGRAM]
        self.address = McpServerConfig(command=command, url=url, env={"GIVEN": "yes"} if command else {})
        self.toolbox = Toolbox(load_tools([self.address]), timeout_s=20.0)
        self.loop = LoopThread("test-tools", what="the test's tools")

    def call(self, *calls: ToolCall, toolbox: Toolbox | None = None) -> list[Observation]:
        return self.loop.run((toolbox or self.toolbox).call_all(calls))

    def restart(self) -> None:
        """What the user does for a server of his own."""
        if self._port is None:
            return
        self.end()
        self._process = subprocess.Popen([sys.executable, PROGRAM, str(self._port)])
        until(self._answers, "the MCP server did not begin")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/", trust_env=False).status_code > 0
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module", params=["stdio", "http"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    made = Live(free_port() if request.param == "http" else None)
    yield made
    made.loop.close(made.toolbox.stop)
    made.end()


def texts(live: Live, *calls: ToolCall) -> list[tuple[str, bool]]:
    return [(one.text, one.failed) for one in live.call(*calls)]


def test_templates_are_told_what_the_server_says(live: Live):
    schemas = {schema["function"]["name"]: schema for schema in live.toolbox.schemas}
    assert {"double", "sleep", "refuse"} <= schemas.keys()
    assert schemas["double"]["type"] == "function"
    assert schemas["double"]["function"]["description"] == "Twice a number."
    assert schemas["double"]["function"]["parameters"]["properties"]["x"]["type"] == "integer"
    assert tool_schemas([live.address]) == live.toolbox.schemas


def test_calls_are_answered_in_their_order_and_at_the_same_time(live: Live):
    started = time.monotonic()
    found = texts(live, *[ToolCall("sleep", {"seconds": 1})] * 8, ToolCall("double", {"x": 4}))
    assert found == [*[("slept", False)] * 8, ("8", False)]
    assert time.monotonic() - started < 6


def test_what_it_cannot_do_is_told_to_the_model(live: Live):
    refused, wrong, right = texts(
        live, ToolCall("refuse", {"why": "late"}), ToolCall("double", {"x": "four"}), ToolCall("double", {"x": 1})
    )
    assert refused == ("error: Error executing tool refuse: no: late", True)
    assert wrong[0].startswith("error: ") and wrong[1]
    assert right == ("2", False)


def test_a_call_ends_at_its_limit_and_the_server_stays(live: Live):
    toolbox = Toolbox(live.toolbox.tools, timeout_s=0.5)
    begun = live.toolbox.tools[0].server.starts  # type: ignore[union-attr]
    (late,) = live.call(ToolCall("sleep", {"seconds": 30}), toolbox=toolbox)
    assert (late.text, late.failed, late.lost) == ("error: the call took longer than 0.5 s", True, False)
    assert texts(live, ToolCall("double", {"x": 2})) == [("4", False)]
    assert live.toolbox.tools[0].server.starts == begun  # type: ignore[union-attr]


def test_a_server_that_dies_fails_what_was_under_way_and_is_there_again(live: Live):
    assert texts(live, ToolCall("count"))[0][0] >= "1"
    slow, deadly = live.call(ToolCall("sleep", {"seconds": 30}), ToolCall("die"))
    assert slow.lost and deadly.lost
    if live.address.command:
        assert "its last output: " in slow.text and "I was told to die" in slow.text
    live.restart()
    assert texts(live, ToolCall("count")) == [("1", False)], "it is a new one"


class TestProcesses:
    def test_it_sees_the_variables_that_it_is_given_and_no_key_of_ours(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("SECRET_KEY", "sk-1")
        before = set(psutil.Process().children(recursive=True))
        given = McpServerConfig(command=[sys.executable, PROGRAM], env={"GIVEN": "yes"})
        toolbox = Toolbox(load_tools([given]), timeout_s=20.0)
        loop = LoopThread("test-tools", what="the test's tools")
        calls = [ToolCall("environment", {"name": name}) for name in ("GIVEN", "SECRET_KEY")]
        found = loop.run(toolbox.call_all(calls))
        started = set(psutil.Process().children(recursive=True)) - before
        loop.close(toolbox.stop)
        assert [one.text for one in found] == ["yes", "unset"]
        assert started and not any(child.is_running() and PROGRAM in _words(child) for child in started)

    @pytest.mark.parametrize(
        ("address", "why"),
        [
            ({"command": ["no-such-program"]}, "No such file"),
            ({"command": [sys.executable, "-c", "raise SystemExit('no license')"]}, "its last output: no license"),
            ({"url": "http://127.0.0.1:9/mcp"}, "cannot be started or reached"),
        ],
    )
    def test_one_that_does_not_begin_is_named(self, address: dict[str, object], why: str):
        with pytest.raises(ConfigError, match=why):
            load_tools([McpServerConfig(**address)])  # type: ignore[arg-type]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.NoSuchProcess:
        return []
