"""Bridge to an engine in this process, with the trainer's own module (the optimizer step transfers) or a copy."""

from __future__ import annotations

from collections.abc import Callable

from lachesis.bridges.base import Bridge, PolicyT
from lachesis.bridges.proof import SyncProof
from lachesis.common.deadline import Deadline
from lachesis.config.schema import InProcessBridgeConfig
from lachesis.engines.base import Engine


class InProcessBridge(Bridge[PolicyT]):
    """Bridge that shares storage with the embedded engine, or brings it the weights while it is paused.

    Args:
        engine_builder: makes the engine around the policy once it exists.
        proof_builder: makes the proof of sync from both, or ``None`` for no proof.
        bring: copies the policy's weights into the engine's model; ``None`` if both are one model.
    """

    capabilities = InProcessBridgeConfig.capabilities

    def __init__(
        self,
        *,
        engine_builder: Callable[[PolicyT], Engine],
        proof_builder: Callable[[PolicyT, Engine], SyncProof] | None,
        sync_s: float | None = None,
        bring: Callable[[PolicyT], None] | None = None,
    ) -> None:
        super().__init__(sync_s=sync_s)
        self._bring = bring
        self._engine_builder = engine_builder
        self._proof_builder = proof_builder
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "prepare() builds the engine"
        return self._engine

    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        policy = self._policy = policy_builder()
        self._engine = self._engine_builder(policy)
        if self._proof_builder is not None:
            self.proof = self._proof_builder(policy, self._engine)
        return policy

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        if self._bring is not None:
            self._bring(self.policy)
        self.engine.set_version(version)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
