"""An adapter on a transformers model, added by hooks: the base's parameters, and their names, stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lachesis.engines.serving.adapter_files import WEIGHTS_NAME, AdapterFiles, adapted_module
from lachesis.engines.serving.served import LoraSpec, Refused
from lachesis.transport.digest import served_lora_b
from lachesis.transport.layout import ReceivedTensor

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """A [rank, in] and B [out, rank] of each module in the model's dtype; ``scaling`` is folded into B, as in vLLM."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors under peft's names without their prefix."""
        return {
            f"{module}.lora_{part}.weight": tensor
            for module, pair in self.pairs.items()
            for part, tensor in zip("AB", pair, strict=True)
        }


class LoraSlot:
    """Room for one adapter in a model. What is set is used from the next forward pass on, wholly.

    Args:
        model: any model of linear layers; hooks are added to them once, and cost nothing without an adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        self.weights: LoraWeights | None = None
        for name, layer in self._layers.items():
            layer.register_forward_hook(self._hook(name))

    def check(self, modules: Mapping[str, tuple[int, int]], *, made_for: str = "") -> None:
        """Raise Refused (422) unless each of ``modules`` is a linear layer here with these (in, out) features."""
        hint = f"it was trained on {made_for!r}" if made_for else "it was trained on another model"
        if unknown := [name for name in modules if name not in self._layers]:
            raise Refused(
                f"the adapter changes {_list(unknown)}, which this model does not have as linear layers",
                status=422,
                remedy=hint,
            )
        for name, features in modules.items():
            own = _features(self._layers[name])
            if features != own:
                raise Refused(
                    f"the adapter takes {name} to have {features[0]} inputs and {features[1]} outputs, here it has "
                    f"{own[0]} and {own[1]}",
                    status=422,
                    remedy=hint,
                )

    def prepare(self, raw: Mapping[str, Tensor], *, scaling: float) -> LoraWeights:
        """Weights as they are served, from tensors under peft's names that :meth:`check` has seen."""
        by_name = {adapted_module(name): tensor for name, tensor in raw.items()}
        pairs = {}
        for module in sorted({module for module, _ in by_name}):
            weight = self._layers[module].weight
            a = by_name[module, "A"].detach().to(device=weight.device, dtype=weight.dtype, copy=True)
            b = served_lora_b(by_name[module, "B"].to(weight.device), scaling=scaling, dtype=weight.dtype)
            pairs[module] = (a, b)
        return LoraWeights(pairs)

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        def add(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            pair = None if self.weights is None else self.weights.pairs.get(name)
            if pair is None:
                return None
            return output + nn.functional.linear(nn.functional.linear(inputs[0], pair[0]), pair[1])

        return add


def read_weights(files: AdapterFiles, slot: LoraSlot) -> LoraWeights:
    """The adapter's tensors, as the slot takes them.

    Raises:
        Refused: (422) it does not fit the model; (400) its file is damaged.
    """
    slot.check(files.modules, made_for=files.base_model)
    try:
        raw = load_file(files.path / WEIGHTS_NAME)
    except (OSError, SafetensorError) as error:
        raise Refused(
            f"{files.path / WEIGHTS_NAME} cannot be read: {error}", remedy="save the adapter again"
        ) from error
    return slot.prepare(raw, scaling=files.scaling)


def received_modules(tensors: tuple[ReceivedTensor, ...], spec: LoraSpec) -> dict[str, tuple[int, int]]:
    """The modules, with (in, out) features, of an adapter that is to come over a channel.

    Raises:
        Refused: (422) the tensors are not pairs of A [r, in] and B [out, r].
    """
    shapes = {adapted_module(tensor.name): tensor.shape for tensor in tensors}
    modules = {}
    for module in {module for module, _ in shapes}:
        a, b = shapes.get((module, "A"), ()), shapes.get((module, "B"), ())
        if len(a) != 2 or len(b) != 2 or a[0] != spec.r or b[1] != spec.r:
            raise Refused(
                f"the tensors of {module!r} have shapes {list(a) or 'none'} and {list(b) or 'none'}, "
                f"not [{spec.r}, in] and [out, {spec.r}]",
                status=422,
                remedy="announce both matrices of every module, of rank lora.r",
            )
        modules[module] = (a[1], b[0])
    return modules


def _features(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
