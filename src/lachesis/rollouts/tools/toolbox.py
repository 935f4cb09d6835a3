"""Functions and tools of MCP servers: what a chat template is told of them, and calls that may raise or hang."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lachesis.common.errors import ConfigError
from lachesis.common.imports import load_function
from lachesis.common.json_values import own
from lachesis.process.threads import CallOutcome, DaemonThread, Line
from lachesis.rollouts.tools.base import ToolError, ToolServer, ToolServerLost
from lachesis.rollouts.tools.parsers import ToolCall

if TYPE_CHECKING:
    from lachesis.config.schema import McpServerConfig

# How many slow calls run at the same time.
_AT_ONCE = 32
# Longer than this a call is slow. A thread may wait so long for its turn alone (``sys.getswitchinterval``).
_QUICK_S = 0.005
# How many combinations of arguments' names are remembered.
_KEPT = 1024
_LONGEST_ERROR = 300


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, and its description in the format of chat templates (JSON schema); ``server`` answers its calls."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    server: ToolServer | None = None


class Observation(NamedTuple):
    """What a call gave, as the model reads it; ``failed`` where that is an error.

    ``lost`` where the tool's server broke off: the rollout knows nothing of what became of its call, and cannot go on.
    """

    call: ToolCall
    text: str
    failed: bool = False
    lost: bool = False

    def message(self, text: str | None = None, **more: str) -> dict[str, str]:
        """The message that answers the call, with ``text`` in place of its own."""
        return {"role": "tool", "name": self.call.name, "content": self.text if text is None else text, **more}


def load_tools(specs: Sequence[str | McpServerConfig], base_dir: Path | None = None) -> list[Tool]:
    """The functions of ``module.function`` or ``FILE.py:FUNCTION``, described by their docstrings and types, and all
    tools of MCP servers, which are started and left so: :func:`close_servers` ends them.

    Raises:
        ConfigError: one cannot be loaded, reached or described, or two have one name.
        DependencyError: a server is named, and the package mcp is not installed.
    """
    tools: list[Tool] = []
    try:
        for spec in specs:
            tools += [described(spec, load_function(spec, base_dir))] if isinstance(spec, str) else _served(spec)
        names = [tool.name for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two tools are called {twice[0]!r}", remedy="rename one of the functions")
    except BaseException:
        close_servers(tools)
        raise
    return tools


def tool_schemas(specs: Sequence[str | McpServerConfig], base_dir: Path | None = None) -> list[Mapping[str, Any]]:
    """What a chat template is told of them; servers were asked, and have ended. Raises as :func:`load_tools`."""
    tools = load_tools(specs, base_dir)
    close_servers(tools)
    return [tool.schema for tool in tools]


def close_servers(tools: Sequence[Tool]) -> None:
    """End the servers of tools. Idempotent."""
    for server in {tool.server for tool in tools if tool.server is not None}:
        server.close()


def _served(address: McpServerConfig) -> list[Tool]:
    from lachesis.plugins.environments.mcp_server import McpServer

    server = McpServer(address)

    def function(name: str) -> Callable[..., Awaitable[str]]:
        async def call(**arguments: Any) -> str:
            return await server.call(name, arguments)

        return call

    try:
        return [Tool(one.name, function(one.name), one.schema, server) for one in server.tools()]
    except BaseException:
        server.close()
        raise


def described(spec: str, function: Callable[..., Any]) -> Tool:
    """A function, or method, as a tool; ``spec`` is what errors call it. Raises ConfigError as :func:`load_tools`."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # by the library's own classes, some of which are no public names
        raise ConfigError(
            f"the tool {spec!r} cannot be described: {error}",
            remedy="give it a docstring with a sentence and `Args:` with a line for each argument, and types",
        ) from error
    return Tool(schema["function"]["name"], function, schema)


