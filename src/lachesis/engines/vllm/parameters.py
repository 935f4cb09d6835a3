"""The parameters of an engine worker's model: what they are called, what is in them, how others map them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lachesis.engines.serving.served import DigestSlice, Refused
from lachesis.transport.digest import digests
from lachesis.transport.shared_tensors import dtype_name, export_cuda

_REPACKED = (
    "vLLM on the CPU repacks the weights of linear layers and leaves the parameters empty, so that {}",
    "use the embedded engine's server on the CPU",
)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter under the name it has without LoRA, tied ones once."""
    return {name.replace(".base_layer.", "."): parameter.detach() for name, parameter in model.named_parameters()}


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Shape, dtype and device of every parameter."""
    return {
        name: {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "device": str(tensor.device)}
        for name, tensor in named_parameters(model).items()
    }


def digest_slices(model: nn.Module, slices: Mapping[str, DigestSlice] | None) -> dict[str, int]:
    """Digests of rows of parameters; of every parameter that has bytes without ``slices``.

    Raises:
        Refused: (404) a name is unknown; (400) rows are outside; (409) the parameter was emptied by vLLM.
    """
    parameters = named_parameters(model)
    if slices is None:
        return digests({name: tensor for name, tensor in parameters.items() if tensor.numel()})
    chosen = {}
    for asked, part in slices.items():
        tensor = parameters.get(part.name)
        if tensor is None:
            raise Refused(
                f"the engine has no parameter {part.name!r}", status=404, remedy="look at /bridge/state_dict_info"
            )
        if not tensor.numel():
            text, remedy = _REPACKED
            raise Refused(text.format(f"{part.name!r} cannot be read"), status=409, remedy=remedy)
        end = tensor.shape[0] if part.rows is None else part.start + part.rows
        if not 0 <= part.start <= end <= tensor.shape[0]:
            raise Refused(
                f"rows {part.start} to {end} of {part.name!r} were asked for, it has {tensor.shape[0]}",
                remedy="correct the slice",
            )
        chosen[asked] = tensor[part.start : end]
    return digests(chosen)


def export(model: nn.Module, *, device: torch.device, tensor_parallel_size: int) -> dict[str, dict[str, Any]]:
    """CUDA IPC handles of every parameter, as :class:`~lachesis.transport.shared_tensors.SharedTensor` JSON.

    Raises:
        Refused: (409) the parameters of this engine cannot be shared.
        EngineError: their memory cannot be.
    """
    if tensor_parallel_size > 1:
        raise Refused(
            f"the weights are cut over {tensor_parallel_size} GPUs, and a trainer on one of them could write only the "
            "part that is there: sharing needs --tensor-parallel-size 1",
            status=409,
            remedy="use tensor_parallel_size 1, or broadcast the weights",
        )
    if device.type != "cuda":
        text, remedy = _REPACKED
        raise Refused(text.format("they cannot be shared"), status=409, remedy=remedy)
    return {name: export_cuda(parameter).to_json() for name, parameter in named_parameters(model).items()}


def repack_tied(model: nn.Module) -> None:
    """Have modules that share another's parameter process it again, after it was loaded.

    On the CPU an output head computes with a packed copy of its weights. Loading makes a new one for the module
    that the checkpoint names, the embedding, and forgets the head that is tied to it.
    """
    owners: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or id(weight) not in owners:
            owners.add(id(weight))
        elif (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
