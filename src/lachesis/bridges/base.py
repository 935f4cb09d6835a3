"""The contract of a bridge: after an update the engine has the trainer's weights, proved, or an error says so."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from lachesis.bridges.proof import SyncProof
from lachesis.config.capabilities import BridgeCapabilities
from lachesis.deadline import Deadline
from lachesis.engines.base import Engine

PolicyT = TypeVar("PolicyT")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What the last transfer cost and showed."""

    version: int
    seconds: float
    canary_error: float | None


class Bridge(ABC, Generic[PolicyT]):
    """Pause, transfer, confirm, resume: the envelope is here, a transport fills in the steps."""

    capabilities: BridgeCapabilities

    def __init__(self, *, proof: SyncProof | None, sync_s: float | None = None) -> None:
        """``sync_s``: the longest a transfer with its proof may take, in seconds."""
        self.proof = proof
        self._sync_s = sync_s
        self.last_report: SyncReport | None = None

    @abstractmethod
    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        """Build the policy, on storage of the bridge's choosing where it shares weights with the engine."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine whose weights this bridge keeps; set once :meth:`prepare` has run."""

    @abstractmethod
    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        """Bring the trainer's current weights to the engine and give them ``version``, within ``deadline``."""

    def sync(self, version: int) -> SyncReport:
        """Transfer and prove outside of an update: before the first step and after a resume.

        Raises:
            StaleWeights: the engine does not compute what the trainer computes.
            DeadlineExceeded, EngineError: the transfer failed.
        """
        with self.update_to(version):
            pass
        assert self.last_report is not None
        return self.last_report

    @contextmanager
    def update_to(self, version: int) -> Iterator[None]:
        """Everything that changes weights happens inside. Leaving always resumes the engine.

        Entering pauses generation where engine and trainer share storage, for then the optimizer step is the
        transfer. Raises as :meth:`sync`; an error of the body passes through, and nothing is transferred.
        """
        if self.capabilities.shares_storage:
            self.engine.pause()
        try:
            yield
            started = time.perf_counter()
            deadline = Deadline(
                name=f"the transfer of weight version {version} and its proof",
                limit_s=self._sync_s,
                setting="deadlines.sync_s",
            )
            self._transfer(version, deadline=deadline)
            error = self.proof.confirm(version=version) if self.proof is not None else None
            deadline.check()
            self.last_report = SyncReport(version=version, seconds=time.perf_counter() - started, canary_error=error)
        finally:
            if self.capabilities.shares_storage:
                self.engine.resume()

    @abstractmethod
    def close(self) -> None:
        """Stop and delete what the bridge made. Idempotent."""
