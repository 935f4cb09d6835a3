"""What bridges to engines in other processes have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lachesis.bridges.base import Bridge, PolicyT
from lachesis.bridges.owned import OwnedEngine
from lachesis.bridges.proof import SyncProof
from lachesis.common.errors import EngineError
from lachesis.config.schema import BridgeCapabilities
from lachesis.engines.base import PauseMode
from lachesis.engines.http.client import HttpEngine

logger = logging.getLogger("lachesis")

ProofBuilder = Callable[[PolicyT, HttpEngine], SyncProof]


class ExternalBridge(Bridge[PolicyT]):
    """A policy on one side, servers on the other; a subclass says how the weights get across.

    Args:
        capabilities: as its section of the configuration declares them.
        engine: the servers, claimed by this run.
        proof_builder: makes the proof of sync once both sides exist, or ``None`` for no proof.
        owned: the processes of the servers, where the run starts them: one that dies is started again.
        trains_in_engine: the policy is built on the engine's memory, and lost with it.
        sync_s, every_steps, pause_mode: as in :class:`Bridge`.
    """

    def __init__(
        self,
        *,
        capabilities: BridgeCapabilities,
        engine: HttpEngine,
        proof_builder: ProofBuilder[PolicyT] | None,
        owned: OwnedEngine | None = None,
        trains_in_engine: bool = False,
        sync_s: float | None = None,
        every_steps: int = 1,
        pause_mode: PauseMode = "keep",
    ) -> None:
        super().__init__(proof=None, sync_s=sync_s, every_steps=every_steps, pause_mode=pause_mode)
        self.capabilities = capabilities
        self._engine = engine
        self._proof_builder = proof_builder
        self._owned = owned
        self._trains_in_engine = trains_in_engine
        self._policy: PolicyT | None = None
        self._recovered: int | None = None

    @property
    def engine(self) -> HttpEngine:
        return self._engine

    @property
    def policy(self) -> PolicyT:
        """The policy whose weights travel; set once :meth:`prepare` has run."""
        assert self._policy is not None, "prepare() builds the policy"
        return self._policy

    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        self._policy = policy_builder()
        self.renew()
        return self._policy

    def recover(self, error: EngineError) -> None:
        """Start an engine of the run's own that died again, once for each version, and bring it the weights.

        Raises:
            EngineError: ``error``, where the engine lives or is not the run's; or that the weights were in its
                memory, or that it died twice with these weights.
        """
        if self._owned is None or not self._owned.died():
            raise error
        if self._trains_in_engine:
            raise EngineError(
                f"the engine died and the weights in its memory with it: {error.message}",
                remedy="go on from the last checkpoint with --resume",
            ) from error
        if self._recovered == self.version:
            raise EngineError(
                f"the engine died a second time with weight version {self.version}: {error.message}",
                remedy="read the engine's log: starting it again will not help",
            ) from error
        self._recovered = self.version
        logger.warning("the engine died; starting it again with weight version %d", self.version)
        if not self.capabilities.owns_engine:  # those start it in their transfer
            self._owned.start_again()
        self.renew()
        self.sync(self.version)

    def close(self) -> None:
        self._engine.close()
        if self._owned is not None:
            self._owned.stop()

    def renew(self) -> None:
        """The engine is another one, or was started again: forget what was agreed with the one before."""
        if not self.capabilities.owns_engine:  # their proof comes with the start in the next transfer
            self._build_proof()

    def _build_proof(self) -> None:
        """The proof is of one session of the engine: a restarted engine needs a new one."""
        if self._proof_builder is not None:
            self.proof = self._proof_builder(self.policy, self._engine)
