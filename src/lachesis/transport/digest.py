"""Digests of tensors: exact proof that bytes arrived, at the price of reading them once.

A digest is a sum, so it costs one pass at the speed of memory and can be computed where the tensor is. It is not a
cryptographic hash: it finds tensors that were lost, exchanged, shifted by rows, truncated or rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lachesis.common.errors import EngineError

_MODULUS = 1 << 64
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# Words that are narrower than 64 bits are widened before they are summed; this many at a time.
_CHUNK_WORDS = 1 << 22
# Tensors of one shape are read together up to this size, for which they are copied.
_BATCH_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class Share:
    """Rectangular part of a tensor.

    Attributes:
        part: the elements of the part, with as many dimensions as the tensor.
        shape: shape of the whole tensor.
        first_row: index of the part's first row in the whole.
    """

    part: Tensor
    shape: tuple[int, ...]
    first_row: int = 0

    @property
    def word_bytes(self) -> int:
        """Return the width in bytes of the words as which rows of the whole are read."""
        row_bytes = math.prod(self.shape[1:]) * self.part.element_size()
        return next(width for width in _WORDS if row_bytes % width == 0)

    @property
    def adds_up(self) -> bool:
        """Return True if no word of a row is cut, so that the digests of all parts add up to that of the whole."""
        cut = [n for n in range(1, len(self.shape)) if self.part.shape[n] != self.shape[n]]
        run = math.prod(self.part.shape[cut[-1] :]) if cut else math.prod(self.shape[1:])
        return run * self.part.element_size() % self.word_bytes == 0


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digests of several tensors, with one transfer to the host for each device.

    A tensor ``[rows, ...]`` is read as bytes: each row's bytes, taken as words of the widest of 8, 4, 2 and 1
    bytes that divides the row, are added up, and the digest is the sum over rows of ``(2 row + 1) x row sum``
    modulo 2^64. In a tensor of no or one dimension each element is a row. Odd weights have inverses modulo
    2^64, so that any change of a single row sum changes the digest. Equal values in another dtype, or rows cut
    at other places, have other digests.

    Returns:
        Numbers in [0, 2^64), by name.

    Raises:
        EngineError: a tensor is on the meta device and has no bytes.
    """
    return share_digests({name: Share(tensor.detach(), tuple(tensor.shape)) for name, tensor in tensors.items()})


