"""First layers of a model in float32, on which ways of running it are told apart where 16 bits would blur them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lachesis.train.distributed.strategy import decoder_list


@contextmanager
def first_layers_in_float32(model: PreTrainedModel, *, vocab_size: int) -> Iterator[None]:
    """Have a model of 16 bits be its first layers alone, in float32; afterwards it is what it was, bit for bit.

    They are as many as it takes to have one of each kind. What is held in addition is these layers in float32, and of
    embeddings and head the rows of the first ``vocab_size`` tokens.
    """
    layers = decoder_list(model)
    rest = list(layers)[_enough(model) :]
    del layers[len(layers) - len(rest) :]
    tables = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if _is_table(module)]
    cut = {id(tensor) for table in tables for tensor in table.parameters(recurse=False)}
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and t.element_size() == 2]
    held = [(tensor, tensor.data) for tensor in tensors]
    paddings = [(table, table.padding_idx) for table in tables if isinstance(table, nn.Embedding)]
    try:
        for table, _ in paddings:
            table.padding_idx = None
        for tensor, data in held:
            tensor.data = (data[:vocab_size] if id(tensor) in cut else data).float()
        yield
    finally:
        for tensor, data in held:
            tensor.data = data
        for table, padding in paddings:
            table.padding_idx = padding
        layers.extend(rest)


def has_float32(model: PreTrainedModel) -> bool:
    """Return True if a process can compute with a model of 16 bits in float32: none is cut or quantized."""

    def is_plain(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() >= 2 and not isinstance(tensor, DTensor)

    return all(map(is_plain, model.parameters()))


def _is_table(module: nn.Module | None) -> TypeGuard[nn.Embedding | nn.Linear]:
    """Return True for embeddings or a head with a row for each token, and nothing added to it by an adapter."""
    return isinstance(module, nn.Embedding | nn.Linear)


def _enough(model: PreTrainedModel) -> int:
    """Return how many of the first layers have one of each kind among them."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    seen: dict[Hashable, int] = {}
    for index, layer in enumerate(decoder_list(model)):
        told = kinds[index] if index < len(kinds) else None
        seen.setdefault((told, *map(_traits, layer.modules())), index)
    return 1 + max(seen.values(), default=-1)


def _traits(module: nn.Module) -> Hashable:
    """Return what tells a module from those of another kind of layer: its type, its words, and what is set in it."""
    public = sorted((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return type(module), *((name, _trait(value)) for name, value in public)


def _trait(value: object) -> Hashable:
    if isinstance(value, int | float | None):
        return value is None, bool(value)
    return value if isinstance(value, str) else type(value)
