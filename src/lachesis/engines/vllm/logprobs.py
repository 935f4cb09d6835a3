"""Logprobs of sampled tokens, kept in vLLM's worker until their sequence has ended.

Asked for logprobs, vLLM carries three small arrays for each token of each sequence from the worker through its engine
to the server, which costs a third of its speed and more. Here the worker takes them off the output of each step, and
the server fetches those of a whole sequence once, when it has ended. vLLM's own routes get their logprobs as usual.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lachesis.common.errors import EngineError

KEY = "lachesis_logprobs"
"""The key in a request's ``extra_args`` of the name under which its logprobs are kept."""

# Maximum number of ended sequences to keep unfetched, because their clients are gone.
_MOST_UNFETCHED = 16_384

Fetch = Callable[..., Awaitable[Mapping[str, str]]]


@dataclass(slots=True)
class _Kept:
    """The logprobs of one sequence in the order of sampling, each with its position counted from the prompt's start.

    A position occurs twice if the engine drops a token and resamples it; the last one counts.
    """

    tokens: array[int] = field(default_factory=lambda: array("q"))  # position << 32 | token id
    logprobs: array[float] = field(default_factory=lambda: array("f"))


def once_there(output: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the output of a step; if it is still being computed, apply it once finished."""
    if hasattr(output, "get_output"):
        from lachesis.engines.vllm.compat import later_output

        return later_output(output, change)
    return change(output)


class WorkerLogprobs:
    """The worker's side: wraps the two methods of the worker that vLLM's executors call in each step.

    It runs for every token, in the thread that limits vLLM's speed for small models.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self._kept: dict[str, _Kept] = {}
        self._running: dict[str, _Kept] = {}  # by vLLM's name of the request
        self._ended: deque[str] = deque()
        self._leaving: Collection[str] = ()
        self._keys: dict[str, str] = {}
        self._step: _Step | None = None
        self._execute, self._sample = worker.execute_model, worker.sample_tokens
        worker.execute_model, worker.sample_tokens = self._execute_model, self._sample_tokens

    def take(self, asked: Mapping[str, Sequence[int]], dropped: Sequence[str]) -> dict[str, str]:
        """Return the kept logprobs and delete them.

        Args:
            asked: for each name, the position of the first completion token and the number of tokens.
            dropped: names whose logprobs will not be fetched.

        Returns:
            For each name, in base64, the token ids as int32 followed by the logprobs as float32.

        Raises:
            EngineError: a requested token was not kept.
        """
        found = {key: _cut(key, self._kept.get(key), *where) for key, where in asked.items()}
        for key in (*asked, *dropped):
            self._kept.pop(key, None)
        return found

    def _execute_model(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._end(scheduled.finished_req_ids)
        for request in scheduled.scheduled_new_reqs:
            key = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
            if key is not None:
                self._keys[request.req_id] = key
                self._running[request.req_id] = self._kept.setdefault(key, _Kept())
        self._step = _Step.of(scheduled) if self._running else None
        return self._execute(scheduled, *arguments, **options)

    def _end(self, request_ids: Collection[str]) -> None:
        """Forget ended requests one step after vLLM does, because output of the previous step may still be pending."""
        for request_id in self._leaving:
            if self._running.pop(request_id, None) is not None:
                self._ended.append(self._keys.pop(request_id))
        self._leaving = tuple(request_ids)
        while len(self._ended) > _MOST_UNFETCHED:
            self._kept.pop(self._ended.popleft(), None)

    def _sample_tokens(self, *arguments: Any, **options: Any) -> Any:
        output, step = self._sample(*arguments, **options), self._step
        if step is None or output is None:
            return output
        return once_there(output, lambda ready: self._strip(ready, step))

    def _strip(self, output: Any, step: _Step) -> Any:
        """Remove the kept logprobs from the output of a step, unless another request in it needs logprobs."""
        rows = output.logprobs
        if rows is None or len(rows.logprobs) != len(output.req_ids):
            return output
        logprobs, others = rows.logprobs[:, 0].tolist(), False
        for row, (request_id, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=False)):
            kept = self._running.get(request_id)
            if kept is None:
                others = True
                continue
            place = step.place(request_id)
            if len(tokens) == 1:  # the usual case, three times as fast as the code below
                kept.tokens.append(place << 32 | tokens[0])
                kept.logprobs.append(logprobs[row])
                continue
            kept.tokens.extend((place + number) << 32 | token for number, token in enumerate(tokens))
            kept.logprobs.extend(logprobs[row : row + len(tokens)])
        if not others:
            output.logprobs = None
        return output


@dataclass(frozen=True, slots=True)
class _Step:
    """The requests of a step, each with the number of tokens computed before it and in it."""

    computed: Mapping[str, int]
    scheduled: Mapping[str, int]

    @classmethod
    def of(cls, scheduled: Any) -> _Step:
        """Read a step from vLLM's ``SchedulerOutput``."""
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((request.req_id, request.num_computed_tokens) for request in scheduled.scheduled_new_reqs)
        return cls(computed, scheduled.num_scheduled_tokens)

    def place(self, request_id: str) -> int:
        """Return the position of a request's new token in its sequence."""
        return self.computed[request_id] + self.scheduled[request_id]


class FetchedLogprobs:
    """The server's side: fetches the logprobs of all sequences that end in one step in one call.

    Args:
        fetch: calls :meth:`WorkerLogprobs.take` on the first worker.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._asked: dict[str, tuple[Sequence[int], asyncio.Future[str]]] = {}
        self._dropped: list[str] = []
        self._fetching: asyncio.Task[None] | None = None

    def ask(self, key: str, *, prompt_length: int, token_ids: Sequence[int]) -> asyncio.Future[str]:
        """Request the logprobs of an ended sequence with at least one token; pass the result to :meth:`read`."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[key] = ((prompt_length, len(token_ids)), answer)
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.ensure_future(self._fetch_all())
        return answer

    @staticmethod
    def read(answer: str, *, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprobs [T] of the requested tokens.

        Raises:
            EngineError: the worker kept logprobs of other tokens.
        """
        raw = base64.b64decode(answer)
        tokens = np.frombuffer(raw, dtype=np.int32, count=len(token_ids))
        if not np.array_equal(tokens, np.asarray(token_ids, dtype=np.int32)):
            raise EngineError(
                "the logprobs that vLLM's worker kept belong to other tokens than the ones that vLLM returned",
                remedy="report this bug with the server's log; the server's flag --no-async-scheduling may avoid it",
            )
        return tuple(np.frombuffer(raw, dtype=np.float32, offset=tokens.nbytes).tolist())

    async def take(self, key: str, *, prompt_length: int, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprobs [T] of the tokens of an ended sequence.

        Raises:
            EngineError: the worker has not kept all of them, or kept those of other tokens.
        """
        if not token_ids:
            self.drop(key)
            return ()
        answer = self.ask(key, prompt_length=prompt_length, token_ids=token_ids)
        return self.read(await answer, token_ids=token_ids)

    def drop(self, key: str) -> None:
        """Discard the logprobs of a sequence; the next call tells the worker."""
        self._asked.pop(key, None)
        self._dropped.append(key)

    async def _fetch_all(self) -> None:
        while self._asked:
            await asyncio.sleep(0)  # until all sequences that ended in the same step have asked
            asked, self._asked = self._asked, {}
            dropped, self._dropped = self._dropped, []
            answers = [answer for _, answer in asked.values()]
            try:
                found = await self._fetch(asked={key: where for key, (where, _) in asked.items()}, dropped=dropped)
            except Exception as error:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for key, (_, answer) in asked.items():
                if not answer.done():
                    answer.set_result(found[key])


def _cut(key: str, kept: _Kept | None, start: int, count: int) -> str:
    tokens, logprobs = np.full(count, -1, dtype=np.int32), np.zeros(count, dtype=np.float32)
    if kept is not None:
        # Copies, because an array with a view cannot grow, and a surplus token may still arrive.
        packed, values = np.array(kept.tokens, dtype=np.int64), np.array(kept.logprobs, dtype=np.float32)
        places = (packed >> 32) - start
        inside = (places >= 0) & (places < count)
        tokens[places[inside]] = packed[inside] & 0xFFFFFFFF
        logprobs[places[inside]] = values[inside]
    if (missing := int((tokens < 0).sum())) > 0:
        raise EngineError(
            f"vLLM's worker has not kept {missing} of the {count} logprobs of the sequence {key}",
            remedy="report this bug with the server's log; the server's flag --no-async-scheduling may avoid it",
        )
    return base64.b64encode(tokens.tobytes() + logprobs.tobytes()).decode()
