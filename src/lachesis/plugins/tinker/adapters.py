"""Many LoRA adapters on one base model, one of which computes at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lachesis.common.errors import DataError, first_line
from lachesis.plugins.tinker.records import LoraShape
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.lora import has_experts

# The service's own factor, whatever the rank: updates are scaled by ALPHA / rank.
ALPHA = 32
Tensors = Mapping[str, Tensor]


class AdapterBank:
    """Adapters of one model, whose own weights never change.

    Adapters are in float32 if the model is in 16 bits, as an optimizer's updates are small.

    Args:
        model: a causal language model without adapters.
        name: the name that clients use; saved adapters have it in their configuration.
    """

    def __init__(self, model: PreTrainedModel, *, name: str) -> None:
        self.model = model.requires_grad_(False)
        self._base_name = name
        self._experts = has_experts(model)
        self._places = _places(model)
        self._configs: dict[str, LoraConfig] = {}
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}

    def add(self, shape: LoraShape, tensors: Tensors | None = None) -> str:
        """Add an adapter, with these tensors or as one that does not change the model yet, and return its name.

        Raises:
            DataError: it does not fit this model, or the tensors have another shape.
        """
        config, name = self._config(shape), uuid.uuid4().hex
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(shape.seed)
            try:
                inject_adapter_in_model(config, self.model, adapter_name=name)
            except ValueError as error:
                self._detach(name)
                raise DataError(
                    f"peft cannot attach this adapter to the model: {first_line(error)}",
                    remedy="create the run with train_mlp=False or train_attn=False",
                ) from error
        del self.model.peft_config  # peft's own list of adapters; with it, peft would warn at the next one
        self._configs[name] = config
        self._parameters[name] = _parameters(self.model, name)
        if tensors is not None:
            try:
                self.load(name, tensors)
            except DataError:
                self.remove(name)
                raise
        return name

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        self._detach(name)
        del self._configs[name], self._parameters[name]

    def parameters(self, name: str) -> Mapping[str, nn.Parameter]:
        """Return an adapter's parameters, by the names that peft gives them in files."""
        return self._parameters[name]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return copies of an adapter's parameters, on the CPU."""
        return {key: parameter.detach().cpu().clone() for key, parameter in self._parameters[name].items()}

    def config(self, name: str) -> LoraConfig:
        """Return an adapter's configuration, as peft saves it beside the tensors."""
        return self._configs[name]

    @torch.no_grad()
    def load(self, name: str, tensors: Tensors) -> None:
        """Copy tensors into an adapter. Raises DataError, without copying any, if their shapes differ."""
        own = self._parameters[name]
        different = own.keys() ^ tensors.keys() | {k for k in own.keys() & tensors if own[k].shape != tensors[k].shape}
        if different:
            raise DataError(
                f"the saved adapter's shape differs from this run's: {len(different)} tensors differ, "
                f"{min(different)} is the first",
                remedy="load it into a run that was created with the same rank and layers",
            )
        for key, parameter in own.items():
            parameter.copy_(tensors[key])

    @contextmanager
    def active(self, name: str | None) -> Iterator[PreTrainedModel]:
        """Make the model compute with this adapter, or with none, inside the context."""
        for layer in self._layers():
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name)
        yield self.model

    def _detach(self, name: str) -> None:
        for layer in self._layers():
            layer.set_adapter([])  # or peft would activate another adapter, and warn of it
            layer.delete_adapter(name)

    def _layers(self) -> Iterator[BaseTunerLayer]:
        return (module for module in self.model.modules() if isinstance(module, BaseTunerLayer))

    def _config(self, shape: LoraShape) -> LoraConfig:
        if shape.rank < 1:
            raise DataError(f"the adapter's rank {shape.rank} is less than 1", remedy="choose a rank of at least 1")
        if shape.train_mlp and self._experts:
            raise DataError(
                "adapters of a model's experts are not served here", remedy="create the run with train_mlp=False"
            )
        chosen = {"attn": shape.train_attn, "mlp": shape.train_mlp, "unembed": shape.train_unembed}
        names = [name for part, wanted in chosen.items() if wanted for name in self._places[part]]
        if not names:
            raise DataError(
                "train_attn, train_mlp and train_unembed leave the adapter no layer of this model",
                remedy="set at least one of them to True",
            )
        return LoraConfig(
            r=shape.rank,
            lora_alpha=ALPHA,
            target_modules=_shortened(names, [n for part in self._places.values() for n in part]),
            base_model_name_or_path=self._base_name,
            task_type="CAUSAL_LM",
        )


def _places(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the names of linear layers: of attention, of the rest of decoder layers, and of the head."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    head = model.get_output_embeddings()
    places: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, module in model.named_modules():
        if module is head:
            places["unembed"].append(name)
        elif id(module) in inside and isinstance(module, nn.Linear | Conv1D):
            attention = any("attn" in part or "attention" in part for part in name.split("."))
            places["attn" if attention else "mlp"].append(name)
    return places


def _shortened(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the last parts of the names, as engines expect them, if these mean the same layers."""
    ends = {name.rpartition(".")[2] for name in names}
    same = [name for name in others if name.rpartition(".")[2] in ends]
    return sorted(ends) if len(same) == len(names) else sorted(names)


def _parameters(model: PreTrainedModel, adapter: str) -> dict[str, nn.Parameter]:
    """Return an adapter's parameters, converted to float32, by their names in files."""
    marks = tuple(f".{matrix}.{adapter}." for matrix in ("lora_A", "lora_B"))
    found = {
        f"base_model.model.{name.replace(f'.{adapter}.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if any(mark in name for mark in marks)
    }
    for parameter in found.values():
        parameter.data = parameter.data.float()
    return found
