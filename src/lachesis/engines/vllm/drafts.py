"""Speculative decoding in vLLM: drafts are handed out only where they make generation faster.

What they are worth depends on how many sequences run: with few of them the GPU waits for memory, and verifying four
tokens costs as much as computing one; with many it does not. So it is measured, for each size of the batch by itself,
and again now and then, because how often the policy's tokens are guessed changes as it learns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lachesis.engines.serving.backend import DraftVerdict
from lachesis.engines.serving.bodies import Refused
from lachesis.engines.vllm.logprobs import once_there

# Steps of one kind that are measured, and how long the better kind is kept until both are measured anew.
WINDOW_STEPS = 32
KEPT_STEPS = 2000
# By so much the other kind has to be faster: what two measurements of the same differ by changes nothing.
MARGIN = 0.03
# Methods of vLLM's whose drafts are scheduled when they are there, and not ahead, and cost no pass of another model.
SWITCHED = ("ngram", "suffix")
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


def drafts_pay(*, drafted: float, plain: float, drafting: bool) -> bool:
    """Whether drafts are to be made, given tokens a second with and without them.

    Args:
        drafting: whether they are made now; that changes only where the other kind is faster by MARGIN.
    """
    return drafted * (1 + MARGIN) >= plain if drafting else drafted >= plain * (1 + MARGIN)


@dataclass(slots=True)
class _Size:
    """What is known of batches of one size: steps of both kinds while it is measured, then the better kind."""

    drafting: bool = True
    measuring: bool = True
    drafted: list[StepSpeed] = field(default_factory=list)
    plain: list[StepSpeed] = field(default_factory=list)
    kept: int = 0

    @property
    def wants_drafts(self) -> bool:
        return len(self.drafted) < WINDOW_STEPS if self.measuring else self.drafting

    def add(self, step: StepSpeed, *, drafted: bool, sequences: int) -> DraftVerdict | None:
        """Take a step into account. The verdict, if it was the last one that had to be measured."""
        if not self.measuring:
            self.kept += 1
            if self.kept >= KEPT_STEPS:
                self.drafted, self.plain, self.measuring, self.kept = [], [], True, 0
            return None
        of_kind = self.drafted if drafted else self.plain
        if len(of_kind) < WINDOW_STEPS:
            of_kind.append(step)
        if len(self.drafted) < WINDOW_STEPS or len(self.plain) < WINDOW_STEPS:
            return None
        rates = tokens_per_second(self.drafted), tokens_per_second(self.plain)
        self.drafting = drafts_pay(drafted=rates[0], plain=rates[1], drafting=self.drafting)
        self.measuring = False
        return DraftVerdict(sequences, self.drafting, *rates)


class DraftSwitch:
    """Says in each step whether the next one gets drafts; n to 2n - 1 sequences, n a power of 2, are of one size.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._verdicts: dict[int, DraftVerdict] = {}
        self._steps = self._drafted_steps = 0
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
            self._add(StepSpeed(self._tokens, now - self._began))
        self._began, self._running, self._decodes, self._before = now, running, decodes, self._drafting
        self._drafting = self._size(running).wants_drafts
        self._steps += 1
        self._drafted_steps += self._before

    def end(self, tokens: int) -> None:
        """Its ``tokens`` are there."""
        self._tokens = tokens

    def report(self) -> dict[str, Any]:
        """Steps since the start, those among them that drafts were made for, and verdicts, the latest last."""
        verdicts = [asdict(verdict) for verdict in self._verdicts.values()]
        return {"steps": self._steps, "drafted_steps": self._drafted_steps, "verdicts": verdicts}

    def _add(self, step: StepSpeed) -> None:
        bits = self._running.bit_length()
        verdict = self._size(self._running).add(step, drafted=self._before, sequences=1 << (bits - 1))
        if verdict is not None:
            self._verdicts.pop(bits, None)
            self._verdicts[bits] = verdict

    def _size(self, running: int) -> _Size:
        return self._sizes.setdefault(running.bit_length(), _Size())


class WorkerDrafts:
    """Puts a :class:`DraftSwitch` into vLLM's worker. Without drafts a step is what it is without speculation.

    Args:
        worker: vLLM's, with drafts that its engine asks for after each step.
        forgetful: making drafts keeps nothing from one step to the next, so that it can be left out.
    """

    def __init__(self, worker: Any, *, forgetful: bool, switch: DraftSwitch | None = None) -> None:
        self.switch = switch or DraftSwitch()
        self._execute, self._sample, self._take = (
            worker.execute_model, worker.sample_tokens, worker.take_draft_token_ids,
        )  # fmt: skip
        worker.execute_model, worker.sample_tokens = self._execute_model, self._sample_tokens
        worker.take_draft_token_ids = self._take_draft_token_ids
        runner = worker.model_runner
        # vLLM's second model runner makes them on the GPU, where that costs next to nothing.
        if forgetful and hasattr(runner, "propose_draft_token_ids"):
            self._propose = runner.propose_draft_token_ids
            runner.propose_draft_token_ids = self._propose_draft_token_ids

    def _execute_model(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        counts = scheduled.num_scheduled_tokens
        drafts = scheduled.scheduled_spec_decode_tokens
        if counts:
            alone = all(count == 1 + len(drafts.get(name, ())) for name, count in counts.items())
            self.switch.begin(len(counts), decodes=alone and not scheduled.scheduled_new_reqs)
        return self._execute(scheduled, *arguments, **options)

    def _sample_tokens(self, *arguments: Any, **options: Any) -> Any:
        output = self._sample(*arguments, **options)
        return output if output is None else once_there(output, self._count)

    def _count(self, output: Any) -> Any:
        self.switch.end(sum(map(len, output.sampled_token_ids)))
        return output

    def _propose_draft_token_ids(
        self, scheduled: Any, sampled: Sequence[Sequence[int]], *rest: Any, **options: Any
    ) -> Any:
        """vLLM calls it at the end of a step with the tokens that were sampled, a list for each sequence."""
        if self.switch.drafting:
            return self._propose(scheduled, sampled, *rest, **options)
        return [[] for _ in sampled]

    def _take_draft_token_ids(self) -> Any:
        """vLLM's scheduler asks for what the next step is to verify."""
        return self._take() if self.switch.drafting else None


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
