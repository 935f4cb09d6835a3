"""First layers of a model in float32, which tell ways of running it apart that look alike in 16 bits."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lachesis.train.distributed.strategy import decoder_list


@contextmanager
def first_layers_in_float32(model: PreTrainedModel, *, vocab_size: int) -> Iterator[None]:
    """Reduce a 16-bit model to its first layers, in float32, within the block; restore it bit for bit.

    They include one layer of each kind. The additional memory is these layers in float32, and the rows of embeddings
    and head for the first ``vocab_size`` tokens.
    """
    layers = decoder_list(model)
    rest = list(layers)[_enough(model) :]
    del layers[len(layers) - len(rest) :]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [module for module in ends if isinstance(module, nn.Embedding | nn.Linear)]  # without an adapter
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
    """Return True if a process can compute a 16-bit model in float32: no weight is cut or quantized."""

    def is_plain(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() >= 2 and not isinstance(tensor, DTensor)

    return all(map(is_plain, model.parameters()))


def _enough(model: PreTrainedModel) -> int:
    """Return the smallest number of first layers that include one of each kind."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    seen: dict[Hashable, int] = {}
    for index, layer in enumerate(decoder_list(model)):
        told = kinds[index] if index < len(kinds) else None
        seen.setdefault((told, *map(_traits, layer.modules())), index)
    return 1 + max(seen.values(), default=-1)


def _traits(module: nn.Module) -> Hashable:
    """Return a key of a module's kind: its type, its texts and its settings."""
    public = sorted((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return type(module), *((name, _trait(value)) for name, value in public)


def _trait(value: object) -> Hashable:
    if isinstance(value, int | float | None):
        return value is None, bool(value)
    return value if isinstance(value, str) else type(value)
