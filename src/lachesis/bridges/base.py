"""Contract of a bridge: after an update the engine has the trainer's weights, proved, or an error says so."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lachesis.bridges.proof import Proof
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError, StaleWeights
from lachesis.config.schema import BridgeCapabilities
from lachesis.engines.base import Engine, PauseMode

logger = logging.getLogger("lachesis")

PolicyT = TypeVar("PolicyT")
T = TypeVar("T")


class EngineLeftOut(EngineError):
    """Error for one of several engines that failed in a transfer and counts as dead; the others continue."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Cost and result of the last transfer.

    ``seconds`` are from the end of the optimizer step until the engine serves ``version``, ``proof_seconds`` what the
    proof took after that. ``canary_error`` is in nats and ``canary_ratio`` a multiple of the limit; both are ``None``
    without proof. An engine that sleeps while the trainer computes took ``sleep_seconds`` to fall asleep and, as part
    of ``seconds``, ``wake_seconds`` to wake up. ``engines`` has the seconds that each of several engines took to
    receive, ``ranks`` the work of each of several sending ranks.
    """

    version: int
    seconds: float
    proof_seconds: float
    canary_error: float | None
    canary_ratio: float | None = None
    sleep_seconds: float | None = None
    wake_seconds: float | None = None
    engines: Mapping[str, float] = field(default_factory=dict[str, float])
    ranks: Mapping[int, RankSent] = field(default_factory=dict[int, "RankSent"])


@dataclass(frozen=True, slots=True)
class RankSent:
    """Work of a trainer's rank in a transfer: it gathered for others and sent ``num_bytes`` in ``seconds``.

    ``most_under_way`` is the maximum of bytes in flight.
    """

    seconds: float
    num_bytes: int
    most_under_way: int


class Bridge(ABC, Generic[PolicyT]):
    """Bridge that pauses, transfers, confirms and resumes; subclasses fill in the transfer."""

    capabilities: BridgeCapabilities

    def __init__(
        self,
        *,
        sync_s: float | None = None,
        every_steps: int = 1,
        pause_mode: PauseMode = "keep",
    ) -> None:
        """Set the options that all bridges have.

        Args:
            sync_s: the longest a transfer with its proof may take, in seconds.
            every_steps: transfer every N versions.
            pause_mode: treatment of requests in flight if engine and trainer share storage.
        """
        self.proof: Proof | None = None  # made in :meth:`prepare`, if one is wanted
        self._sync_s = sync_s
        self._every_steps = every_steps
        self._pause_mode: PauseMode = pause_mode
        self._policy: PolicyT | None = None
        self.last_report: SyncReport | None = None
        self._slept: float | None = None
        # What transports note about the current transfer, or the last one.
        self._engine_seconds: dict[str, float] = {}
        self._rank_sent: dict[int, RankSent] = {}
        self.version: int = 0  # of the trainer's weights; the engine's lags behind it between transfers

    @abstractmethod
    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        """Build the policy, on storage that the bridge chooses if it shares weights with the engine."""

    @property
    def policy(self) -> PolicyT:
        """Return the policy whose weights travel; set once :meth:`prepare` has run."""
        assert self._policy is not None, "prepare() builds the policy"
        return self._policy

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """Return the engine whose weights this bridge updates; set once :meth:`prepare` has run."""

    @abstractmethod
    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        """Bring the trainer's current weights to the engine and give them ``version``, within ``deadline``.

        Raises EngineLeftOut to be called again, with a new limit, after one of several engines has failed.
        """

    def _assemble(self) -> None:
        """Settle, before a transfer, which engines take part.

        Raises EngineError, DeadlineExceeded.
        """

    def rest(self) -> None:
        """Put an engine to sleep that shares the trainer's GPU; called before the trainer computes.

        Leaving :meth:`update_to` wakes it up. Raises EngineError if it cannot sleep.
        """

    def wake(self, *, for_weights: bool = False) -> None:
        """Wake the engine after :meth:`rest`, only as far as changing weights needs if ``for_weights``.

        Idempotent.
        """

    def sync(self, version: int) -> SyncReport:
        """Transfer and prove outside of an update: before the first step and after a resume.

        Raises:
            StaleWeights: engine and trainer compute different logprobs.
            DeadlineExceeded, EngineError: the transfer failed.
        """
        with self.update_to(version, due=True):
            pass
        assert self.last_report is not None
        return self.last_report

    @contextmanager
    def update_to(self, version: int, *, due: bool = False) -> Generator[None]:
        """Change weights within the block; leaving it always resumes the engine.

        If engine and trainer share storage, entering pauses generation, because the optimizer step is the transfer.
        Otherwise the weights travel every ``every_steps`` versions, and whenever they are ``due``. Raises as
        :meth:`sync`; an error of the body passes through, and nothing is transferred.
        """
        shares = self.capabilities.shares_storage
        with ExitStack() as resuming:
            if shares:
                # Pushed before the pause: if the pause fails half way, the engine must not stay paused.
                resuming.push(self._resume)
                self._pause()
            resuming.push(self._wake_after_failure)
            yield
            self.version = version
            if shares or due or version % self._every_steps == 0:
                self._transfer_and_prove(version, resuming=resuming)
            else:
                self.retry(self.wake)

    def _pause(self) -> None:
        try:
            self.engine.pause(mode=self._pause_mode)
        except EngineError as error:
            self.recover(error)
            self.engine.pause(mode=self._pause_mode)

    def _resume(self, kind: object, failure: BaseException | None, traceback: object) -> None:
        """Resume the engine; called by ExitStack.

        After a failure the engine may be dead, and an error in resuming it is ignored.
        """
        try:
            self.engine.resume()
        except LachesisError:
            if failure is None:
                raise

    def _wake_after_failure(self, kind: object, failure: BaseException | None, traceback: object) -> None:
        """Wake the engine with its present weights if nothing was transferred; called by ExitStack."""
        if failure is not None:
            with suppress(LachesisError):  # what failed first is the error
                self.wake()

    def _transfer_and_prove(self, version: int, *, resuming: ExitStack) -> None:
        try:
            self._try_transfer(version, resuming=resuming)
        except StaleWeights:
            raise
        except EngineError as error:
            self.recover(error)

    def _try_transfer(self, version: int, *, resuming: ExitStack) -> None:
        started = time.perf_counter()
        self._assemble()
        assembled = time.perf_counter()
        while True:
            try:
                self._transfer_to_all(version, started=started, assembled=assembled, resuming=resuming)
            except EngineLeftOut as left:
                logger.warning("weight version %d goes to the remaining engines: %s", version, left.message)
            else:
                return

    def _transfer_to_all(self, version: int, *, started: float, assembled: float, resuming: ExitStack) -> None:
        deadline = Deadline(
            name=f"the transfer of weight version {version} and its proof",
            limit_s=self._sync_s,
            setting="deadlines.sync_s",
        )
        with deadline.waiting():
            self.wake(for_weights=True)
            awake = time.perf_counter()
            self._engine_seconds, self._rank_sent = {}, {}
            self._transfer(version, deadline=deadline)
            arrived = time.perf_counter()
            self.wake()
            generating = time.perf_counter()
            # The canary goes through the engine's scheduler, which has to run for it.
            resuming.close()
            transferred = time.perf_counter()
            proved = self.proof.confirm(version=version) if self.proof is not None else None
        deadline.check()
        self.last_report = SyncReport(
            version=version,
            seconds=transferred - started,
            proof_seconds=time.perf_counter() - transferred,
            canary_error=None if proved is None else proved.error,
            canary_ratio=None if proved is None else proved.ratio,
            sleep_seconds=self._slept,
            wake_seconds=None if self._slept is None else awake - assembled + generating - arrived,
            engines=dict(self._engine_seconds) if len(self._engine_seconds) > 1 else {},
            ranks=dict(self._rank_sent),
        )

    def recover(self, error: EngineError) -> None:
        """Make an engine that died serve the current weights, if possible; else raise ``error``."""
        raise error

    def retry(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, repeated once if the engine dies in it and is recovered.

        Raises:
            EngineError: the engine lives, or cannot be recovered.
        """
        try:
            return call()
        except EngineError as error:
            self.recover(error)
        return call()

    @abstractmethod
    def close(self) -> None:
        """Stop and delete everything that the bridge made. Idempotent."""
