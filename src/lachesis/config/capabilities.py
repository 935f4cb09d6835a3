"""What each bridge can do, declared before anything is loaded: rules check it, bridges carry it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lachesis.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BridgeCapabilities:
    """The properties of a transport that the rest of the configuration has to fit.

    Args:
        adapter_only: it can transfer an adapter and nothing else.
        same_device: trainer and engine have to be on one device.
        owns_engine: it starts and stops the engine itself.
        shares_storage: the engine reads the trainer's own tensors, so the optimizer step is the transfer.
    """

    adapter_only: bool
    same_device: bool
    owns_engine: bool
    shares_storage: bool


BRIDGES: Mapping[str, BridgeCapabilities] = MappingProxyType(
    {
        "in_process": BridgeCapabilities(adapter_only=False, same_device=True, owns_engine=False, shares_storage=True),
        "shared_vllm": BridgeCapabilities(adapter_only=False, same_device=True, owns_engine=False, shares_storage=True),
        "lora_only": BridgeCapabilities(adapter_only=True, same_device=False, owns_engine=False, shares_storage=False),
        "lora_restart": BridgeCapabilities(
            adapter_only=True, same_device=False, owns_engine=True, shares_storage=False
        ),
        "lora_nccl": BridgeCapabilities(adapter_only=True, same_device=False, owns_engine=False, shares_storage=False),
        "broadcast": BridgeCapabilities(adapter_only=False, same_device=False, owns_engine=False, shares_storage=False),
        "none": BridgeCapabilities(adapter_only=False, same_device=False, owns_engine=True, shares_storage=False),
        "reload": BridgeCapabilities(adapter_only=False, same_device=False, owns_engine=False, shares_storage=False),
    }
)


def bridge_capabilities(kind: str, *, bridges: Mapping[str, BridgeCapabilities] = BRIDGES) -> BridgeCapabilities:
    """The declared capabilities of a bridge by its ``kind``.

    Raises:
        ConfigError: no bridge of that kind is declared.
    """
    if kind not in bridges:
        raise ConfigError(f"bridge.kind: no bridge {kind!r}", remedy=f"use one of {', '.join(sorted(bridges))}")
    return bridges[kind]
