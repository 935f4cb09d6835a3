"""What bridges to engines in other processes have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lachesis.bridges.base import Bridge, PolicyT
from lachesis.bridges.owned import OwnedEngine
from lachesis.bridges.proof import SyncProof
from lachesis.config.capabilities import bridge_capabilities
from lachesis.engines.http.client import HttpEngine

ProofBuilder = Callable[[PolicyT, HttpEngine], SyncProof]


class ExternalBridge(Bridge[PolicyT]):
    """A policy on one side, servers on the other; a transport says how the weights get across.

    Args:
        kind: as ``bridge.kind``.
        engine: the servers, claimed by this run.
        proof_builder: makes the proof of sync once both sides exist, or ``None`` for no proof.
        sync_s: as in :class:`Bridge`.
        every_steps: as in :class:`Bridge`.
    """

    def __init__(
        self,
        *,
        kind: str,
        engine: HttpEngine,
        proof_builder: ProofBuilder[PolicyT] | None,
        sync_s: float | None = None,
        every_steps: int = 1,
    ) -> None:
        super().__init__(proof=None, sync_s=sync_s, every_steps=every_steps)
        self.capabilities = bridge_capabilities(kind)
        self._engine = engine
        self._proof_builder = proof_builder
        self._policy: PolicyT | None = None

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
        self._build_proof()
        return self._policy

    def renew(self) -> None:
        self._build_proof()

    def close(self) -> None:
        self._engine.close()

    def _build_proof(self) -> None:
        """The proof is of one session of the engine: a restarted engine needs a new one."""
        if self._proof_builder is not None:
            self.proof = self._proof_builder(self.policy, self._engine)


class RestartingBridge(ExternalBridge[PolicyT]):
    """What bridges have in common whose transfer is a start of the engine: each start has a proof of its own.

    Args:
        owned: the engine and its processes, which this bridge starts, restarts and stops.
        **options: of the bridge that it is mixed into, without ``engine``.
    """

    def __init__(self, *, owned: OwnedEngine, **options: Any) -> None:
        super().__init__(engine=owned.engine, **options)
        self._owned = owned

    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        # The proof is of a session, and before the first start there is none.
        self._policy = policy_builder()
        return self._policy

    def renew(self) -> None:
        """Nothing: the next start renews the proof."""

    def close(self) -> None:
        super().close()
        self._owned.stop()
