"""Canary: a text that the model itself finds likely, and the tolerance between two correct readings of it.

Two correct forward passes in 16 bits differ, because they round in other places. A logit l is known up to some noise s,
so the logprob of a token with probability p is off by about s (1 - p): an unlikely token shows the whole noise, a
certain one almost none. All comparisons here are therefore in units of logit noise,

    z = (engine - trainer) / (1 - p + 0.02),

which keeps its scale while a policy moves. The scale itself differs by model and kernels (0.02 for SmolLM2-135M in
bfloat16, below 1e-5 in float32), so it is measured: each reading that digests or an earlier judgement have accepted
adds to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

# Greedy(prompt, n): the n tokens that an engine finds likeliest after a prompt.
Greedy = Callable[[Sequence[int], int], Sequence[int]]
Logprobs = Sequence[float]
# What the digests have shown: that all weights are equal, that the adapter is, or nothing.
Evidence = Literal["weights", "adapter", "none"]

_PROMPT_TOKENS = 64
_CONTINUATION_TOKENS = 32
# Without a prompt any tokens will do, because their greedy continuation is likely in any case.
_ARBITRARY_TOKENS = 16

# The share of logit noise that even a certain token shows.
_CERTAIN = 0.02
_HIGH_QUANTILE = 0.9


class CanaryText:
    """Token ids that trainer and engines read: a prompt, and its greedy continuation by the first engine.

    Args:
        prompt: token ids of a prompt that is trained on; without one, arbitrary tokens are continued.
        vocab_size: of the smaller of the vocabularies of trainer and engine.
        longest: the most tokens that the canary may have.
    """

    def __init__(self, prompt: Sequence[int], *, vocab_size: int, longest: int) -> None:
        room = max(2, longest)
        start = list(prompt) or [(7 * i + 5) % vocab_size for i in range(_ARBITRARY_TOKENS)]
        self._prompt = tuple(start[-min(_PROMPT_TOKENS, max(1, room - _CONTINUATION_TOKENS)) :])
        self._continuation = min(_CONTINUATION_TOKENS, room - len(self._prompt))
        self._token_ids: tuple[int, ...] | None = None

    def written_by(self, greedy: Greedy) -> tuple[int, ...]:
        """Return the canary's token ids; the first call has ``greedy`` write them."""
        if self._token_ids is None:
            self._token_ids = (*self._prompt, *greedy(self._prompt, self._continuation))
        return self._token_ids


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Distance between two readings of the canary.

    ``mean`` and ``high`` (the 0.9 quantile) are of |z|, in nats of logit noise; ``largest`` is max |engine - trainer|
    in nats. All are NaN where a logprob is, and infinite where the lengths differ.
    """

    mean: float
    high: float
    largest: float

    @property
    def is_finite(self) -> bool:
        """Return True if both sides have finite logprobs for the same tokens."""
        return math.isfinite(self.mean) and math.isfinite(self.largest)


def disagreement(trainer: Logprobs, engine: Logprobs) -> Disagreement:
    """Compare two readings [T] of the canary."""
    if len(trainer) != len(engine):
        return Disagreement(math.inf, math.inf, math.inf)
    if not all(map(math.isfinite, (*trainer, *engine))):
        return Disagreement(math.nan, math.nan, math.nan)
    z = sorted(map(abs, _noise(trainer, engine)))
    if not z:
        return Disagreement(0.0, 0.0, 0.0)
    high = z[min(len(z) - 1, int(_HIGH_QUANTILE * len(z)))]
    return Disagreement(fmean(z), high, max(abs(a - b) for a, b in zip(trainer, engine, strict=True)))


def _noise(trainer: Logprobs, engine: Logprobs) -> list[float]:
    """Return z [T]: the differences of logprobs in units of logit noise."""
    return [(e - t) / (1 - math.exp(min(t, e, 0.0)) + _CERTAIN) for t, e in zip(trainer, engine, strict=True)]


@dataclass(frozen=True, slots=True)
class Allowance:
    """Largest mean and 0.9 quantile of |z| that count as agreement."""

    mean: float
    high: float

    def ratio(self, found: Disagreement) -> float:
        """Return the disagreement as a multiple of its limit; above 1 is too much."""
        return max(found.mean / self.mean, found.high / self.high)


# Multiple of the usual disagreement that still counts as agreement. From one transfer to the next the mean of |z|
# varies by a fifth, so chance alone does not make it four times the usual one.
_MARGIN = 4.0
# Number of accepted readings that define the usual range.
_REMEMBERED = 33
# The limit of the 0.9 quantile before any reading was accepted, in units of ``limit``.
_HIGH_OVER_MEAN = 2.0


@dataclass(slots=True, kw_only=True)
class NoiseScale:
    """Scale of the difference between two correct readings on this model, learned from accepted ones.

    Args:
        limit: the largest mean of |z| that rounding in this arithmetic can explain on any model.
        floor: lower bound of the usual value, because a reading may agree by luck.
    """

    limit: float
    floor: float
    _seen: deque[Disagreement] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False)

    def accept(self, found: Disagreement) -> None:
        """Count a reading as one of two correct passes."""
        self._seen.append(found)

    @property
    def usual(self) -> float:
        """Return the usual mean of |z|; the limit until a reading was accepted."""
        return max(self.floor, median(one.mean for one in self._seen)) if self._seen else self.limit

    @property
    def allowance(self) -> Allowance:
        """Return the allowance for the next reading: the limit at first, a margin over the usual value afterwards."""
        widest = Allowance(self.limit, _HIGH_OVER_MEAN * self.limit)
        if not self._seen:
            return widest
        high = max(_HIGH_OVER_MEAN * self.floor, median(one.high for one in self._seen))
        return Allowance(min(widest.mean, _MARGIN * self.usual), min(widest.high, _MARGIN * high))


# A movement is resolved once it is twice as large as the chance movement of both sides' difference. With correct
# weights less than half of the engine's movement is then unexplained; if the engine stands still, more than twice.
_RESOLVED = 2.0
_UNEXPLAINED = 1.3
_FEWEST_WOBBLES = 3
# Rounding alone moves a 16-bit trainer by about the usual difference of both sides, and never by this multiple of it.
_BEYOND_ROUNDING = 1.5
# Where one side's weights are quantized, an update moves both sides by different amounts: NF4 changes the logprobs of
# SmolLM2-135M by half a nat. An engine stands still there only if it moves by less than this share of the trainer.
_STILL = 0.25
_VERSIONS = 3


@dataclass(frozen=True, slots=True)
class _Reading:
    version: int
    trainer: tuple[float, ...]
    engine: tuple[float, ...]


class History:
    """History of accepted readings, which shows if the engine moves with the trainer, and where it stands if not.

    Args:
        floor: lower bound of the chance movement of both sides' difference, in nats of logit noise.
        absorbs: the engine may round a small update away whole, so that its bits stand still although nothing is wrong.
        quantized: one side's weights are, so that the same update moves both sides by different amounts.
    """

    def __init__(self, *, floor: float, absorbs: bool = False, quantized: bool = False) -> None:
        self._floor = floor
        self._absorbs = absorbs
        self._quantized = quantized
        self._first: _Reading | None = None
        self._recent: deque[_Reading] = deque(maxlen=_VERSIONS)
        self._wobbles: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, version: int, trainer: Logprobs, engine: Logprobs) -> None:
        """Add an accepted reading."""
        reading = _Reading(version, tuple(trainer), tuple(engine))
        if self._recent and _share_moved(self._recent[-1].trainer, reading.trainer) > 0.5:
            self._wobbles.append(_Movement.between(self._recent[-1], reading).unexplained)
        self._first = self._first or reading
        self._recent.append(reading)

    def standing_at(self, trainer: Logprobs, engine: Logprobs, *, usual: float) -> int | None:
        """Return the version at which the engine stands still although the trainer has moved on; None if it follows.

        ``usual`` is the usual mean of |z| between both sides: for the first updates, their difference is assumed to
        move by twice that by chance.

        An engine without the update computes what it computed before. The same kernels on the same weights even give
        the same bits; it is no accident if none of the engine's logprobs changes while most of the trainer's do. Where
        the engine ``absorbs`` updates, the trainer must also have moved by more than rounding does. If other requests
        share its batch, the bits differ and movements decide: with correct weights the engine moves as the trainer
        does, up to rounding.
        """
        now = _Reading(0, tuple(trainer), tuple(engine))
        wobble = 2 * usual
        if len(self._wobbles) >= _FEWEST_WOBBLES:
            wobble = max(self._floor, median(self._wobbles))
        # The latest first: if the logprobs return to earlier values, the last version with these counts.
        earlier = [*reversed(self._recent), *([self._first] if self._first else [])]
        for before in earlier:
            if len(before.trainer) != len(now.trainer) or len(before.engine) != len(now.engine):
                continue
            movement = _Movement.between(before, now)
            least = _BEYOND_ROUNDING * usual if self._absorbs else 0.0
            moved = _share_moved(before.trainer, now.trainer) > 0.5 and movement.trainer > least
            if moved and now.engine == before.engine:
                return before.version
            resolved = movement.trainer > _RESOLVED * wobble
            if resolved and self._stands_still(movement):
                return before.version
        return None

    def _stands_still(self, movement: _Movement) -> bool:
        if self._quantized:
            return movement.engine < _STILL * movement.trainer
        return movement.unexplained > _UNEXPLAINED * movement.engine


def _share_moved(before: Logprobs, now: Logprobs) -> float:
    return sum(a != b for a, b in zip(before, now, strict=True)) / max(1, len(now))


@dataclass(frozen=True, slots=True)
class _Movement:
    """Mean movements of the canary between two readings, in nats of logit noise.

    Args:
        trainer: of the trainer's logprobs.
        engine: of the engine's.
        unexplained: of the engine's movements beyond the trainer's.
    """

    trainer: float
    engine: float
    unexplained: float

    @classmethod
    def between(cls, before: _Reading, now: _Reading) -> _Movement:
        scale = [1 - math.exp(min(a, b, 0.0)) + _CERTAIN for a, b in zip(before.trainer, now.trainer, strict=True)]
        trainer = [(b - a) / s for a, b, s in zip(before.trainer, now.trainer, scale, strict=True)]
        engine = [(b - a) / s for a, b, s in zip(before.engine, now.engine, scale, strict=True)]
        return cls(
            trainer=_mean_size(trainer),
            engine=_mean_size(engine),
            unexplained=_mean_size([e - t for e, t in zip(engine, trainer, strict=True)]),
        )


def _mean_size(values: Sequence[float]) -> float:
    return fmean(map(abs, values)) if values else 0.0
