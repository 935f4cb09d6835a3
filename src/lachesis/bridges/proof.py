"""Proof of sync: the engine's logprobs of a fixed prompt are the trainer's, and move when the weights do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lachesis.errors import StaleWeights
from lachesis.types import CanaryReading

# Largest absolute difference of a canary logprob between two code paths over the same weights, by dtype.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}


class SyncProof:
    """Compares canary readings of trainer and engine after each transfer.

    Args:
        token_ids: the canary prompt.
        trainer: reads the canary under the trainer's weights, logprobs as in CanaryReading.
        engine: reads it under the engine's.
        session_id: the engine session this run works with.
        dtype: of the weights; sets the tolerance.
    """

    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        trainer: Callable[[Sequence[int]], Sequence[float]],
        engine: Callable[[Sequence[int]], CanaryReading],
        session_id: str,
        dtype: str,
    ) -> None:
        self._token_ids = tuple(token_ids)
        self._trainer = trainer
        self._engine = engine
        self._session_id = session_id
        self._tolerance = TOLERANCE[dtype]
        self._last: tuple[Sequence[float], Sequence[float]] | None = None

    def confirm(self, *, version: int) -> float:
        """The largest difference in nats.

        Raises:
            StaleWeights: another session or version answers, the logprobs differ by more than the tolerance,
                or the trainer's moved by more than it and the engine's did not.
        """
        reading = self._engine(self._token_ids)
        if reading.session_id != self._session_id:
            raise StaleWeights(
                f"the engine is of session {reading.session_id}, this run works with {self._session_id}",
                remedy="stop the engine that another run left over, or point the run at its own",
            )
        if reading.version != version:
            raise StaleWeights(
                f"the engine serves weight version {reading.version}, the trainer is at {version}",
                remedy="the transfer did not arrive; look at the engine's log",
            )
        expected = self._trainer(self._token_ids)
        error = largest_difference(expected, reading.logprobs)
        # A NaN is no agreement: the comparison is written so that it fails.
        if not error <= self._tolerance:
            raise StaleWeights(
                f"after the transfer of version {version} the engine's canary logprobs differ from the "
                f"trainer's by up to {error:.4g} (allowed {self._tolerance:g}): "
                f"engine {_brief(reading.logprobs)}, trainer {_brief(expected)}",
                remedy="part of the weights did not arrive; look at the engine's log",
            )
        self._check_moved(expected, reading.logprobs, version=version)
        self._last = (tuple(expected), tuple(reading.logprobs))
        return error

    def _check_moved(self, trainer: Sequence[float], engine: Sequence[float], *, version: int) -> None:
        if self._last is None:
            return
        moved = largest_difference(trainer, self._last[0])
        if moved > self._tolerance and tuple(engine) == tuple(self._last[1]):
            raise StaleWeights(
                f"with version {version} the trainer's canary logprobs moved by {moved:.4g} and the engine's "
                "not at all",
                remedy="the engine still serves the weights before; look at its log",
            )


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """max |a - b|, NaN if any is NaN, infinite if the lengths differ."""
    if len(a) != len(b):
        return float("inf")
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return float("nan") if any(d != d for d in differences) else max(differences, default=0.0)


def _brief(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.4f}" for value in values[:4])
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"
