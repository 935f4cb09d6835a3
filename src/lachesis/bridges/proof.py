"""Proof of sync: the engine holds the trainer's bytes, computes its logprobs, and moves when the weights do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from lachesis.common.errors import StaleWeights
from lachesis.common.types import CanaryReading
from lachesis.engines.base import largest_difference

# Largest absolute difference of a canary logprob between two code paths over the same weights, by dtype.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
# Of a trainer whose base weights are quantized and an engine whose are not: int8 moves a weight by about 0.6% of the
# weights' deviation, NF4 by 9%. The transfer itself is then proved by the adapter's digests.
QUANTIZED_TOLERANCE = {"none": 0.0, "int8": 0.5, "nf4": 4.0}

Digests = Callable[[], Mapping[str, int]]


class SyncProof:
    """Compares trainer and engine after each transfer.

    The canary shows that the engine computes with the weights, whatever its kernels; digests show that each
    tensor arrived bit for bit, also where an update is far below what a 16-bit forward pass resolves.

    Args:
        token_ids: the canary prompt.
        trainer: reads the canary under the trainer's weights, logprobs as in CanaryReading.
        engine: reads it under the engine's.
        session_id: the engine session this run works with.
        dtype: of the weights; sets the tolerance.
        quantization: of the trainer's base weights where the engine has them unquantized; widens the tolerance.
        trainer_digests: digest by name of each tensor that was to be transferred, as the engine should hold it.
        engine_digests: the same of what the engine holds; both or neither are given.
        concurrent: read engine and trainer at the same time, for an engine with a model of its own.
    """

    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        trainer: Callable[[Sequence[int]], Sequence[float]],
        engine: Callable[[Sequence[int]], CanaryReading],
        session_id: str,
        dtype: str,
        quantization: str = "none",
        trainer_digests: Digests = dict,
        engine_digests: Digests = dict,
        concurrent: bool = False,
    ) -> None:
        self._token_ids = tuple(token_ids)
        self._trainer = trainer
        self._engine = engine
        self._session_id = session_id
        self._tolerance = max(TOLERANCE[dtype], QUANTIZED_TOLERANCE[quantization])
        self._trainer_digests = trainer_digests
        self._engine_digests = engine_digests
        self._concurrent = concurrent
        self._last: tuple[Sequence[float], Sequence[float]] | None = None

    def confirm(self, *, version: int) -> float:
        """The largest difference of a canary logprob, in nats.

        Raises:
            StaleWeights: another session or version answers, a tensor is missing or differs, the logprobs differ
                by more than the tolerance, or the trainer's moved by more than it and the engine's did not.
        """
        (reading, theirs), (expected, ours) = self._read()
        self._check_identity(reading, version=version)
        _check_digests(ours, theirs, version=version)
        error = largest_difference(expected, reading.logprobs)
        # A NaN is no agreement: the comparison is written so that it fails.
        if not error <= self._tolerance:
            raise StaleWeights(
                f"after the transfer of version {version} the engine's canary logprobs differ from the "
                f"trainer's by up to {error:.4g} (allowed {self._tolerance:g}): "
                f"engine {_brief(reading.logprobs)}, trainer {_brief(expected)}",
                remedy="part of the weights did not arrive, or the weights diverge so far that two correct "
                "forward passes disagree; look at the engine's log and at grad_norm",
            )
        self._check_moved(expected, reading.logprobs, version=version)
        self._last = (tuple(expected), tuple(reading.logprobs))
        return error

    def _read(self) -> tuple[tuple[CanaryReading, Mapping[str, int]], tuple[Sequence[float], Mapping[str, int]]]:
        """What the engine says and what the trainer says: canary and digests of each."""
        if not self._concurrent:
            return (self._engine(self._token_ids), self._engine_digests()), self._ask_trainer()
        # Most of either is waiting, for the wire or for the device.
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="proof") as pool:
            reading, digests = pool.submit(self._engine, self._token_ids), pool.submit(self._engine_digests)
            trainer = self._ask_trainer()
            return (reading.result(), digests.result()), trainer

    def _ask_trainer(self) -> tuple[Sequence[float], Mapping[str, int]]:
        return self._trainer(self._token_ids), self._trainer_digests()

    def _check_identity(self, reading: CanaryReading, *, version: int) -> None:
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


def _check_digests(ours: Mapping[str, int], theirs: Mapping[str, int], *, version: int) -> None:
    """Every tensor of ``ours`` is in ``theirs`` with the same digest."""
    missing = [name for name in ours if name not in theirs]
    different = [name for name, digest in ours.items() if name in theirs and theirs[name] != digest]
    if not missing and not different:
        return
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("are not the trainer's", different), ("are not there", missing))
        if names
    ]
    raise StaleWeights(
        f"after the transfer of version {version}, of {len(ours)} tensors in the engine {' and '.join(parts)}",
        remedy="the transfer arrived in part or went to other tensors; look at the engine's log",
    )


def _brief(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.4f}" for value in values[:4])
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"
