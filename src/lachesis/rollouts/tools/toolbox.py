"""Functions and tools of MCP servers: their descriptions for a chat template, and calls that may raise or hang."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lachesis.common.errors import ConfigError
from lachesis.common.imports import load_function
from lachesis.common.json_values import is_array, is_object, own
from lachesis.common.types import Message
from lachesis.process.threads import CallOutcome, DaemonThread, Line, loop_event, settle
from lachesis.rollouts.tools.base import ToolError, ToolServer, ToolServerLost
from lachesis.rollouts.tools.parsers import ToolCall

if TYPE_CHECKING:
    from lachesis.config.schema import McpServerConfig

# The maximum number of slow calls that run at the same time.
_AT_ONCE = 128
# A call that takes longer is slow. A thread may wait this long just for its turn (``sys.getswitchinterval``).
_QUICK_S = 0.005
# The number of remembered combinations of arguments' names.
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
    """Result of a call, as the model reads it; ``failed`` if it is an error.

    ``lost`` if the tool's server broke off: the call's effect is unknown, so the rollout cannot continue. An answer
    with images has them and its texts as ``parts`` of a message, and no ``text``.
    """

    call: ToolCall
    text: str
    failed: bool = False
    lost: bool = False
    parts: Sequence[Message] = ()

    def message(self, content: str | list[Message] | None = None, **more: str) -> Message:
        """Return the message that answers the call, with ``content`` in place of its own text."""
        return {"role": "tool", "name": self.call.name, "content": self.text if content is None else content, **more}


def load_tools(specs: Sequence[str | McpServerConfig], base_dir: Path | None = None) -> list[Tool]:
    """Load functions, described by their docstrings and types, and all tools of MCP servers.

    Functions are ``module.function`` or ``FILE.py:FUNCTION``. Servers are started and left running:
    :func:`close_servers` ends them.

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
            raise ConfigError(f"two tools are called {twice[0]!r}", remedy="rename one of them")
    except BaseException:
        close_servers(tools)
        raise
    return tools