@torch.no_grad()
def digests_of_each(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return :func:`digests` of tensors that are made one by one and released; only their row sums are kept.

    The host therefore waits for the device once, at the end. Raises as :func:`digests`.
    """
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        share = Share(tensor.detach(), tuple(tensor.shape))
        _check_bytes(name, share)
        kept = torch.empty(_rows(share.part), dtype=torch.int64, device=tensor.device)
        _sum_rows([share], out=kept)
        sums.setdefault(tensor.device, {})[name] = kept
    found: dict[str, int] = {}
    for kept in sums.values():
        rows = [len(one) for one in kept.values()]
        found |= _read([*kept], torch.cat([*kept.values()]), rows=rows, first_rows=[0] * len(rows))
    return found


@torch.no_grad()
def share_digests(shares: Mapping[str, Share]) -> dict[str, int]:
    """Return the contributions of parts of tensors, which :func:`add_up` to :func:`digests` of the whole tensors.

    A part has to be one that :attr:`Share.adds_up`. Returns and raises as :func:`digests`.
    """
    for name, share in shares.items():
        _check_bytes(name, share)
    by_device: dict[torch.device, list[list[str]]] = {}
    for batch in _batches(shares):
        by_device.setdefault(shares[batch[0]].part.device, []).append(batch)
    found: dict[str, int] = {}
    for device, batches in by_device.items():
        names = [name for batch in batches for name in batch]
        rows = [_rows(shares[name].part) for name in names]
        sums = torch.empty(sum(rows), dtype=torch.int64, device=device)
        start = 0
        for batch in batches:
            count = len(batch) * _rows(shares[batch[0]].part)
            _sum_rows([shares[name] for name in batch], out=sums[start : start + count])
            start += count
        found |= _read(names, sums, rows=rows, first_rows=[shares[name].first_row for name in names])
    return {name: found[name] for name in shares}


def add_up(parts: Iterable[Mapping[str, int]], *, names: Iterable[str]) -> dict[str, int]:
    """Return the digests of whole tensors by adding up those of all parts; 0 for a tensor without parts."""
    held = list(parts)
    return {name: sum(part.get(name, 0) for part in held) % _MODULUS for name in names}


def served_lora_b(lora_b: Tensor, *, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return an adapter's B [out, rank] as an engine holds it: cast to its dtype, then scaled in that dtype.

    vLLM folds ``scaling`` (alpha / r) into B when it loads an adapter; digests of both sides are of this tensor.
    """
    return lora_b.detach().to(dtype) * scaling


def _batches(shares: Mapping[str, Share]) -> list[list[str]]:
    """Return the names of tensors that are read together.

    Small tensors of one shape are batched, because kernels take longer to start than to run.
    """
    batches: dict[tuple[object, ...], list[list[str]]] = {}
    for name, share in shares.items():
        part = share.part
        most = max(1, _BATCH_BYTES // max(1, part.nbytes))
        kind = (part.device, part.dtype, tuple(part.shape), share.word_bytes)
        found = batches.setdefault(kind, [[]])
        if len(found[-1]) == most:
            found.append([])
        found[-1].append(name)
    return [batch for found in batches.values() for batch in found]


def _rows(part: Tensor) -> int:
    if part.numel() == 0:
        return 0
    return part.shape[0] if part.ndim >= 1 else 1


def _sum_rows(shares: Sequence[Share], *, out: Tensor) -> None:
    """Write the sums of the words of each row to ``out`` int64 [N x rows].

    The N ``shares`` have one shape, dtype and word width.
    """
    tensors, width = [share.part for share in shares], shares[0].word_bytes
    first = tensors[0]
    if first.numel() == 0:
        return
    if first.dtype.itemsize == 1:  # floats of 8 bits can be looked at and little else
        tensors = [tensor.view(torch.uint8) for tensor in tensors]
        first = tensors[0]
    stacked = torch.stack(tensors) if len(tensors) > 1 else first[None]
    words = _as_words(stacked.flatten(0, 1).flatten(1) if first.ndim >= 2 else stacked.reshape(-1, 1), width=width)
    # torch sums int64 without a copy; narrower words it would first widen as a whole.
    step = words.shape[0] if words.dtype == torch.int64 else max(1, _CHUNK_WORDS // words.shape[1])
    for start in range(0, words.shape[0], step):
        torch.sum(words[start : start + step], dim=1, dtype=torch.int64, out=out[start : start + step])


def _check_bytes(name: str, share: Share) -> None:
    if share.part.is_meta:
        raise EngineError(
            f"the tensor {name!r} of shape {share.shape} is on the meta device: it has no bytes",
            remedy="load or attach the weights before proving that they arrived",
        )


def _read(names: Sequence[str], sums: Tensor, *, rows: Sequence[int], first_rows: Sequence[int]) -> dict[str, int]:
    """Return the digests of tensors with so many ``rows`` each, from their consecutive row sums in ``sums``."""
    values = _weighted(sums, rows=rows, first_rows=first_rows)
    return {name: value % _MODULUS for name, value in zip(names, values, strict=True)}


def _weighted(sums: Tensor, *, rows: Sequence[int], first_rows: Sequence[int]) -> list[int]:
    """Return, for each consecutive run of ``rows`` row sums [R], their sum weighted by the rows' places in the whole.

    All tensors are computed together, since each kernel takes longer to start than to run.
    """
    counts = torch.tensor([rows, first_rows], device=sums.device)
    ends = counts[0].cumsum(0)
    # What is added to a row's place here, so that it is that in its whole.
    shifts = (counts[1] + counts[0] - ends).repeat_interleave(counts[0], output_size=len(sums))
    places = torch.arange(len(sums), device=sums.device) + shifts
    total = torch.nn.functional.pad((sums * (2 * places + 1)).cumsum(0), (1, 0))
    values: list[int] = (total[ends] - total[ends - counts[0]]).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # torch: a list of what?
    return values  # pyright: ignore[reportUnknownVariableType]


def _as_words(rows: Tensor, *, width: int) -> Tensor:
    """Return ``rows`` [rows, columns] as integers [rows, words] of ``width`` bytes."""
    if not rows.is_contiguous() or (rows.storage_offset() * rows.element_size()) % width:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8).view(_WORDS[width])
