"""Comparing mathematical answers by math-verify, in processes that may hang and are then replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import lachesis
from lachesis.common.errors import DataError, DependencyError, EngineError

_PROGRAM = "import sys; sys.path.append({root!r}); from lachesis.environments.shipped.math_worker import main; main()"
_START_S = 120.0
_LIMIT_S = 10.0
_LINE = 1 << 24


class MathScorer:
    """Scores answers: 1 where the last boxed expression equals the right answer, else 0.

    An answer that cannot be compared within ``limit_s`` seconds is not shown to be right: it scores 0, and is counted
    in ``timeouts``.

    Args:
        workers: how many processes.
        limit_s: seconds for one answer.
    """

    def __init__(self, *, workers: int = 1, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers = [_Worker() for _ in range(workers)]
        self.timeouts = 0

    async def start(self) -> None:
        """Start the processes.

        Raises:
            DependencyError: math-verify is not installed.
            EngineError: they do not start.
        """
        for worker in self._workers:
            await worker.start()
            self._idle.put_nowait(worker)

    async def score(self, gold: str, answers: Sequence[str]) -> list[float]:
        """A score for each answer.

        Raises:
            DataError: the right answer is no mathematical expression.
        """
        worker = await self._idle.get()
        try:
            scores = await self._ask(worker, gold, answers, limit_s=self._limit_s + 0.1 * len(answers))
            if scores is None and len(answers) > 1:
                # One of them hangs: it alone has no score.
                singly = [await self._ask(worker, gold, [answer], limit_s=self._limit_s) for answer in answers]
                scores = [one[0] if one else 0.0 for one in singly]
                self.timeouts += sum(one is None for one in singly)
            elif scores is None:
                self.timeouts += 1
                scores = [0.0]
            return scores
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            await worker.stop()

    async def _ask(self, worker: _Worker, gold: str, answers: Sequence[str], *, limit_s: float) -> list[float] | None:
        """The scores; ``None`` where the process hung or died and was replaced."""
        try:
            async with asyncio.timeout(limit_s):
                reply = await worker.ask({"gold": gold, "answers": list(answers)})
        except (TimeoutError, EOFError):
            await worker.stop()
            await worker.start()
            return None
        except BaseException:
            # Cancelled half-way: its answer would be taken for that of the next question.
            await worker.stop()
            await worker.start()
            raise
        if reply["scores"] is None:
            raise DataError(f"the right answer {gold!r} is no mathematical expression", remedy="correct the data")
        return reply["scores"]


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        root = str(Path(lachesis.__file__).parents[1])
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROGRAM.format(root=root), stdin=pipe, stdout=pipe, stderr=pipe, limit=_LINE
        )
        try:
            async with asyncio.timeout(_START_S):
                reply = await self.ask({"gold": "1", "answers": ["\\boxed{1}"]})
        except (TimeoutError, EOFError) as error:
            said = await self._last_words()
            await self.stop()
            if "No module named" in said:
                raise DependencyError(
                    f"answers cannot be compared: {said}", remedy="pip install math-verify"
                ) from error
            raise EngineError(f"the process that compares answers did not start: {said or error}") from error
        if reply["scores"] != [1.0]:
            raise EngineError(f"math-verify does not find that 1 is 1: {reply}", remedy="install math-verify anew")

    async def ask(self, question: dict[str, object]) -> dict[str, list[float] | None]:
        """The answer to a question. Raises EOFError where the process is gone."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        line = await process.stdout.readline()
        if not line:
            raise EOFError("it ended")
        return json.loads(line)

    async def stop(self) -> None:
        """Kill the process, if it is there."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._process = None

    async def _last_words(self) -> str:
        """What the process said last, after its end."""
        process = self._process
        if process is None or process.stderr is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        _, said = await process.communicate()
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
