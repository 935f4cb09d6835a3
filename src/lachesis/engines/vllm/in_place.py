"""In-place loading: copies an update directly into a vLLM worker's parameters.

vLLM reloads weights by building a new copy of every layer, loading that, and copying it over the old: for 8 billion
parameters this takes longer than sending them (benchmarks/RESULTS.md, "Weights to vLLM on two H100s"). vLLM's loader
still loads the first update. The result is then compared bit by bit with the places that rules predict, and only if all
agree are later updates copied directly to these places. Matrices that vLLM keeps in 8 bits, with a scale for each
output, are quantized on the way. Tensors that vLLM transposes, packs, quantizes in other ways or derives something from
have no such places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lachesis.engines.vllm.cuts import Cut, find_cuts, named_parameters
from lachesis.transport.float8 import FP8, SCALE, by_rows

# Bytes of a host tensor to compare at once: the GPU may not have room for more.
_COMPARED_BYTES = 1 << 26
# Modules whose processing after loading does not depend on the weights.
_NOTHING_OF_WEIGHTS = frozenset({"Attention"})


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A part of a worker's parameter, and the rows and columns of the offered tensor that belong there.

    For 8-bit parameters, ``scales`` [rows, 1] are the scales of its rows.
    """

    held: Tensor
    rows: slice
    columns: slice
    scales: Tensor | None = None

    def part(self, offered: Tensor) -> Tensor:
        if not offered.ndim:
            return offered
        part = offered[self.rows]
        return part if part.ndim < 2 else part[:, self.columns]

    def load(self, offered: Tensor) -> None:
        """Copy its part of the offered tensor into place, on the current stream."""
        part = self.part(offered)
        if self.scales is None:
            self.held.copy_(part, non_blocking=True)
        else:
            by_rows(part.to(self.held.device, non_blocking=True), out=(self.held, self.scales))

    def matches(self, offered: Tensor) -> bool:
        """Return True if this slice equals its part of the offered tensor bit by bit."""
        part = self.part(offered)
        if self.scales is None:
            return _same(self.held, part)
        if self.held.shape != part.shape:
            return False
        rounded, scales = by_rows(part.to(self.held.device))
        bits, held = rounded.view(torch.uint8), self.held.view(torch.uint8)
        return torch.equal(scales, self.scales) and torch.equal(bits, held)


