"""Submission of all completions of one prompt to vLLM together.

For each sequence, vLLM's ``generate`` reads, checks and copies the request, and runs an async generator. For short
completions that is more work than generating them. Here a prompt is read once for all of its completions, and only the
last output of each is collected, as vLLM does for ``n`` > 1. Each sequence remains a separate request, with its own
name, seed and times.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from lachesis.common.errors import EngineError

# The same text as vLLM's log line about a new request.
_requests_log = logging.getLogger("vllm.v1.engine.async_llm")

# Attributes of vLLM's engine that a group needs beyond its ``EngineClient``; 0.26 and 0.32 have them.
_NEEDED = (
    "input_processor.process_inputs", "input_processor.assign_request_id", "output_processor.add_request",
    "engine_core.add_request_async", "get_supported_tasks", "_run_output_handler", "abort", "log_requests",
)  # fmt: skip

Ended = Callable[[int, Any], None]


@dataclass(frozen=True, slots=True)
class Member:
    """The fields that differ for each sequence of a group; ``extra`` is for this package's code in the worker."""

    name: str
    seed: int | None
    extra: Mapping[str, Any]


def missing_parts(engine: Any) -> list[str]:
    """Return the names that a group needs and vLLM's engine lacks."""
    return [name for name in _NEEDED if not _has(engine, name)]


class Group:
    """The sequences of one prompt in vLLM, for which only the last outputs are requested.

    Args:
        engine: vLLM's ``AsyncLLM``.
        ended: called with the index and the output of each sequence as soon as it ends.
    """

    def __init__(self, engine: Any, *, ended: Ended) -> None:
        self._engine = engine
        self._ended = ended
        self._request_ids: list[str] = []
        self._outputs: dict[int, Any] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, prompt: Any, params: Any, members: Sequence[Member], *, lora_request: Any) -> list[Any]:
        """Return the last outputs of all sequences, in order. An error or cancellation aborts unfinished ones.

        Args:
            prompt: token ids, as vLLM's preprocessed input.
            params: vLLM's sampling parameters, shared by all members except for their own fields.
            members: at least one.
            lora_request: vLLM's, or None.

        Raises:
            EngineError: vLLM failed to compute a sequence. vLLM's own errors are raised unchanged.
        """
        if self._engine.errored:
            raise self._engine.dead_error
        try:
            await self._add(await self._read(prompt, params, members, lora_request=lora_request), members)
            await self._done
        except BaseException:
            await self._abort()
            raise
        return [self._outputs[place] for place in range(len(members))]

    async def _read(self, prompt: Any, params: Any, members: Sequence[Member], *, lora_request: Any) -> Any:
        check_admission = getattr(self._engine, "check_admission", None)  # 0.26 admits every request
        if check_admission is not None:
            check_admission(len(members), members[0].name)
        return self._engine.input_processor.process_inputs(
            members[0].name,
            prompt,
            params,
            supported_tasks=await self._engine.get_supported_tasks(),
            lora_request=lora_request,
        )

    async def _add(self, read: Any, members: Sequence[Member]) -> None:
        requests = [self._request(read, member) for member in members]
        self._engine._run_output_handler()
        # Register all before the first may end.
        for place, request in enumerate(requests):
            self._request_ids.append(request.request_id)
            self._engine.output_processor.add_request(request, None, None, 0, _Collector(self, place))
        for request in requests:
            await self._engine.engine_core.add_request_async(request)
            if self._engine.log_requests:
                _requests_log.info("Added request %s.", request.request_id)

    def _request(self, read: Any, member: Member) -> Any:
        """Copy the preprocessed request with the member's name, seed and extra."""
        request = copy(read)
        request.request_id = member.name
        request.sampling_params = params = copy(read.sampling_params)
        params.seed = member.seed
        params.extra_args = {**(params.extra_args or {}), **member.extra}
        self._engine.input_processor.assign_request_id(request)
        return request

    def end(self, place: int, output: Any) -> None:
        """Accept a sequence's last output from vLLM, or an error."""
        if self._done.done():
            return
        try:
            if isinstance(output, Exception):
                raise output
            if output.outputs[0].finish_reason == "error":
                raise EngineError("vLLM failed to compute a request", remedy="look at the server's log")
            self._ended(place, output)
        except Exception as error:
            self._done.set_exception(error)
            return
        self._outputs[place] = output
        if len(self._outputs) == len(self._request_ids):
            self._done.set_result(None)

    async def _abort(self) -> None:
        self._done.cancel()
        # A dead engine has nothing in flight and accepts no messages.
        if not self._engine.errored:
            await self._engine.abort(self._request_ids, internal=True)


class _Collector:
    """A replacement for vLLM's ``RequestOutputCollector`` that gets only the last output of a sequence."""

    __slots__ = ("_group", "_place")

    def __init__(self, group: Group, place: int) -> None:
        self._group = group
        self._place = place

    def put(self, output: Any) -> None:
        self._group.end(self._place, output)


def _has(engine: Any, name: str) -> bool:
    try:
        attrgetter(name)(engine)
    except AttributeError:
        return False
    return True
