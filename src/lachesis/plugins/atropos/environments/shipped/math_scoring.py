"""Comparison of mathematical answers by math-verify, whose time limits need the main thread of a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lachesis.common.errors import DataError, DeadlineExceeded, EngineError
from lachesis.process.workers import WorkerError, WorkerPool
from lachesis.rollouts.rewards.mathematics import same_answer

_LIMIT_S = 10.0
_COMPARE_S = 5.0
_BOXED = "\\boxed{"


class MathScorer:
    """Scorer of answers: 1 if the last boxed expression equals the right answer, else 0.

    An answer that cannot be compared within ``limit_s`` seconds is not proved right: it scores 0, and is counted
    in ``timeouts``.

    Args:
        workers: how many processes.
        limit_s: seconds for one answer.
    """

    def __init__(self, *, workers: int = 1, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s
        self._count = workers
        self._free = asyncio.Semaphore(workers)
        self._pool: WorkerPool | None = None
        self.timeouts = 0

    async def start(self) -> None:
        """Start the processes.

        Raises:
            DependencyError: math-verify is not installed.
            EngineError: they do not start.
        """
        self._pool = await asyncio.to_thread(self._started)

    async def score(self, gold: str, answers: Sequence[str]) -> list[float]:
        """Return a score for each answer.

        Raises:
            DataError: the right answer is not a mathematical expression.
        """
        async with self._free:
            scores = await self._ask(gold, answers, limit_s=self._limit_s + 0.1 * len(answers))
            if scores is None and len(answers) > 1:  # one of them hangs, and only that one has no score
                singly = [await self._ask(gold, [answer], limit_s=self._limit_s) for answer in answers]
                scores = [one[0] if one else 0.0 for one in singly]
                self.timeouts += sum(one is None for one in singly)
            elif scores is None:
                self.timeouts += 1
                scores = [0.0]
            return scores

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    def _started(self) -> WorkerPool:
        try:
            pool = WorkerPool(self._count, compare, "1", [r"\boxed{1}"], name="maths workers", quiet=True)
        except (WorkerError, DeadlineExceeded, ImportError) as error:
            raise EngineError(f"the process that compares answers did not start: {error}") from error
        if pool.initialized != [1.0]:
            pool.close()
            raise EngineError(
                f"math-verify does not find that 1 equals 1: {pool.initialized}", remedy="reinstall math-verify"
            )
        return pool

    async def _ask(self, gold: str, answers: Sequence[str], *, limit_s: float) -> list[float] | None:
        """Return the scores; ``None`` if the process hung or died."""
        assert self._pool is not None
        (scores,) = await asyncio.to_thread(self._pool.run, compare, [(gold, list(answers))], timeout_s=limit_s)
        if isinstance(scores, WorkerError):
            return None
        if scores is None:
            raise DataError(f"the right answer {gold!r} is not a mathematical expression", remedy="correct the data")
        return scores


def compare(gold: str, answers: Sequence[str]) -> list[float] | None:
    """Score each answer, in a worker process; ``None`` if the right answer is not a mathematical expression."""
    scores = [same_answer(last_boxed(answer), f"${gold}$", _COMPARE_S) for answer in answers]
    known = [score for score in scores if score is not None]
    return known if len(known) == len(scores) else None


def last_boxed(text: str) -> str:
    r"""Return the last ``\boxed{...}`` of a text, braces within it balanced; empty if there is none."""
    start = text.rfind(_BOXED)
    depth = 0
    for at in range(start + len(_BOXED) - 1, len(text)) if start >= 0 else ():
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start : at + 1]
    return ""
