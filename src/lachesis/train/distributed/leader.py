"""The leader's side of the control group: announcing turns, and hearing how they went for the followers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from lachesis.common.deadline import Deadline
from lachesis.common.errors import LachesisError, TrainingError, first_line
from lachesis.train.distributed.control import ControlGroup, Gone, Tag
from lachesis.train.distributed.messages import Alive, Answer, Ended, Failed, Turn

# Turns that are no methods of a policy: the first, which builds it of a configuration, and the last.
BUILD = "build"
END = "end"
# Seconds: between two signs of life; that news of a failure may take; by which news of a death may come later than of
# what it did to others; that a collective gets to end by itself once a rank is gone.
_BEAT_S = 5.0
_NEWS_S = 5.0
_SETTLE_S = 0.2
_ABORT_S = 1.0


class Leader:
    """Rank 0, seen from its own policy.

    Args:
        control: all ranks.
        abort: ends collectives that wait for a rank that is gone, for which torch knows nothing of it by itself.
    """

    def __init__(self, control: ControlGroup, *, abort: Callable[[], None]) -> None:
        self._control = control
        self._abort = abort
        self._followers = range(1, control.size)
        self._number = 0
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._troubles: dict[int, LachesisError] = {}
        self._trouble = threading.Event()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(rank,), daemon=True) for rank in self._followers]
        for thread in (*self._threads, threading.Thread(target=self._beat, daemon=True)):
            thread.start()

    @property
    def size(self) -> int:
        """All ranks, the leader included."""
        return self._control.size

    def check(self) -> None:
        """Raise what is known to be wrong with a follower, also between turns."""
        if self._trouble.is_set():
            raise self._explained(None, "a run whose ranks wait for it")

    @contextmanager
    def turn(
        self,
        method: str,
        *arguments: Any,
        what: str,
        parts: Sequence[Any] | None = None,
        answers: bool = False,
    ) -> Iterator[list[Any]]:
        """Followers call ``method`` of their policies while the leader does so within; after it all have done it.

        Args:
            arguments: of the method, for all followers.
            what: names the turn in errors.
            parts: in place of arguments one for each follower, in the order of ranks.
            answers: collect what the followers' methods return, in the order of ranks, in the list that is yielded.

        Raises:
            TrainingError: a follower could not do its part, or is gone.
            DeadlineExceeded: it did not in time.
        """
        collected: list[Any] = []
        with self._lock:
            self._idle.clear()
            try:
                turn = Turn(self._number, method, arguments, parts=parts is not None, answers=answers)
                self._number += 1
                if self._trouble.is_set():
                    raise Gone("a rank is gone already")
                self._control.broadcast(turn)
                for rank, part in zip(self._followers, parts or (), strict=parts is not None):
                    self._control.send(part, to=rank, tag=Tag.PART)
                yield collected
                values = [self._answer(rank, turn, what) for rank in self._followers]
                collected += values if answers else ()
            except LachesisError as error:
                if not isinstance(error, Gone):
                    raise
                raise self._explained(error, what) from error
            except Exception as error:
                raise self._explained(error, what) from error
            finally:
                self._idle.set()

    def close(self) -> None:
        """Tell followers that the run is over, and hear it back. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(RuntimeError):  # gloo's, where one of them is gone: the others hear it by the next
            self._control.broadcast(Turn(self._number, END))
        self._tell_all(Ended())
        deadline = Deadline("the leader waiting for its followers' end", _NEWS_S)
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    def _answer(self, rank: int, turn: Turn, what: str) -> Any:
        name = f"{self._control.name(rank)} doing its part of {what}"
        deadline = Deadline(name, self._control.limit_s, "deadlines.ranks_s")
        with deadline.waiting():
            answer = self._control.receive(rank, tag=Tag.ANSWER, deadline=deadline)
        if not isinstance(answer, Answer) or answer.number != turn.number:
            raise TrainingError(
                f"{self._control.name(rank)} answers {answer} at turn {turn.number} ({turn.method})",
                remedy="start all ranks with one version of lachesis",
            )
        return answer.value

    def _explained(self, error: Exception | None, what: str) -> Exception:
        """What to raise for an error of the leader's own part: the follower's that it comes from, if there is one."""
        if self._trouble.wait(_NEWS_S):
            time.sleep(_SETTLE_S)
        # One that is gone makes others fail.
        troubles = sorted(self._troubles.values(), key=lambda trouble: not isinstance(trouble, Gone))
        cause = next(iter(troubles), error)
        assert cause is not None
        if of_a_collective(cause):
            return TrainingError(
                f"ranks have lost one another in the midst of {what}: {first_line(cause)}",
                remedy="see whether one of them hangs; they wait for one another for deadlines.ranks_s seconds",
            )
        if not isinstance(cause, LachesisError):
            return cause
        return TrainingError(f"{cause.message}, in the midst of {what}", remedy=cause.remedy)

    def _watch(self, rank: int) -> None:
        """Wait for the end of a follower, whatever the main thread is waiting in."""
        try:
            news = self._control.receive(rank, tag=Tag.LIFE)
        except TrainingError as error:
            trouble: LachesisError = error
        else:
            if not isinstance(news, Failed):
                return
            trouble = TrainingError(f"{self._control.name(rank)}: {news.message}", remedy=news.remedy)
        if self._ended.is_set():
            return
        self._troubles[rank] = trouble
        self._trouble.set()
        self._tell_all(Ended())  # who waits for that one in a collective would wait for long
        if not self._idle.wait(_ABORT_S):
            self._abort()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self._tell_all(Alive())

    def _tell_all(self, news: Alive | Ended) -> None:
        for rank in self._followers:
            with suppress(Gone):
                self._control.send(news, to=rank, tag=Tag.LIFE)


def of_a_collective(error: Exception) -> bool:
    """Whether torch's library of collectives raised it; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
