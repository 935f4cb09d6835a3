"""Requests of many clients, gathered into batches for one embedded engine. Pauses lose none of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError
from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import FinishReason, GenerationRequest
from lachesis.engines.base import PauseMode
from lachesis.engines.embedded.engine import EmbeddedEngine, Step
from lachesis.engines.embedded.gate import EnginePaused

logger = logging.getLogger(__name__)

# Requests that are sent together arrive a few milliseconds apart; a batch that has begun accepts no others.
_GATHER_S = 0.005
_INCOMPLETE = "\ufffd"  # a decoder's output for the first bytes of a character


@dataclass(slots=True)
class Growing:
    """Completion in progress. ``times`` [T] are ``time.monotonic()`` at each token; ``routed`` is set at its end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    routed: RoutedExperts | None = None
    reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class Job:
    """Request on its way: filled by the engine's thread, read by its client.

    Args:
        request: what to generate.
        top_logprobs: number of likeliest tokens to record at each place.
        notify: called from the engine's thread when there is something new.
    """

    request: GenerationRequest
    _: KW_ONLY
    top_logprobs: int
    notify: Callable[[], None]
    sequences: list[Growing] = field(init=False)
    submitted: float = field(default_factory=time.monotonic, init=False)
    error: LachesisError | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.sequences = [Growing() for _ in range(self.request.n)]

    @property
    def done(self) -> bool:
        """Return True once every completion has ended, or the request has failed."""
        return self.error is not None or all(sequence.reason for sequence in self.sequences)

    def tell(self) -> None:
        """Wake the client, unless it has gone."""
        if not self.cancelled:
            self.notify()

    def end(self, error: LachesisError | None = None) -> None:
        """End the unfinished sequences: with ``error``, or with the finish reason ``abort``."""
        if self.done:
            return
        self.error = error
        for sequence in self.sequences:
            sequence.reason = sequence.reason or "abort"
        self.tell()


