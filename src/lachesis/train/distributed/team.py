"""The leader's side: telling followers what to take part in, and hearing from them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, LachesisError, TrainingError
from lachesis.train.distributed.commands import Alive, Command, Done, End, Failed
from lachesis.train.distributed.links import Gone, Link

# Seconds: between two signs of life; that news of a failure may take; that a collective gets to end by itself then.
_BEAT_S = 5.0
_NEWS_S = 5.0
_ABORT_S = 5.0


class Team:
    """The followers, in the order of their ranks (from 1 on).

    Args:
        links: to each of them.
        limit_s: the longest that one may take to do its part, once the leader has done its own.
        abort: ends collectives that wait for a rank that is gone, for which torch knows nothing of it by itself.
    """

    def __init__(self, links: Mapping[int, Link], *, limit_s: float, abort: Callable[[], None] | None = None) -> None:
        self._links = dict(sorted(links.items()))
        self._limit_s = limit_s
        self._abort = abort
        self._inboxes: dict[int, queue.SimpleQueue[Any]] = {rank: queue.SimpleQueue() for rank in self._links}
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._troubles: dict[int, LachesisError] = {}
        self._trouble = threading.Event()
        self._ended = threading.Event()
        threads = [threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in self._links]
        for thread in [*threads, threading.Thread(target=self._beat, daemon=True)]:
            thread.start()

    @property
    def size(self) -> int:
        """All ranks, the leader included."""
        return len(self._links) + 1

    @contextmanager
    def together(self, what: str, commands: Command | Sequence[Command]) -> Iterator[list[Any]]:
        """Followers do their part of ``what`` while the leader does its own within; their answers are there after it.

        Args:
            commands: one for all, or one for each follower.

        Raises:
            TrainingError: a follower could not do its part, or is gone.
            DeadlineExceeded: it did not in time.
        """
        each = commands if isinstance(commands, Sequence) else [commands] * len(self._links)
        answers: list[Any] = []
        with self._lock:
            self._busy.set()
            try:
                for link, command in zip(self._links.values(), each, strict=True):
                    link.send(command)
                yield answers
                answers += [self._answer(rank, what) for rank in self._links]
            except Gone as error:
                raise self._told(error, what) from error
            except LachesisError:
                raise
            except Exception as error:
                self._trouble.wait(_NEWS_S)
                raise self._told(error, what) from error
            finally:
                self._busy.clear()

    def end(self) -> None:
        """Tell followers that the run is over. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        for link in self._links.values():
            with suppress(Gone):
                link.send(End())

    def close(self) -> None:
        """End, and let go of the connections. Idempotent."""
        self.end()
        for link in self._links.values():
            link.close()

    def _answer(self, rank: int, what: str) -> Any:
        name = f"{self._links[rank].peer} doing its part of {what}"
        deadline = Deadline(name, self._limit_s, "deadlines.ranks_s")
        try:
            with deadline.waiting():
                answer = self._inboxes[rank].get(timeout=deadline.remaining_s())
        except queue.Empty:
            deadline.check()
            raise DeadlineExceeded(f"{name} took longer than {self._limit_s:g} s") from None
        if isinstance(answer, Done):
            return answer.answer
        raise self._told(answer, what)

    def _told(self, error: Exception, what: str) -> Exception:
        """What to raise for an error of the leader's own part: the follower's that it comes from, if there is one."""
        self._trouble.wait(0 if isinstance(error, Gone) else _NEWS_S)
        # One that is gone makes others fail, which are heard of as soon.
        gone = [trouble for trouble in self._troubles.values() if isinstance(trouble, Gone)]
        cause = next(iter([*gone, *self._troubles.values()]), error)
        if _of_a_collective(cause):
            first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            return TrainingError(
                f"ranks have lost one another in the midst of {what}: {first}",
                remedy="see whether one of them hangs; they wait for one another for deadlines.ranks_s seconds",
            )
        if not isinstance(cause, LachesisError):
            return cause
        return TrainingError(f"{cause.message}, in the midst of {what}", remedy=cause.remedy)

    def _read(self, rank: int) -> None:
        link = self._links[rank]
        while True:
            try:
                message = link.receive()
            except Gone as error:
                if not self._ended.is_set():
                    self._note(rank, error)
                return
            if isinstance(message, Failed):
                self._note(rank, TrainingError(f"{link.peer}: {message.message}", remedy=message.remedy))
                return
            self._inboxes[rank].put(message)

    def _note(self, rank: int, trouble: LachesisError) -> None:
        self._troubles[rank] = trouble
        self._inboxes[rank].put(trouble)
        self._trouble.set()
        if self._abort is not None and self._busy.is_set() and not self._ended.wait(_ABORT_S) and self._busy.is_set():
            self._abort()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            for link in self._links.values():
                with suppress(Gone):
                    link.send(Alive())


def _of_a_collective(error: Exception) -> bool:
    """Whether torch's library of collectives raised it; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