def tool_schemas(specs: Sequence[str | McpServerConfig], base_dir: Path | None = None) -> list[Mapping[str, Any]]:
    """Return tools' descriptions for a chat template; servers are asked and ended. Raises as :func:`load_tools`."""
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
    """Describe a function, or method, as a tool; errors name it ``spec``. Raises ConfigError as :func:`load_tools`."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # some of the library's error classes are not public
        raise ConfigError(
            f"the tool {spec!r} cannot be described: {error}",
            remedy="give it a docstring with a sentence and an `Args:` line for each argument, and type annotations",
        ) from error
    return Tool(schema["function"]["name"], function, schema)


class Toolbox:
    """Caller of tools for rollouts of one event loop, which wait for their own calls only.

    One thread makes the calls of a batch, one after the other while each is quick, because handing a call to a thread
    takes longer than a calculator does. After the first slow call each of the others gets a separate thread.

    Args:
        timeout_s: limit of one call. A call that hangs is left behind; a thread cannot be killed.
        shows_images: True if the model is shown the images of answers.
    """

    def __init__(self, tools: Sequence[Tool], *, timeout_s: float, shows_images: bool = False) -> None:
        self.tools = tuple(tools)
        self._shows_images = shows_images
        self._functions = {tool.name: _with_own_arguments(tool.function) for tool in tools}
        self._signatures = {tool.name: inspect.signature(tool.function) for tool in tools}
        self._timeout_s = timeout_s
        self._idle: list[DaemonThread] = []
        self._waiting: list[_Asked] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        # Whether a call fits its function depends only on the names of its arguments, which are mostly the same.
        self._unfit = lru_cache(_KEPT)(self._misfit)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Return the descriptions of the tools, for a chat template's ``tools``."""
        return [tool.schema for tool in self.tools]

    async def call_all(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Return the results of the calls, in order. Whatever a tool does, there is an observation for it.

        Raises:
            ConfigError: a tool answered with an image, and the model is not shown images.
        """
        problems = [call.error or self._misuse(call) for call in calls]
        found = [
            Observation(call, f"error: {problem}", failed=True) if problem else self._submit(call)
            for call, problem in zip(calls, problems, strict=True)
        ]
        answers = [one if isinstance(one, Observation) else await one for one in found]
        if unseen := next((one for one in answers if one.parts and not self._shows_images), None):
            raise ConfigError(
                f"the tool {unseen.call.name!r} answered with an image, but the model is not shown images",
                remedy="set model.vision: frozen, with a model for images and text, or let the tool return text",
            )
        return answers

    def _submit(self, call: ToolCall) -> asyncio.Future[Observation]:
        loop = asyncio.get_running_loop()
        asked = _Asked(call, loop.create_future())
        self._waiting.append(asked)
        if len(self._waiting) == 1:
            loop.call_soon(self._call_waiting)
        return asked.future

    def _call_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._serve_aside(waiting)

    def _serve_aside(self, asked: Sequence[_Asked]) -> None:
        task = asyncio.ensure_future(self._serve(asked))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def stop(self) -> None:
        """Stop waiting for calls, and end the threads and the servers. Idempotent."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        while self._idle:
            self._idle.pop().abandon()
        await asyncio.to_thread(close_servers, self.tools)

    async def _serve(self, asked: Sequence[_Asked]) -> None:
        """Answer these calls: all on one thread, or each on a separate thread from the first slow one on."""
        async with self._slots:
            line = self._begin(asked)
            answered = await self._quick(line)
            begun = len(asked) if line.over.is_set() else line.calls.cut()
            for late in asked[begun:]:
                self._serve_aside([late])
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timeout_s):
                        await line.over.wait()
            finally:
                outcomes = list(line.calls.outcomes)  # read before an abandoned thread cancels its calls
                self._idle.append(line.thread) if line.over.is_set() else line.thread.abandon()
            outcomes += [CallOutcome(hung=True)] * (begun - len(outcomes))
            self._answer(asked[answered:begun], outcomes[answered:])

    async def _quick(self, line: _Begun) -> int:
        """Answer the calls of a line while each is quick, and return how many were answered."""
        answered, quick = 0, min(_QUICK_S, self._timeout_s)
        while not line.over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(quick):
                    await line.over.wait()
            done = len(line.calls.outcomes)
            if done == answered:
                break
            self._answer(line.asked[answered:done], line.calls.outcomes[answered:done])
            answered = done
        return answered

    def _answer(self, asked: Sequence[_Asked], outcomes: Sequence[CallOutcome]) -> None:
        for one, outcome in zip(asked, outcomes, strict=True):
            settle(one.future, self._observation(one.call, outcome))

    def _thread(self) -> DaemonThread:
        return self._idle.pop() if self._idle else DaemonThread("lachesis-tool")

    def _begin(self, asked: Sequence[_Asked]) -> _Begun:
        (over, ended), thread = loop_event(), self._thread()
        calls = [(self._functions[one.call.name], one.call.arguments) for one in asked]
        return _Begun(asked, thread, thread.submit_all(calls, ended), over)

    def _observation(self, call: ToolCall, outcome: CallOutcome) -> Observation:
        if outcome.hung:
            return Observation(call, f"error: the call took longer than {self._timeout_s:g} s", failed=True)
        error = outcome.error
        if isinstance(error, ToolServerLost):
            return Observation(call, error.message, failed=True, lost=True)
        if error is None:
            try:
                said = outcome.result
                if parts := _parts_with_images(said, shown=self._shows_images):
                    return Observation(call, "", parts=parts)
                text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
                return Observation(call, text)
            except (TypeError, ValueError, RecursionError) as unwritable:
                error = unwritable
        # A server's message is a sentence for the model; for a function's error, the type often says more.
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


def _parts_with_images(said: Any, *, shown: bool) -> list[Message]:
    """Return an answer with images, alone or among texts, as parts of a message; nothing for another answer.

    Images are those of PIL and, if the model is ``shown`` images, parts of the type image.
    """
    given = said if is_array(said) else [said]
    images = [_is_picture(one) or (shown and is_object(one) and one.get("type") == "image") for one in given]
    return [_part(one, is_image=image) for one, image in zip(given, images, strict=True)] if any(images) else []


def _part(one: Any, *, is_image: bool) -> Message:
    if is_image:
        return one if is_object(one) else {"type": "image", "image": one}
    return {"type": "text", "text": str(one.get("text", one) if is_object(one) else one)}


def _is_picture(one: Any) -> bool:
    """Return True for an image of PIL, alone or in a part of a message."""
    return type(one.get("image") if is_object(one) else one).__module__.startswith("PIL.")


class _Asked(NamedTuple):
    """A call, and the future of its result."""

    call: ToolCall
    future: asyncio.Future[Observation]


class _Begun(NamedTuple):
    """Calls that wait or run on a thread; ``over`` is set after the last."""

    asked: Sequence[_Asked]
    thread: DaemonThread
    calls: Line
    over: asyncio.Event


def _with_own_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a copy of its arguments for each call: equal calls may share theirs."""

    def call(**arguments: Any) -> Any:
        return function(**own(arguments))

    return call