class BatchRunner:
    """A thread that generates one batch after the other.

    Args:
        engine: used only by this thread, except for pauses, by its gate, and work between tokens.
        max_sequences: completions gathered into one batch.
    """

    def __init__(self, engine: EmbeddedEngine, *, max_sequences: int) -> None:
        self._engine = engine
        self._max_sequences = max_sequences
        self._gate = engine.gate
        self._queue: deque[Job] = deque()
        self._running: list[Job] = []
        self.generated_tokens = 0
        self._thread = threading.Thread(target=self._run, name="embedded-generation", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return True while requests are served."""
        return self._thread.is_alive() and not self._gate.closed

    def submit(self, job: Job) -> None:
        """Queue a request; while paused it waits. Raises EngineError once closed."""
        with self._gate.changed:
            if self._gate.closed:
                raise EngineError("the server is shutting down", remedy="start it again")
            self._queue.append(job)
            self._gate.changed.notify_all()

    def pause(self, mode: PauseMode) -> None:
        """Let ``abort`` end all requests, ``drain`` finish those that have begun, ``keep`` hold them."""
        waiting: list[Job] = []
        # Both under the lock, so that a resume comes before both or after both.
        with self._gate.changed:
            self._gate.begin_pause(mode)
            if mode == "abort":
                waiting.extend(self._queue)
                self._queue.clear()
        _end(waiting, None)
        self._gate.wait_for_pause(mode)

    def close(self) -> None:
        """End everything; requests that have not ended fail. Idempotent."""
        self._engine.close()
        self._thread.join(timeout=10)
        for job in [*self._running, *self._queue]:
            job.end(EngineError("the server is shutting down", remedy="start it again"))

    def _run(self) -> None:
        while jobs := self._gather():
            self._running = jobs
            try:
                self._generate(jobs)
            except EnginePaused:
                # A pause came between gathering and generating: none of these has begun.
                with self._gate.changed:
                    aborted = self._gate.aborting
                    if not aborted:
                        self._queue.extendleft(reversed(jobs))
                if aborted:
                    _end(jobs, None)
            except LachesisError as error:
                logger.error("a batch of %d requests failed: %s", len(jobs), error)
                _end(jobs, error)
            except Exception as error:
                logger.exception("a batch of %d requests failed", len(jobs))
                failure = EngineError(
                    f"generation failed: {type(error).__name__}: {error}", remedy="see the server's log"
                )
                _end(jobs, failure)
            self._running = []

    def _gather(self) -> list[Job]:
        """Wait for the next batch; return an empty one once closed."""
        with self._gate.changed:
            while not self._gate.closed:
                self._gate.changed.wait_for(lambda: self._gate.closed or (self._queue and not self._gate.paused))
                arrived = -1
                # Repeated while more requests arrive, and the batch is not full.
                while not self._gate.closed and arrived < len(self._queue) < self._max_sequences:
                    arrived = len(self._queue)
                    self._gate.changed.wait(_GATHER_S)
                jobs = self._take()
                if jobs:
                    return jobs
            return []

    def _take(self) -> list[Job]:
        jobs: list[Job] = []
        room = self._max_sequences
        while self._queue and not self._gate.paused and not self._gate.closed:
            if jobs and self._queue[0].request.n > room:
                break
            job = self._queue.popleft()
            if not job.cancelled:
                jobs.append(job)
                room -= job.request.n
        return jobs

    def _generate(self, jobs: Sequence[Job]) -> None:
        def listener(step: Step) -> Collection[int]:
            _note(jobs, step)
            self.generated_tokens += len(step.reasons)
            return [i for i, job in enumerate(jobs) if job.cancelled]

        self._engine.generate(
            [job.request for job in jobs],
            deadline=Deadline("generation of a batch", None),
            listener=listener,
            top_logprobs=max(job.top_logprobs for job in jobs),
        )
        # Requests that a pause has cut short were not in the steps.
        _end(jobs, None)


def _note(jobs: Sequence[Job], step: Step) -> None:
    """Record a step in the jobs, and wake their clients."""
    now = time.monotonic()
    columns = (step.requests, step.completions, step.token_ids, step.logprobs)
    told: dict[int, Job] = {}
    for row, (request, index, token, logprob) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        job = jobs[request]
        sequence = job.sequences[index]
        if job.top_logprobs and step.top_ids is not None and step.top_logprobs is not None:
            likeliest = zip(step.top_ids[row].tolist(), step.top_logprobs[row].tolist(), strict=True)
            sequence.top.append({token: logprob} | dict(list(likeliest)[: job.top_logprobs]))
        sequence.routed = step.routed[row]
        sequence.logprobs.append(logprob)
        sequence.times.append(now)
        # Last, because a concurrent client takes its length as the length of all.
        sequence.token_ids.append(token)
        sequence.reason = step.reasons[row]
        told[request] = job
    for job in told.values():
        job.tell()


def _end(jobs: Sequence[Job], error: LachesisError | None) -> None:
    for job in jobs:
        job.end(error)


def cut_at_stop(text: str, stop: Sequence[str], *, include: bool) -> str:
    """Return ``text`` up to its first stop string, with that string if ``include``."""
    places = [(text.find(string), string) for string in stop if string in text]
    if not places:
        return text
    place, string = min(places)
    return text[: place + len(string) * include]


@dataclass(slots=True)
class GrowingText:
    """The text of one completion, in pieces that are never taken back.

    Args:
        decode: token ids to text.
        stop: strings that end the completion.
        include_stop: whether the stop string is part of the text.
    """

    decode: Callable[[Sequence[int]], str]
    _: KW_ONLY
    stop: Sequence[str]
    include_stop: bool
    _handed_out: int = field(default=0, init=False)

    def more(self, token_ids: Sequence[int], *, finished: bool) -> str:
        """Return the new text that may be sent, given the completion so far."""
        text = cut_at_stop(self.decode(token_ids), self.stop, include=self.include_stop)
        end = len(text)
        if not finished:
            end = len(text.rstrip(_INCOMPLETE)) - self._held_back(text)
        piece = text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return piece

    def _held_back(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that may begin a stop string."""
        longest = max((len(string) for string in self.stop), default=0)
        ends = range(min(longest, len(text)), 0, -1)
        return next((n for n in ends if any(string.startswith(text[-n:]) for string in self.stop)), 0)
