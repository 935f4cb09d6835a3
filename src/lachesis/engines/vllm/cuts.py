"""Tensor-parallel shards: the rectangles of whole parameters that a worker of vLLM holds, and their order.

The rules follow vLLM's layers, identified by class name, so that vLLM is not imported. A tensor without a rule has no
cut and no digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lachesis.engines.serving.backend import DigestSlice
from lachesis.transport.digest import Share
from lachesis.transport.float8 import FP8

_UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_BY_OUTPUTS = ("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear")
_VOCABULARY = ("VocabParallelEmbedding", "ParallelLMHead")
# Expert kernels that use the stacked experts in the order of a checkpoint. Others swap gate and up (FlashInfer),
# shuffle, transpose or pack them, mostly without changing the shape.
_IN_ORDER = ("TRITON", "BATCHED_TRITON")
# For each requested tensor: digests of the rectangles that a worker holds, by their position.
Parts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``held`` to ``held + rows`` of a worker's tensor, which are the rows from ``first_row`` on of the whole."""

    held: int
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a whole parameter that a worker's tensor holds.

    Attributes:
        shape: the shape of the whole parameter.
        blocks: the blocks of rows; none for a scalar.
        columns: the index of the worker's share of each row; also 0 for whole rows. For an expert, whose row is its
            whole matrix, the share need not be contiguous.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    columns: int = 0


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by their names without LoRA, tied ones once; 8-bit matrices as [out, in]."""
    return {
        name.replace(".base_layer.", "."): _outputs_first(parameter.detach())
        for name, parameter in model.named_parameters()
    }


def _outputs_first(tensor: Tensor) -> Tensor:
    """Return an 8-bit matrix, which vLLM keeps as a view [in, out] of its bytes, as [out, in]; others unchanged."""
    return tensor.t() if tensor.dtype == FP8 and tensor.ndim == 2 and not tensor.is_contiguous() else tensor


def find_cuts(model: nn.Module) -> dict[str, Cut]:
    """Return the cuts of a worker's parameters that have a rule, by their names without LoRA."""
    found: dict[str, Cut] = {}
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        cut = _cut(owners[path], leaf, parameter)
        if cut is not None:
            found[name.replace(".base_layer.", ".")] = cut
    return found


def reordered_experts(model: nn.Module) -> frozenset[str]:
    """Return the names, without LoRA, of expert weights that may not be in a checkpoint's order."""
    return frozenset(
        f"{path}.{leaf}".replace(".base_layer.", ".")
        for path, module in model.named_modules()
        if "w13_weight" in module._parameters and not _in_order(getattr(module, "quant_method", None))
        for leaf, _ in module.named_parameters(recurse=False)
    )


def _in_order(method: Any) -> bool:
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
    return type(method).__name__ == "UnquantizedFusedMoEMethod" and backend in _IN_ORDER


def whole_shape(name: str, cuts: Mapping[str, Cut]) -> list[int]:
    """Return the shape of the whole parameter; [0], as for an empty one, if its cut is unknown."""
    return list(cuts[name].shape) if name in cuts else [0]


def shares(held: Tensor, cut: Cut, asked: DigestSlice) -> dict[str, Share]:
    """Return the parts of the requested rows that a worker's tensor holds, by their position in the whole."""
    if not cut.shape:
        return {"0:0": Share(held, ())}
    end = asked.end(cut.shape[0])
    shape = (end - asked.start, *cut.shape[1:])
    found: dict[str, Share] = {}
    for block in cut.blocks:
        first, last = max(block.first_row, asked.start), min(block.first_row + block.rows, end)
        if first < last:
            start = block.held + first - block.first_row
            part = held[start : start + last - first]
            column = cut.columns * part.shape[-1] if part.ndim > 1 and part.shape[-1] != shape[-1] else 0
            found[f"{first}:{cut.columns}"] = Share(part, shape, first - asked.start, column)
    return found


