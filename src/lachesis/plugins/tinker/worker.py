"""Thread that computes, and the futures of its requests."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from lachesis.common.errors import EngineError, LachesisError
from lachesis.plugins.tinker.records import Sampled, SampleRequest
from lachesis.plugins.tinker.sampling import Sampler, Weights

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds to keep answers: fetched ones, which a client asks for again if they got lost, and unfetched ones.
_FETCHED_S, _UNFETCHED_S = 600.0, 24 * 3600.0
# Seconds that the current job has to end when the server does.
_LAST_S = 30.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a request failed; ``category`` says whose fault it was, in the protocol's words."""

    message: str
    category: Literal["user", "server"]


@dataclass(slots=True)
class Job(Generic[T]):
    """Something to compute for a lane; ``answer`` is its result as bytes of a body, or the reason for having none.

    ``lost`` is called if the server ends before it was computed.
    """

    work: Callable[[], T]
    encode: Callable[[T], Answer]
    lane: str = ""
    lost: Callable[[], None] | None = None
    future: Future[Answer | Failure] = field(default_factory=Future)


@dataclass(slots=True)
class SampleJob:
    """Completions of one prompt for a lane."""

    weights: Weights | None
    request: SampleRequest
    encode: Callable[[Sampled], Answer]
    lane: str = ""
    future: Future[Answer | Failure] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer."""

    content: bytes
    media_type: str = "application/json"


class FairQueue:
    """Queue of jobs in lanes, one for each client, that share the worker's time equally.

    Jobs of a lane keep their order. Next is the lane that has used the fewest seconds, so that neither many requests
    nor large ones of one client make another wait for more than the job under way. A lane that was idle starts with
    as many seconds as the busy lane with the fewest: waiting is not saved up.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Job[Any] | SampleJob]] = {}
        self._used_s: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def add(self, job: Job[Any] | SampleJob) -> None:
        """Append a job to its lane."""
        lane = job.lane
        if lane not in self._lanes:
            busiest = min((self._used_s[one] for one in self._lanes), default=0.0)
            self._used_s[lane] = max(busiest, self._used_s.get(lane, 0.0))
            self._lanes[lane] = deque()
        self._lanes[lane].append(job)

    def take(self) -> Job[Any] | list[SampleJob]:
        """Remove and return the next job, or all jobs that sample with the same weights as the next one."""
        lane = min(self._lanes, key=lambda one: self._used_s[one])
        first = self._lanes[lane].popleft()
        found: Job[Any] | list[SampleJob] = first if isinstance(first, Job) else [first, *self._alike(first)]
        self._lanes = {one: jobs for one, jobs in self._lanes.items() if jobs}
        return found

    def charge(self, lanes: Sequence[str], seconds: float) -> None:
        """Divide the seconds of a job among the lanes of its requests."""
        for lane in lanes:
            self._used_s[lane] = self._used_s.get(lane, 0.0) + seconds / len(lanes)

    def used_s(self, lane: str) -> float:
        """Return the seconds that a lane has used, including the credit it got when it was last idle."""
        return self._used_s.get(lane, 0.0)

    def waiting(self, lane: str) -> int:
        """Return the number of waiting jobs of a lane."""
        return len(self._lanes.get(lane, ()))

    def forget(self, lane: str) -> None:
        """Forget the seconds of a lane that will not come back."""
        if lane not in self._lanes:
            self._used_s.pop(lane, None)

    def drain(self) -> list[Job[Any] | SampleJob]:
        """Remove and return all jobs."""
        left = [job for jobs in self._lanes.values() for job in jobs]
        self._lanes.clear()
        return left

    def _alike(self, first: SampleJob) -> list[SampleJob]:
        """Remove the jobs that sample with the weights of ``first``; saved weights do not change, so order is free."""
        key = _key(first)
        found: list[SampleJob] = []
        for lane, jobs in self._lanes.items():
            found += [job for job in jobs if isinstance(job, SampleJob) and _key(job) == key]
            self._lanes[lane] = deque(job for job in jobs if isinstance(job, Job) or _key(job) != key)
        return found


