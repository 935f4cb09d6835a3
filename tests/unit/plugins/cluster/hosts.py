"""Hosts as those of Ray, in this process: their calls end when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.plugins.cluster.placement import NodeRoom, Place


@dataclass(eq=False)
class Call:
    arguments: tuple[Any, ...]
    outcome: Any = None


@dataclass(eq=False)
class Method:
    """Of a host: each call of it is under way until it has an outcome, which may be its ``answer``."""

    calls: list[Call] = field(default_factory=list)
    answer: Any = None

    def remote(self, *arguments: Any) -> Call:
        self.calls.append(Call(arguments, self.answer))
        return self.calls[-1]


@dataclass(eq=False)
class Host:
    bundle: int = 0
    place: Method = field(default_factory=Method)
    run: Method = field(default_factory=Method)
    stop: Method = field(default_factory=Method)
    ended: bool = False


class Cluster:
    """As RayCluster, of hosts of this process."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self.gone: set[str] = set()

    def reserve(self, bundles: Sequence[Any]) -> str:
        return f"{len(bundles)} bundles"

    def host(self, group: Any = None, *, bundle: int = 0, needs: Any = None) -> Host:
        self.hosts.append(Host(bundle))
        return self.hosts[-1]

    def wait(self, calls: list[Call], *, limit_s: float) -> list[Call]:
        return self.wait_any(calls, limit_s=limit_s)

    def wait_any(self, calls: list[Call], *, limit_s: float) -> list[Call]:
        return [call for call in calls if call.outcome is not None]

    def outcome(self, call: Call, *, place: Place | None = None) -> Any:
        return call.outcome

    def nodes(self) -> dict[str, NodeRoom]:
        return {"n7": NodeRoom("10.0.0.7", 4, 0)}

    def lives(self, place: Place) -> bool:
        return place.node not in self.gone

    def end(self, host: Host) -> None:
        host.ended = True
