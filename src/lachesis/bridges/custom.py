"""Custom bridges: the signature of their factory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lachesis.bridges.base import Bridge
from lachesis.common.contracts import contract
from lachesis.common.errors import EngineError
from lachesis.config.schema import LachesisConfig

if TYPE_CHECKING:
    from lachesis.bridges.external import Servers


class CustomBridge(Protocol):
    """Signature of a custom bridge: the servers first, the others by name if the class or function declares them."""

    def __call__(self, servers: Servers[Any], *, config: LachesisConfig, directory: Path) -> Bridge[Any]:
        """Return the bridge, usually an :class:`ExternalBridge` with its own ``_transfer``.

        Args:
            servers: the client of the engine's servers, their processes where the run starts them, and the proof.
            config: of the run.
            directory: the run directory, from which the servers may load files.
        """
        ...


BRIDGE = contract("bridge", CustomBridge, error=EngineError, makes=Bridge, methods=("_transfer",))