class Worker:
    """Thread that does one job after the other, as a fair queue hands them out.

    Jobs that sample with the same weights are done together, which is faster.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.queue = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lachesis-tinker", daemon=True)
        self._thread.start()

    def submit(self, job: Job[Any] | SampleJob) -> None:
        """Have a job done once it is its lane's turn."""
        with self._changed:
            self.queue.add(job)
            self._changed.notify()

    def call(self, work: Callable[[], T], *, lane: str) -> Future[T]:
        """Have ``work`` done once it is its lane's turn, and return its result unchanged."""
        found: Future[T] = Future()

        def job() -> None:
            try:
                found.set_result(work())
            except Exception as error:  # the caller handles it
                found.set_exception(error)

        self.submit(Job(job, lambda _: Answer(b""), lane))
        return found

    def forget(self, lane: str) -> None:
        """Forget a lane whose client has gone."""
        with self._changed:
            self.queue.forget(lane)

    def close(self) -> list[Job[Any] | SampleJob]:
        """End after the job under way, and return the jobs that are left."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=_LAST_S)
        with self._changed:
            return self.queue.drain()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            jobs = [found] if isinstance(found, Job) else found
            started = time.monotonic()
            if isinstance(found, Job):
                _attempt(found)
            else:
                _sample(found, self._sampler)
            with self._changed:
                self.queue.charge([job.lane for job in jobs], time.monotonic() - started)

    def _next(self) -> Job[Any] | list[SampleJob] | None:
        with self._changed:
            while not len(self.queue) and not self._closed:
                self._changed.wait()
            return None if self._closed else self.queue.take()


def _key(job: SampleJob) -> str | None:
    return None if job.weights is None else job.weights.key


def _attempt(job: Job[Any]) -> None:
    try:
        job.future.set_result(job.encode(job.work()))
    except Exception as error:  # any error ends only this request
        job.future.set_result(failure(error))


def _sample(jobs: Sequence[SampleJob], sampler: Sampler) -> None:
    try:
        results = sampler.sample(jobs[0].weights, [job.request for job in jobs])
        answers = [
            failure(found) if isinstance(found, LachesisError) else job.encode(found)
            for job, found in zip(jobs, results, strict=True)
        ]
    except Exception as error:
        answers = [failure(error)] * len(jobs)
    for job, answer in zip(jobs, answers, strict=True):
        job.future.set_result(answer)


def failure(error: Exception) -> Failure:
    """Return the client's view of an error: its message, and whose fault it was."""
    if isinstance(error, LachesisError):
        return Failure(str(error), "user")
    if type(error).__name__ == "OutOfMemoryError":
        remedy = "send fewer tokens, or start the server with a lower --max-tokens-per-microbatch or --max-num-seqs"
        return Failure(f"the device's memory is full: {error} -> {remedy}", "server")
    logger.exception("a request failed")
    remedy = "this is a bug in Lachesis or in a library: report it with the server's log"
    return Failure(f"{type(error).__name__}: {error} -> {remedy}", "server")


def answered(found: Future[T], encode: Callable[[T], Answer]) -> Future[Answer | Failure]:
    """Return a future of the answer to a request that an engine computes.

    Errors of the engine or its adapter are the server's fault, all others the client's.
    """
    answer: Future[Answer | Failure] = Future()

    def done(future: Future[T]) -> None:
        try:
            answer.set_result(encode(future.result()))
        except CancelledError:
            answer.set_result(Failure("the server ended before this was sampled", "server"))
        except EngineError as error:
            answer.set_result(Failure(str(error), "server"))
        except Exception as error:
            answer.set_result(failure(error))

    found.add_done_callback(done)
    return answer


class Futures:
    """Answers that clients fetch later. A fetched one is kept for a while, and then forgotten."""

    def __init__(self) -> None:
        self._futures: dict[str, Future[Answer | Failure]] = {}
        self._ends: deque[tuple[float, str]] = deque()
        self._fetched: deque[tuple[float, str]] = deque()

    def add(self, future: Future[Answer | Failure]) -> str:
        """Add a future, and return its id."""
        now = time.monotonic()
        for ends in (self._ends, self._fetched):
            while ends and ends[0][0] < now:
                self._futures.pop(ends.popleft()[1], None)
        request_id = uuid.uuid4().hex
        self.restore(request_id, future)
        return request_id

    def restore(self, request_id: str, future: Future[Answer | Failure]) -> None:
        """Add a future that has an id."""
        self._futures[request_id] = future
        self._ends.append((time.monotonic() + _UNFETCHED_S, request_id))

    def done(self) -> dict[str, Answer | Failure]:
        """Return the finished answers, by the ids of their requests."""
        return {name: future.result() for name, future in self._futures.items() if future.done()}

    def find(self, request_id: str) -> Future[Answer | Failure] | None:
        """Return the future of a request; None if it does not exist, or its answer was fetched long ago."""
        return self._futures.get(request_id)

    def fetched(self, request_id: str) -> None:
        """Note that the answer to a request is on its way to the client."""
        self._fetched.append((time.monotonic() + _FETCHED_S, request_id))


@dataclass(slots=True)
class Sequenced:
    """The requests of one run in the order of their numbers, in whatever order they arrive; one sent twice is one."""

    submit: Callable[[Job[Any]], None]
    expected: int = 1
    early: dict[int, Job[Any]] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)

    def add(self, number: int, job: Job[Any]) -> None:
        """Add a request, which is submitted once all before it have been."""
        self.early[number] = job
        while self.expected in self.early:
            self.submit(self.early.pop(self.expected))
            self.expected += 1