class Toolbox:
    """Calls tools, several at the same time where they take long.

    One thread calls them one after the other for as long as each is quick, as to hand a call to a thread takes longer
    than a calculator. From the first that is not, each of the others is called on a thread of its own.

    Args:
        timeout_s: limit of one call. A call that hangs is left behind; a thread cannot be killed.
    """

    def __init__(self, tools: Sequence[Tool], *, timeout_s: float) -> None:
        self.tools = tuple(tools)
        self._functions = {tool.name: _with_own_arguments(tool.function) for tool in tools}
        self._signatures = {tool.name: inspect.signature(tool.function) for tool in tools}
        self._timeout_s = timeout_s
        self._idle: list[DaemonThread] = []
        # What is wrong with a call hangs on the names of its arguments alone, which are mostly the same.
        self._unfit = lru_cache(_KEPT)(self._misfit)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """What a chat template is given as ``tools``."""
        return [tool.schema for tool in self.tools]

    def call_all(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """What the calls give, in their order. Whatever a tool does, there is an observation for it."""
        problems = [call.error or self._misuse(call) for call in calls]
        sound = [call for call, problem in zip(calls, problems, strict=True) if not problem]
        found: list[Observation] = []
        while len(found) < len(sound):
            found += self._call_some(sound[len(found) :])
        in_order = iter(found)
        return [
            Observation(call, f"error: {problem}", failed=True) if problem else next(in_order)
            for call, problem in zip(calls, problems, strict=True)
        ]

    def close(self) -> None:
        """End the threads, and the servers. Idempotent."""
        while self._idle:
            self._idle.pop().abandon()
        close_servers(self.tools)

    def _call_some(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """What the first of the calls give: all, if they are quick, or those up to a slow one and a few after it."""
        begun = [self._begin(calls)]
        if not self._quick(begun[0].line):
            kept = begun[0].line.cut()
            begun += [self._begin([call]) for call in calls[kept : kept + _AT_ONCE - 1]]
            begun[0] = begun[0]._replace(calls=calls[:kept])
        end = time.monotonic() + self._timeout_s
        return [observation for one in begun for observation in self._finish(one, end=end)]

    def _quick(self, line: Line) -> bool:
        """Wait for its calls, while none of them takes long; whether none did."""
        done, quick = 0, min(_QUICK_S, self._timeout_s)
        while not line.wait(quick):
            if len(line.outcomes) == done:
                return False
            done = len(line.outcomes)
        return True

    def _thread(self) -> DaemonThread:
        try:
            return self._idle.pop()  # which other calls may do at the same time
        except IndexError:
            return DaemonThread("lachesis-tool")

    def _begin(self, calls: Sequence[ToolCall]) -> _Begun:
        thread = self._thread()
        line = thread.submit_all([(self._functions[call.name], call.arguments) for call in calls])
        return _Begun(calls, thread, line)

    def _finish(self, begun: _Begun, *, end: float) -> list[Observation]:
        """What the calls of a line gave; of those that had not returned by then, that they are late."""
        over = begun.line.wait(max(0.0, end - time.monotonic()))
        outcomes = list(begun.line.outcomes)  # before it is abandoned, which cancels a coroutine
        outcomes += [CallOutcome(hung=True)] * (len(begun.calls) - len(outcomes))
        self._idle.append(begun.thread) if over else begun.thread.abandon()
        return [self._observation(call, outcome) for call, outcome in zip(begun.calls, outcomes, strict=True)]

    def _observation(self, call: ToolCall, outcome: CallOutcome) -> Observation:
        if outcome.hung:
            return Observation(call, f"error: the call took longer than {self._timeout_s:g} s", failed=True)
        error = outcome.error
        if isinstance(error, ToolServerLost):
            return Observation(call, error.message, failed=True, lost=True)
        if error is None:
            try:
                return Observation(call, _as_text(outcome.result))
            except (TypeError, ValueError, RecursionError) as unwritable:
                error = unwritable
        # What a server says is a sentence for the model; of a function's error the name says more than the message.
        said = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
        return Observation(call, f"error: {said}"[:_LONGEST_ERROR], failed=True)

    def _misuse(self, call: ToolCall) -> str:
        if call.name not in self._functions:
            return f"there is no tool {call.name!r}; there are {', '.join(self._functions)}"
        return self._unfit(call.name, tuple(call.arguments))

    def _misfit(self, name: str, arguments: tuple[str, ...]) -> str:
        try:
            self._signatures[name].bind(**dict.fromkeys(arguments))
        except TypeError as error:
            return f"{name}: {error}"
        return ""


class _Begun(NamedTuple):
    """Calls that are in line at a thread, or running there."""

    calls: Sequence[ToolCall]
    thread: DaemonThread
    line: Line


def _with_own_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arguments that it may change: equal calls may share theirs."""

    def call(**arguments: Any) -> Any:
        return function(**own(arguments))

    return call


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
