"""A chat with tools as a harness of verifiers that needs no process: it runs on the event loop of the rollouts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, ClassVar

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from lachesis.common.json_values import read_json

ID = "lachesis_chat"
"""Id of this harness in configurations."""
__all__ = ["ChatHarness"]

# Text of the error for a full context: the conversation ends there, and is scored as it is.
_FULL = "maximum context length"


class ChatHarnessConfig(HarnessConfig):
    """Configuration of the chat harness, without further fields."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Harness that answers the prompt, calls the task's tools, and ends with the first answer that calls none.

    Does the same as ``null`` of verifiers, without a process and an interpreter for each rollout.
    """

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Hold the whole conversation; an error in it fails the rollout."""
        messages = self._messages(data)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None, trust_env=False)
            )
            specs = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, dispatch, servers = await connect_mcp(specs, stack)
            while not trace.is_completed:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.status_code == httpx.codes.BAD_REQUEST and _FULL in reply.text:
                    break
                if reply.is_error:
                    return ProgramResult(exit_code=1, stdout="", stderr=reply.text[-2000:])
                answer = reply.json()["choices"][0]["message"]
                messages.append({name: value for name, value in answer.items() if value is not None})
                if not answer.get("tool_calls"):
                    break
                messages += [await _answered(call, servers, dispatch) for call in answer["tool_calls"]]
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _messages(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        return [*([{"role": "system", "content": system}] if system else []), *said]


async def _answered(
    call: dict[str, Any], servers: dict[str, MCPConnection], dispatch: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return a tool's message, or one that tells the model of a wrong call."""
    name = call["function"]["name"]
    try:
        arguments = read_json(call["function"]["arguments"] or "{}")
    except ValueError as error:
        content: Any = f"error: the arguments are not JSON ({error})"
    else:
        if not isinstance(arguments, dict):
            content = "error: the arguments are not a JSON object"
        elif name not in dispatch:
            content = f"error: unknown tool {name!r}"
        else:
            content = await call_mcp(servers, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
