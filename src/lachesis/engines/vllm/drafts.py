"""Speculative decoding in vLLM: n-gram drafts are handed out only where they make generation faster.

What they are worth depends on how many sequences run: with few of them the GPU waits for memory, and verifying four
tokens costs as much as computing one; with many it does not. So it is measured, for each size of the batch by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.engines.serving.bodies import Refused

# Steps of one kind that are measured, and how long the better kind is kept until both are measured anew: the policy
# changes, and with it how often its tokens are guessed.
WINDOW_STEPS = 16
KEPT_STEPS = 2000
# Mean difference, in nats, of one logprob computed token by token and at once. In 16 bits a hundredth is usual.
_DRAFTED_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """What one step of the engine generated, and the seconds until the next one began."""

    tokens: int
    seconds: float


def tokens_per_second(steps: Sequence[StepSpeed]) -> float:
    """Of steps of one kind; the median of their seconds, as a pause between two of them says nothing about either."""
    return statistics.fmean(step.tokens for step in steps) / statistics.median(step.seconds for step in steps)


def drafts_pay(drafted: Sequence[StepSpeed], plain: Sequence[StepSpeed]) -> bool:
    """Whether steps with drafts generate at least as many tokens a second as those without."""
    return tokens_per_second(drafted) >= tokens_per_second(plain)


@dataclass(slots=True)
class _Size:
    """What is known of batches of one size. ``verdict`` is ``None`` while it is measured."""

    drafted: list[StepSpeed] = field(default_factory=list)
    plain: list[StepSpeed] = field(default_factory=list)
    verdict: bool | None = None
    kept: int = 0

    @property
    def wants_drafts(self) -> bool:
        return len(self.drafted) < WINDOW_STEPS if self.verdict is None else self.verdict

    def add(self, step: StepSpeed, *, drafting: bool) -> None:
        if self.verdict is not None:
            self.kept += 1
            if self.kept >= KEPT_STEPS:
                self.drafted, self.plain, self.verdict, self.kept = [], [], None, 0
            return
        of_kind = self.drafted if drafting else self.plain
        if len(of_kind) < WINDOW_STEPS:
            of_kind.append(step)
        if len(self.drafted) == len(self.plain) == WINDOW_STEPS:
            self.verdict = drafts_pay(self.drafted, self.plain)


class DraftSwitch:
    """Says after each step whether the next one gets drafts; n to 2n - 1 sequences, n a power of 2, are of one size.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._began = 0.0
        self._running = 0
        self._tokens = 0
        self._decodes = False
        self._drafting = self._before = True

    @property
    def drafting(self) -> bool:
        """Whether drafts are made for the step that comes next."""
        return self._drafting

    def begin(self, running: int, *, decodes: bool) -> None:
        """A step begins, with ``running`` sequences; ``decodes`` where none of them computes a prompt."""
        now = self._clock()
        # Drafts for this step were made in the one before: where the kind changes, that one was of neither.
        if self._decodes and self._drafting is self._before:
            self._size(self._running).add(StepSpeed(self._tokens, now - self._began), drafting=self._before)
        self._began, self._running, self._decodes, self._before = now, running, decodes, self._drafting

    def end(self, tokens: int) -> None:
        """Its ``tokens`` are there; what the next one gets is decided now."""
        self._tokens = tokens
        self._drafting = self._size(self._running).wants_drafts

    def _size(self, running: int) -> _Size:
        return self._sizes.setdefault(running.bit_length(), _Size())


class WorkerDrafts:
    """Puts a :class:`DraftSwitch` into vLLM's worker. Without drafts a step is what it is without speculation.

    Args:
        worker: vLLM's, with n-gram drafts, which keep nothing from one step to the next.
    """

    def __init__(self, worker: Any, switch: DraftSwitch | None = None) -> None:
        self._switch = switch or DraftSwitch()
        runner = worker.model_runner
        self._execute, self._propose = worker.execute_model, runner.propose_draft_token_ids
        worker.execute_model, runner.propose_draft_token_ids = self._execute_model, self._propose_draft_token_ids

    def _execute_model(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        counts = scheduled.num_scheduled_tokens
        drafts = scheduled.scheduled_spec_decode_tokens
        if counts:
            alone = all(count == 1 + len(drafts.get(name, ())) for name, count in counts.items())
            self._switch.begin(len(counts), decodes=alone and not scheduled.scheduled_new_reqs)
        return self._execute(scheduled, *arguments, **options)

    def _propose_draft_token_ids(
        self, scheduled: Any, sampled: Sequence[Sequence[int]], *rest: Any, **options: Any
    ) -> Any:
        """vLLM calls it at the end of a step with the tokens that were sampled, a list for each sequence."""
        self._switch.end(sum(map(len, sampled)))
        if self._switch.drafting:
            return self._propose(scheduled, sampled, *rest, **options)
        return [[] for _ in sampled]


def check_drafted(sampled: Sequence[float], read: Sequence[float], *, kind: str) -> None:
    """Raise Refused unless logprobs [T] that came with sampled tokens are those [T] that the model has for them.

    ``kind`` names the engine.
    """
    off = statistics.fmean(abs(one - other) for one, other in zip(sampled, read, strict=True))
    if not off <= _DRAFTED_TOLERANCE:  # nor where it is NaN
        raise Refused(
            f"with speculative decoding {kind} samples from another policy than the model: logprobs of its tokens are "
            f"{off:.2g} nats off those that the model gives them, where {_DRAFTED_TOLERANCE:g} would do",
            remedy="remove engine.speculative (--speculative-config)",
        )
