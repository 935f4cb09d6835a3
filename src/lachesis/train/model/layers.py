"""Some decoder layers only: those that are trained, or that an adapter is put on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig
from lachesis.train.distributed.single import decoder_layers


def train_only(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Freeze all parameters but those of the decoder layers ``layers``, counted from 0.

    Raises:
        ModelError: the model has no such layer.
    """
    chosen = _named_layers(model, layers, key="model.train_layers")
    model.requires_grad_(False)
    for layer in chosen:
        layer.requires_grad_(True)


def lora_targets(model: PreTrainedModel, adapter: LoraAdapterConfig) -> dict[str, Any]:
    """Where the adapter goes, as peft's LoraConfig takes it.

    Raises:
        ModelError: the model has no such layer.
    """
    if adapter.layers is None:
        return {"target_modules": adapter.targets}
    chosen = _named_layers(model, adapter.layers, key="adapter.layers")
    targets = adapter.targets
    if targets == "all-linear":  # which peft does not take together with layers
        targets = sorted({name.rpartition(".")[2] for layer in chosen for name, _ in _linear_modules(layer)})
    return {"target_modules": targets, "layers_to_transform": adapter.layers}


def _linear_modules(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def _named_layers(model: PreTrainedModel, layers: Sequence[int], *, key: str) -> list[nn.Module]:
    found = decoder_layers(model)
    missing = [index for index in layers if index >= len(found)]
    if missing:
        raise ModelError(
            f"{key} names layer {missing[0]}, and {type(model).__name__} has {len(found)} decoder layers",
            remedy=f"choose from 0 to {len(found) - 1}" if found else f"remove {key}",
        )
    return [found[index] for index in layers]
