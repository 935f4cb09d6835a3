"""Digests of tensors: exact proof that bytes arrived, for the cost of reading them once.

A digest is a sum, so it costs two passes at the speed of memory and can be computed where the tensor is. It is not a
cryptographic hash: it finds tensors that were lost, exchanged, permuted by rows or columns, truncated or rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lachesis.common.errors import EngineError

_MODULUS = 1 << 64
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# Words that are narrower than 64 bits are widened before they are summed; this many at a time.
_CHUNK_WORDS = 1 << 22
# Weights of columns: odd multiples of 2^64 over the golden ratio, which have nothing in common with those of rows.
_GOLDEN = 0x9E3779B97F4A7C15 - _MODULUS
# Tensors of one shape are read together up to this size, for which they are copied.
_BATCH_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class Share:
    """Rectangular part of a tensor.

    Attributes:
        part: the elements of the part, with as many dimensions as the tensor.
        shape: shape of the whole tensor.
        first_row: index of the part's first row in the whole.
        first_column: index of the part's first element in the last dimension of the whole.
    """

    part: Tensor
    shape: tuple[int, ...]
    first_row: int = 0
    first_column: int = 0

    @property
    def word_bytes(self) -> int:
        """Return the width in bytes of the words as which the last dimension of the whole is read."""
        bytes_of_last = (self.shape[-1] if len(self.shape) > 1 else 1) * self.part.element_size()
        return next(width for width in _WORDS if bytes_of_last % width == 0)

    @property
    def adds_up(self) -> bool:
        """Return True if no word is cut, so that the digests of all parts add up to that of the whole."""
        ends = (self.first_column, self.part.shape[-1]) if len(self.shape) > 1 else ()
        return all(end * self.part.element_size() % self.word_bytes == 0 for end in ends)

    @property
    def first_word(self) -> int:
        """Return the index of the part's first word in the last dimension of the whole."""
        return self.first_column * self.part.element_size() // self.word_bytes


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digests of several tensors, with one transfer to the host for each device.

    A tensor ``[rows, ..., columns]`` is read as words of the widest of 8, 4, 2 and 1 bytes that divides the last
    dimension. The digest is the sum over words of ``(2 row + 1) + (2 column + 1) x golden``, each times the word,
    modulo 2^64; the column is the word's place in the last dimension. In a tensor of no or one dimension each element
    is a row, without columns. Odd weights have inverses modulo 2^64, so that any change of a single row's sum changes
    the digest. Equal values in another dtype, or rows cut at other places, have other digests.

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
    sums: dict[torch.device, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, tensor in tensors:
        share = Share(tensor.detach(), tuple(tensor.shape))
        _check_bytes(name, share)
        kept = torch.empty(_rows(share.part), dtype=torch.int64, device=tensor.device)
        columns = _sum([share], out=kept)
        sums.setdefault(tensor.device, {})[name] = (kept, columns)
    found: dict[str, int] = {}
    for kept in sums.values():
        by_row, by_column = (torch.cat(parts) for parts in zip(*kept.values(), strict=True))
        rows = [len(one) for one, _ in kept.values()]
        found |= _read([*kept], by_row, by_column, rows=rows, first_rows=[0] * len(rows))
    return found


@torch.no_grad()
def share_digests(shares: Mapping[str, Share]) -> dict[str, int]:
    """Return the contributions of parts of tensors, which :func:`add_up` to :func:`digests` of the whole tensors.

    Each part must satisfy :attr:`Share.adds_up`. Returns and raises as :func:`digests`.
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
        columns: list[Tensor] = []
        start = 0
        for batch in batches:
            count = len(batch) * _rows(shares[batch[0]].part)
            columns.append(_sum([shares[name] for name in batch], out=sums[start : start + count]))
            start += count
        first_rows = [shares[name].first_row for name in names]
        found |= _read(names, sums, torch.cat(columns), rows=rows, first_rows=first_rows)
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
        kind = (part.device, part.dtype, tuple(part.shape), share.word_bytes, share.first_word)
        found = batches.setdefault(kind, [[]])
        if len(found[-1]) == most:
            found.append([])
        found[-1].append(name)
    return [batch for found in batches.values() for batch in found]


def _rows(part: Tensor) -> int:
    if part.numel() == 0:
        return 0
    return part.shape[0] if part.ndim >= 1 else 1


def _sum(shares: Sequence[Share], *, out: Tensor) -> Tensor:
    """Write the sums of the words of each row to ``out`` int64 [N x rows]; return the weighted sums of columns [N].

    The N ``shares`` have one shape, dtype, word width and first word.
    """
    tensors, width = [share.part for share in shares], shares[0].word_bytes
    first = tensors[0]
    if first.numel() == 0:
        return out.new_zeros(len(shares))
    if first.dtype.itemsize == 1:  # 8-bit floats support little besides views
        tensors = [tensor.view(torch.uint8) for tensor in tensors]
        first = tensors[0]
    stacked = torch.stack(tensors) if len(tensors) > 1 else first[None]
    words = _as_words(stacked.flatten(0, 1).flatten(1) if first.ndim >= 2 else stacked.reshape(-1, 1), width=width)
    # torch sums int64 without a copy; narrower words it would first widen as a whole.
    step = words.shape[0] if words.dtype == torch.int64 else max(1, _CHUNK_WORDS // words.shape[1])
    for start in range(0, words.shape[0], step):
        torch.sum(words[start : start + step], dim=1, dtype=torch.int64, out=out[start : start + step])
    if first.ndim < 2:
        return out.new_zeros(len(shares))
    columns = first.shape[-1] * first.element_size() // width
    words = words.view(len(shares), -1, columns)
    step = words.shape[1] if words.dtype == torch.int64 else max(1, _CHUNK_WORDS // columns)
    places = torch.arange(columns, device=out.device) + shares[0].first_word
    weights = (2 * places + 1) * _GOLDEN
    sums = out.new_zeros(len(shares), columns)
    for start in range(0, words.shape[1], step):
        sums += torch.sum(words[:, start : start + step], dim=1, dtype=torch.int64)
    return (sums * weights).sum(dim=1)


def _check_bytes(name: str, share: Share) -> None:
    if share.part.is_meta:
        raise EngineError(
            f"the tensor {name!r} of shape {share.shape} is on the meta device: it has no bytes",
            remedy="load or attach the weights before proving that they arrived",
        )


def _read(
    names: Sequence[str], sums: Tensor, columns: Tensor, *, rows: Sequence[int], first_rows: Sequence[int]
) -> dict[str, int]:
    """Return the digests of N tensors of ``rows`` rows each.

    ``sums`` are their consecutive row sums, ``columns`` [N] their weighted column sums. All tensors are computed
    together, since each kernel takes longer to start than to run.
    """
    counts = torch.tensor([rows, first_rows], device=sums.device)
    ends = counts[0].cumsum(0)
    # The difference between a row's place here and its place in the whole tensor.
    shifts = (counts[1] + counts[0] - ends).repeat_interleave(counts[0], output_size=len(sums))
    places = torch.arange(len(sums), device=sums.device) + shifts
    total = torch.nn.functional.pad((sums * (2 * places + 1)).cumsum(0), (1, 0))
    values: list[int] = (total[ends] - total[ends - counts[0]] + columns).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # torch: a list of what?
    return {name: value % _MODULUS for name, value in zip(names, values, strict=True)}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _as_words(rows: Tensor, *, width: int) -> Tensor:
    """Return ``rows`` [rows, columns] as integers [rows, words] of ``width`` bytes."""
    if not rows.is_contiguous() or (rows.storage_offset() * rows.element_size()) % width:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8).view(_WORDS[width])
