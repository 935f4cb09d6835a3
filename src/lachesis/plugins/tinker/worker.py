"""One thread that computes, and the futures of what it is asked for."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from lachesis.common.errors import LachesisError
from lachesis.plugins.tinker.records import Sampled, SampleRequest
from lachesis.plugins.tinker.sampling import Sampler, Weights

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A client that lost the answer on its way asks again; one that does not for so long has it, or is gone.
_FETCHED_S, _UNFETCHED_S = 600.0, 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed; ``category`` says whose fault it was, in the protocol's words."""

    message: str
    category: Literal["user", "server"]


@dataclass(slots=True)
class Job(Generic[T]):
    """Something to compute; ``answer`` is its result as bytes of a body, or why there is none."""

    work: Callable[[], T]
    encode: Callable[[T], Answer]
    future: Future[Answer | Failure] = field(default_factory=Future)


@dataclass(slots=True)
class SampleJob:
    """Completions of one prompt."""

    weights: Weights | None
    request: SampleRequest
    encode: Callable[[Sampled], Answer]
    future: Future[Answer | Failure] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer."""

    content: bytes
    media_type: str = "application/json"


class Worker:
    """Does one job after the other, in the order in which they come.

    Jobs that sample with the same weights are done together, for the engine is faster so; saved weights do not change.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._jobs: deque[Job[Any] | SampleJob] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lachesis-tinker", daemon=True)
        self._thread.start()

    def submit(self, job: Job[Any] | SampleJob) -> None:
        """Have it done after those that came before."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """End after the job under way."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            if isinstance(found, Job):
                _attempt(found)
            else:
                _sample(found, self._sampler)

    def _next(self) -> Job[Any] | list[SampleJob] | None:
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            first = self._jobs.popleft()
            if isinstance(first, Job):
                return first
            key = _key(first)
            together = [job for job in self._jobs if isinstance(job, SampleJob) and _key(job) == key]
            self._jobs = deque(job for job in self._jobs if isinstance(job, Job) or _key(job) != key)
            return [first, *together]


def _key(job: SampleJob) -> str | None:
    return None if job.weights is None else job.weights.key


def _attempt(job: Job[Any]) -> None:
    try:
        job.future.set_result(job.encode(job.work()))
    except Exception as error:  # whatever it is ends this request and no other
        job.future.set_result(_failure(error))


def _sample(jobs: Sequence[SampleJob], sampler: Sampler) -> None:
    try:
        results = sampler.sample(jobs[0].weights, [job.request for job in jobs])
        answers = [
            _failure(found) if isinstance(found, LachesisError) else job.encode(found)
            for job, found in zip(jobs, results, strict=True)
        ]
    except Exception as error:
        answers = [_failure(error)] * len(jobs)
    for job, answer in zip(jobs, answers, strict=True):
        job.future.set_result(answer)


def _failure(error: Exception) -> Failure:
    if isinstance(error, LachesisError):
        return Failure(str(error), "user")
    if type(error).__name__ == "OutOfMemoryError":
        remedy = "send fewer tokens, or start the server with a lower --max-tokens-per-microbatch or --max-num-seqs"
        return Failure(f"the device's memory is full: {error} -> {remedy}", "server")
    logger.exception("a request failed")
    remedy = "this is a fault of Lachesis or of a library: report it with the server's log"
    return Failure(f"{type(error).__name__}: {error} -> {remedy}", "server")


class Futures:
    """Answers that clients come back for. One that has been fetched is kept for a while, and then forgotten."""

    def __init__(self) -> None:
        self._futures: dict[str, Future[Answer | Failure]] = {}
        self._ends: deque[tuple[float, str]] = deque()
        self._fetched: deque[tuple[float, str]] = deque()

    def add(self, future: Future[Answer | Failure]) -> str:
        """Its id."""
        now = time.monotonic()
        for ends in (self._ends, self._fetched):
            while ends and ends[0][0] < now:
                self._futures.pop(ends.popleft()[1], None)
        request_id = uuid.uuid4().hex
        self._futures[request_id] = future
        self._ends.append((now + _UNFETCHED_S, request_id))
        return request_id

    def find(self, request_id: str) -> Future[Answer | Failure] | None:
        """None where there is no such request, or its answer was fetched long ago."""
        return self._futures.get(request_id)

    def fetched(self, request_id: str) -> None:
        """Its answer is on the way to the client."""
        self._fetched.append((time.monotonic() + _FETCHED_S, request_id))


@dataclass(slots=True)
class Sequenced:
    """The requests of one run in the order of their numbers, in whatever order they arrive; one sent twice is one."""

    submit: Callable[[Job[Any]], None]
    expected: int = 1
    early: dict[int, Job[Any]] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)

    def add(self, number: int, job: Job[Any]) -> None:
        """Submit it once all before it have been."""
        self.early[number] = job
        while self.expected in self.early:
            self.submit(self.early.pop(self.expected))
            self.expected += 1
