"""Updates of rounded weights by an optimizer, without small steps vanishing.

A bfloat16 weight of 0.02 has neighbours 0.0001 apart: added to it, a step of 1e-6 is rounded away, every
time. So the optimizer works on float32 *slots*, and the weights get a rounded copy, written into the storage
they already have (in single-copy mode an inference engine reads that very storage).

Bytes a parameter with AdamW in float32 (weights and gradients included):

==================================  =======  ======================================
float32 weights, in place           16       4 weight + 4 gradient + 8 moments
16-bit, float32 masters             16       2 weight + 2 gradient + 4 master + 8 moments
16-bit, stochastic rounding         12       2 weight + 2 gradient + 8 moments
16-bit, in place ("plain")          8        2 weight + 2 gradient + 4 moments (16-bit too)
==================================  =======  ======================================

During a step, slots of the two 16-bit modes add float32 gradients (and weights, with stochastic rounding) of
one bucket at a time; :data:`BUCKET_ELEMENTS` bounds a bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lachesis.common.runs import runs

BUCKET_ELEMENTS = 2**26


@torch.no_grad()
def stochastic_round_(target: Tensor, value: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Write float32 ``value`` into bfloat16 ``target`` (same shape, any), rounded up or down at random.

    The chance of either neighbour is proportional to the nearness of the value, so the expectation is the
    value itself (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3). A bfloat16
    is the upper half of a float32: 16 random bits added to the lower half carry into the upper half with
    exactly that chance. Values that bfloat16 can hold, infinities and NaN stay as they are.

    Returns:
        ``target``, changed in place; its storage stays the same.
    """
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    bits = noise.add_(value.view(torch.int32)).bitwise_and_(-(1 << 16))
    return target.copy_(bits.view(torch.float32))


class WeightUpdate(ABC):
    """Parameters, and the slots that an optimizer updates in their place (one for each, in order).

    A step is ``stage``, then ``ready``, then the optimizer's own step over ``slots``, then ``commit``.
    """

    slots: list[Parameter]

    @abstractmethod
    def stage(self, gradient_scale: float) -> None:
        """Put the parameters' gradients, times ``gradient_scale``, into the slots; may be asynchronous."""

    def ready(self) -> None:
        """Wait until the staged gradients may be read."""
        return None

    @abstractmethod
    def commit(self) -> None:
        """Write the slots back into the parameters' own storage."""

    def state_dict(self) -> dict[str, Any]:
        """Return references to the tensors, besides the parameters, that an exact resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        return None


class InPlace(WeightUpdate):
    """Update in place: the slots are the parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.slots = list(parameters)

    def stage(self, gradient_scale: float) -> None:
        gradients = [slot.grad for slot in self.slots if slot.grad is not None]
        if gradients and gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)  # pyright: ignore[reportPrivateImportUsage]  # it is there

    def commit(self) -> None:
        return None


class MasterCopies(WeightUpdate):
    """Update of lasting copies on ``device``, in ``dtype`` (or in the parameter's own, if None).

    With ``device`` the CPU and parameters on a GPU, copies and gradients lie in pinned memory there, and
    transfers overlap with the update of other buckets.
    """

    def __init__(
        self, parameters: Sequence[Parameter], *, dtype: torch.dtype | None, device: torch.device | None = None
    ) -> None:
        self._parameters = list(parameters)
        self._offloaded = device is not None and any(p.device != device for p in self._parameters)
        self.slots = [Parameter(self._copy(p, dtype=dtype, device=device)) for p in self._parameters]
        self._buffers = [torch.empty_like(slot, pin_memory=True) for slot in self.slots] if self._offloaded else []
        self._arrival: torch.cuda.Event | None = None

    def _copy(self, parameter: Parameter, *, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
        copy = torch.empty_like(
            parameter,
            dtype=dtype or parameter.dtype,
            device=device or parameter.device,
            pin_memory=self._offloaded,
            requires_grad=False,
        )
        return copy.copy_(parameter.detach())

    @torch.no_grad()
    def stage(self, gradient_scale: float) -> None:
        staged = []
        for index, (parameter, slot) in enumerate(zip(self._parameters, self.slots, strict=True)):
            if parameter.grad is None:
                slot.grad = None
                continue
            gradient = parameter.grad.to(slot.dtype)
            if self._offloaded:
                gradient = gradient if gradient_scale == 1.0 else gradient * gradient_scale
                slot.grad = self._buffers[index].copy_(gradient, non_blocking=True)
            else:
                slot.grad = gradient
                staged.append(gradient)
        if staged and gradient_scale != 1.0:
            torch._foreach_mul_(staged, gradient_scale)  # pyright: ignore[reportPrivateImportUsage]  # it is there
        if self._offloaded:
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def ready(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()

    @torch.no_grad()
    def commit(self) -> None:
        parameters, slots = list[Tensor](self._parameters), list[Tensor](self.slots)
        torch._foreach_copy_(parameters, slots, non_blocking=self._offloaded)  # pyright: ignore[reportPrivateImportUsage]  # it is there
        for slot in self.slots:
            slot.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"masters": [slot.detach() for slot in self.slots]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the copies and write them into the parameters."""
        for slot, saved in zip(self.slots, state["masters"], strict=True):
            slot.copy_(saved)
        self.commit()


class StochasticRounding(WeightUpdate):
    """Update of float32 slots during a step only, rounded stochastically into the weights."""

    def __init__(
        self, parameters: Sequence[Parameter], *, generator: torch.Generator, device: torch.device | None = None
    ) -> None:
        self._parameters = list(parameters)
        self._generator = generator
        self.slots = [
            Parameter(torch.empty((0,) * max(1, p.ndim), dtype=torch.float32, device=device or p.device))
            for p in self._parameters
        ]

    @torch.no_grad()
    def stage(self, gradient_scale: float) -> None:
        for parameter, slot in zip(self._parameters, self.slots, strict=True):
            if parameter.grad is not None:
                slot.data = parameter.detach().to(slot)
                slot.grad = parameter.grad.to(slot).mul_(gradient_scale)

    @torch.no_grad()
    def commit(self) -> None:
        for parameter, slot in zip(self._parameters, self.slots, strict=True):
            if slot.grad is not None:
                stochastic_round_(parameter, slot.detach().to(parameter.device), generator=self._generator)
            slot.grad = None
            slot.data = slot.data.new_empty((0,) * max(1, slot.ndim))


def buckets(
    parameters: Iterable[tuple[str, Parameter]], *, sizes: Mapping[str, int] | None = None
) -> list[list[tuple[str, Parameter]]]:
    """Split in order into runs of at most :data:`BUCKET_ELEMENTS` elements; a larger parameter goes alone.

    ``sizes`` has whole parameters' elements by name, if the given ones are parts.
    """

    def size(named: tuple[str, Parameter]) -> int:
        return named[1].numel() if sizes is None else sizes[named[0]]

    return list(runs(parameters, size=size, limit=BUCKET_ELEMENTS))
