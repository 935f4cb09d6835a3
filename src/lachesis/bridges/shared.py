"""Single copy: the trainer's parameters are the engine's tensors, so the optimizer step is the transfer."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from lachesis.bridges.base import PolicyT
from lachesis.bridges.engine_weights import EngineWeights
from lachesis.bridges.external import ExternalBridge, ProofBuilder
from lachesis.bridges.owned import OwnedEngine
from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError
from lachesis.config.schema import SharedBridgeConfig
from lachesis.engines.base import PauseMode
from lachesis.engines.http.client import HttpEngine

_log = logging.getLogger(__name__)


class SharedBridge(ExternalBridge[PolicyT]):
    """Trainer and engine are two processes over one copy of the weights.

    Args:
        engine: the engine, one server.
        weights: its tensors. The policy builder that :meth:`prepare` is given has to attach its model to them.
        proof_builder: makes the proof of sync from policy and engine, or ``None`` for no proof.
        owned, sync_s: as in :class:`ExternalBridge`.
        pause_mode: what happens to requests in flight during a step.

    Raises:
        ConfigError: there are several servers.
    """

    def __init__(
        self,
        *,
        engine: HttpEngine,
        weights: EngineWeights,
        proof_builder: ProofBuilder[PolicyT] | None,
        owned: OwnedEngine | None = None,
        sync_s: float | None = None,
        pause_mode: PauseMode = "keep",
    ) -> None:
        super().__init__(
            capabilities=SharedBridgeConfig.capabilities,
            engine=engine,
            proof_builder=proof_builder,
            owned=owned,
            trains_in_engine=True,
            sync_s=sync_s,
            pause_mode=pause_mode,
        )
        self._weights = weights
        if len(engine.controls) > 1:
            raise ConfigError(
                f"bridge.kind shared_vllm has one engine to share weights with, and {len(engine.controls)} are named",
                remedy="name one server, or use bridge.kind broadcast or lora_only",
            )

    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        """Map the engine's tensors, then build the policy on them.

        Raises:
            ConfigError, EngineError, ModelError: as :meth:`EngineWeights.open` and :meth:`EngineWeights.attach`,
                or the policy has its weights elsewhere.
        """
        self._weights.open()
        return super().prepare(lambda: self._checked(policy_builder()))

    def _checked(self, policy: PolicyT) -> PolicyT:
        self._weights.check_attached()
        return policy

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        self._weights.check_attached()
        if self._weights.device.type == "cuda":
            # The engine reads on streams of another process, which wait for nothing of ours.
            torch.cuda.synchronize(self._weights.device)
        deadline.check("the optimizer step is still running on the GPU")
        # The engine drops what it has cached of the weights before.
        self.engine.set_version(version)
        _log.info("[SINGLE-COPY] Weights updated in-place - step %d", version)

    def close(self) -> None:
        self._weights.close()
        super().close()