class InPlaceLoader:
    """Loads an update's tensors into their slices. ``spare`` are rows that are in no checkpoint and must be 0."""

    def __init__(self, slices: Mapping[str, Sequence[ParameterSlice]], *, spare: Sequence[Tensor] = ()) -> None:
        self._slices = slices
        self._spare = spare

    @classmethod
    def find(cls, model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> InPlaceLoader | None:
        """Find the places of tensors with these names and shapes in a worker's model; ``None`` if any has none.

        All members of a matrix that vLLM fuses, such as q, k and v, must be offered.
        """
        if any(map(_keeps_more, model.modules())) or any(one.is_inference() for one in model.parameters()):
            return None
        held = named_parameters(model)
        cuts = find_cuts(model)
        members = _members(model)
        found: dict[str, Sequence[ParameterSlice]] = {}
        spare: list[Tensor] = []
        for name, shape in shapes.items():
            whole, first, rows = _within(name, shapes, held=held, members=members)
            wanted = (*rows, *shape[1:])
            if whole in held and held[whole].dtype == FP8:
                if (rounded := _rows_in_8_bits(whole, held, wanted, first=first, rows=shape[0])) is None:
                    return None
                found[name] = [rounded]
                continue
            cut = cuts.get(whole)
            if cut is None or len(cut.shape) > 2 or tuple(cut.shape) != wanted:
                return None
            found[name] = [*_parts(held[whole], cut, first=first, rows=shape[0])] if shape else [_all(held[whole])]
            spare += _spare_rows(held[whole], cut) if shape else ()
        return cls(found, spare=spare)

    @torch.no_grad()
    def matches(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if each slice equals bit by bit what :meth:`load` would write."""
        return tensors.keys() == self._slices.keys() and all(
            one.matches(tensor) for name, tensor in tensors.items() for one in self._slices[name]
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every tensor to its places, on the current stream, and wait until that is done.

        Raises:
            KeyError: a tensor has no places.
        """
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            for one in self._slices[name]:
                one.load(tensor)
                devices.add(one.held.device)
        for rows in self._spare:  # after sleep these rows have undefined values
            rows.zero_()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _keeps_more(module: nn.Module) -> bool:
    """Return True if vLLM may derive further data from a module's weights after loading."""
    return hasattr(module, "process_weights_after_loading") and type(module).__name__ not in _NOTHING_OF_WEIGHTS


def _members(model: nn.Module) -> dict[str, tuple[str, Sequence[str]]]:
    """Map each fused module of a checkpoint to vLLM's name for the fused one and all its members in order."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    return {member: (fused, members) for fused, members in packed.items() for member in members if member != fused}


def _within(
    name: str,
    shapes: Mapping[str, Sequence[int]],
    *,
    held: Mapping[str, Tensor],
    members: Mapping[str, tuple[str, Sequence[str]]],
) -> tuple[str, int, tuple[int, ...]]:
    """Return the whole parameter that contains a tensor, the tensor's first row in it, and its number of rows."""
    path, _, kind = name.rpartition(".")
    before, dot, leaf = path.rpartition(".")
    if name in held or leaf not in members:
        return name, 0, tuple(shapes[name][:1])
    fused, together = members[leaf]
    rows = [shapes.get(f"{before}{dot}{member}.{kind}", (0,))[0] for member in together]
    return f"{before}{dot}{fused}.{kind}", sum(rows[: [*together].index(leaf)]), (sum(rows),)


def _parts(held: Tensor, cut: Cut, *, first: int, rows: int) -> Iterator[ParameterSlice]:
    """Yield the slices of a worker's tensor that lie in rows ``first`` to ``first + rows`` of the whole."""
    width = held.shape[1] if held.ndim > 1 else 0
    columns = slice(cut.columns * width, (cut.columns + 1) * width)
    for block in cut.blocks:
        start, end = max(block.first_row, first), min(block.first_row + block.rows, first + rows)
        if start < end:
            at = block.held + start - block.first_row
            yield ParameterSlice(held[at : at + end - start], slice(start - first, end - first), columns)


def _rows_in_8_bits(
    whole: str, held: Mapping[str, Tensor], wanted: Sequence[int], *, first: int, rows: int
) -> ParameterSlice | None:
    """Return the slice for rows of an 8-bit matrix [out, in] with a scale per row; None for a partial matrix."""
    matrix, scales = held[whole], held.get(whole + SCALE)
    if scales is None or tuple(matrix.shape) != tuple(wanted) or tuple(scales.shape) != (wanted[0], 1):
        return None
    part = slice(first, first + rows)
    return ParameterSlice(matrix[part], slice(None), slice(None), scales[part])


def _spare_rows(held: Tensor, cut: Cut) -> list[Tensor]:
    """Return the rows with which vLLM pads the vocabulary at its end."""
    used = max((block.held + block.rows for block in cut.blocks), default=0)
    return [held[used:]] if used < held.shape[0] else []


def _all(held: Tensor) -> ParameterSlice:
    return ParameterSlice(held, slice(None), slice(None))


def _same(held: Tensor, part: Tensor) -> bool:
    if held.shape != part.shape:
        return False
    if held.device == part.device or not held.ndim:
        return torch.equal(held, part.to(device=held.device, dtype=held.dtype))
    rows = max(1, _COMPARED_BYTES // max(1, part[:1].numel() * part.element_size()))
    return all(
        torch.equal(there, here.to(device=held.device, dtype=held.dtype))
        for there, here in zip(held.split(rows), part.split(rows), strict=True)
    )