def add_workers(answers: Iterable[Parts]) -> dict[str, int]:
    """Combine the workers' parts into digests of whole tensors.

    A rectangle that several workers hold counts once; a tensor with differing copies is left out.
    """
    every = list(answers)
    found: dict[str, int] = {}
    for name in every[0]:
        places = {place for parts in every for place in parts[name].items()}
        if len(places) == len(dict(places)):
            found[name] = sum(digest for _, digest in places) % (1 << 64)
    return found


def _cut(owner: nn.Module, leaf: str, held: Tensor) -> Cut | None:
    kind, layer = type(owner).__name__, owner  # vLLM's attributes are not parameters
    if not hasattr(owner, "quant_method"):
        # A parameter without a loader is loaded whole.
        return None if hasattr(held, "weight_loader") else _whole(held)
    if leaf in ("w13_weight", "w2_weight"):
        return _experts(layer, leaf, held)
    plain = type(owner.quant_method).__name__ in _UNQUANTIZED or (leaf == "bias" and _is_in_8_bits(owner))
    if not plain or leaf not in ("weight", "bias") or not held.numel():
        return None
    if kind in _BY_OUTPUTS:
        return _by_outputs(layer, held)
    if kind == "RowParallelLinear":
        return _by_inputs(layer, held) if leaf == "weight" else _whole(held)
    if kind in _VOCABULARY:
        return _vocabulary(layer, held)
    return _whole(held) if kind == "ReplicatedLinear" else None


def _is_in_8_bits(layer: Any) -> bool:
    """Return True if a layer's matrix is in 8 bits; biases never are."""
    return getattr(getattr(layer, "weight", None), "dtype", None) == FP8


def _whole(held: Tensor) -> Cut:
    shape = tuple(held.shape)
    return Cut(shape, (Block(0, 0, shape[0]),) if shape else ())


def _by_outputs(layer: Any, held: Tensor) -> Cut | None:
    """Return the cut of stacked matrices, each divided by rows; several workers may hold the same rows."""
    ways, rank = layer.tp_size, layer.tp_rank
    kind = type(layer).__name__
    sizes = [layer.output_size] if kind == "ColumnParallelLinear" else layer.output_sizes
    copies = [1] * len(sizes)
    if kind == "QKVParallelLinear":
        copies = [1, layer.num_kv_head_replicas, layer.num_kv_head_replicas]
    blocks: list[Block] = []
    start = first = 0
    for size, same in zip(sizes, copies, strict=True):
        rows = size // ways  # vLLM's size counts each copy
        blocks.append(Block(start, first + rank // same * rows, rows))
        start, first = start + rows, first + size // same
    return Cut((first, *held.shape[1:]), tuple(blocks)) if held.shape[0] == start else None


def _by_inputs(layer: Any, held: Tensor) -> Cut | None:
    if held.ndim != 2 or held.shape[1] * layer.tp_size != layer.input_size:
        return None
    return Cut((held.shape[0], layer.input_size), (Block(0, 0, held.shape[0]),), layer.tp_rank)


def _experts(layer: Any, leaf: str, held: Tensor) -> Cut | None:
    """Return the cut of a layer's stacked experts: workers share each expert's rows (gate, up) or columns (down).

    Return ``None`` if workers hold whole experts, for which there is no rule.
    """
    ways = layer.moe_config.moe_parallel_config
    if ways.ep_size > 1 or not _in_order(layer.quant_method):
        return None
    shape = list(held.shape)
    shape[1 if leaf == "w13_weight" else 2] *= ways.tp_size
    return Cut(tuple(shape), (Block(0, 0, shape[0]),), ways.tp_rank)


def _vocabulary(layer: Any, held: Tensor) -> Cut | None:
    """Return the cut of token rows; padding is not in checkpoints, and rows for adapters' tokens have no rule."""
    if layer.num_added_embeddings:
        return None
    first, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    return Cut((layer.org_vocab_size, *held.shape[1:]), (Block(0, first, end - first),))
