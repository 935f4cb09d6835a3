"""Weights that do not arrive as they left: what a broken transport would do, for the proof of sync to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lachesis.bridges.broadcast
import lachesis.bridges.build
from lachesis.bridges.sent_weights import base_parameters, full_weights, lora_tensors
from lachesis.engines.http.control import ServerControl

# One tensor keeps its old value, two of equal shape change places, nothing arrives, nothing is even read.
FAULTS = ("dropped", "swapped", "old", "not read")
Step = Callable[[], AbstractContextManager[None]]


class Tampering:
    """Stands between a policy and its engine; while ``fault`` is set, other weights arrive than were sent."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._last: dict[str, Tensor] = {}

    @contextmanager
    def having(self, fault: str | None, *, parting: nn.Module | None = None) -> Iterator[Step]:
        """With a fault, or none; yields the context of the optimizer step.

        Where trainer and engine share storage there is no transport that could break. Then ``parting`` is the
        model: as long as the fault lasts, tensors that arrive wrongly are two, the engine's memory with the wrong
        values and a parameter of the trainer's own with the right ones.
        """
        self.fault = fault
        parted: list[_Parted] = []
        try:
            yield partial(self._parting, parting, parted) if parting is not None and fault else nullcontext
        finally:
            self.fault = None
            for part in parted:
                part.join()

    def _full_weights(self, model: nn.Module, **how: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(self.arriving(dict(full_weights(model, **how))).items())

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Tamper with what bridges take out of a policy's model; what is proved afterwards is left alone."""
        for module in (lachesis.bridges.build, lachesis.bridges.broadcast):
            patch.setattr(module, "lora_tensors", lambda model, **how: self.arriving(lora_tensors(model, **how)))
            patch.setattr(
                module,
                "full_weights",
                lambda model, **how: iter(self.arriving(dict(full_weights(model, **how))).items()),
            )
        load, reload = ServerControl.load_adapter, ServerControl.reload

        def load_adapter(server: ServerControl, path, *, name, version, deadline) -> None:
            if self.fault == "not read":
                return server.set_version(version, deadline=deadline)
            return load(server, path, name=name, version=version, deadline=deadline)

        def reload_checkpoint(server: ServerControl, path, *, version, deadline) -> None:
            if self.fault == "not read":
                return server.set_version(version, deadline=deadline)
            return reload(server, path, version=version, deadline=deadline)

        patch.setattr(ServerControl, "load_adapter", load_adapter)
        patch.setattr(ServerControl, "reload", reload_checkpoint)

    def arriving(self, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What arrives of what is sent now."""
        good = {name: tensor.detach().clone() for name, tensor in sent.items()}
        arrives, (first, second) = dict(good), targets(good)
        if self.fault == "dropped":
            arrives[first] = self._last[first]
        elif self.fault == "swapped":
            arrives[first], arrives[second] = good[second], good[first]
        elif self.fault == "old":
            arrives = dict(self._last)
        self._last = good
        return arrives

    @contextmanager
    def _parting(self, model: nn.Module, parted: list[_Parted]) -> Iterator[None]:
        self._last = {name: p.detach().clone() for name, p in base_parameters(model).items()}
        yield
        shared = base_parameters(model)
        for name, tensor in self.arriving(shared).items():
            if not torch.equal(tensor, shared[name]):
                parted.append(_Parted.part(model, name, arrives=tensor))


@dataclass(frozen=True, slots=True)
class _Parted:
    """A parameter that was in the engine's memory, and the one of its own that the trainer has in its place."""

    module: nn.Module
    leaf: str
    shared: nn.Parameter
    own: nn.Parameter

    @classmethod
    @torch.no_grad()
    def part(cls, model: nn.Module, name: str, *, arrives: Tensor) -> _Parted:
        where, _, leaf = name.rpartition(".")
        module = model.get_submodule(where)
        shared = module.get_parameter(leaf)
        own = nn.Parameter(shared.detach().clone())
        module.register_parameter(leaf, own)
        shared.copy_(arrives)
        return cls(module, leaf, shared, own)

    @torch.no_grad()
    def join(self) -> None:
        self.shared.copy_(self.own)
        self.module.register_parameter(self.leaf, self.shared)


def targets(names: Mapping[str, Tensor]) -> tuple[str, str]:
    """Two tensors of equal shape that every update changes."""
    kind = "q_proj.lora_B.weight" if any(".lora_B." in name for name in names) else "q_proj.weight"
    first, second = (name for name in names if name.endswith(kind))
    return first, second
