"""Expert parallelism: each layer's experts dealt out to the ranks of an expert group, by transformers' plan.

They are DTensors over the ranks that have them, which FSDP further shards over the ranks of other groups that have the
same ones, checkpoints save in parts and bridges gather.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.train.model.dispatch import ExpertGroup

# The dimension of a mesh over which experts are dealt out.
EXPERT = "expert"
# Architectures, by model_type, whose distributed experts were compared with those in one process.
ARCHITECTURES = frozenset({"qwen3_moe"})
# Transformers' name for the style in which tokens travel to experts with whole matrices.
_DISPATCHED, _WHOLE = "ep_dispatch_experts", "grouped_gemm"


class ExpertCut:
    """Distribution of a model's experts over ranks.

    Args:
        model: not sharded yet; it may have an adapter.
        mesh: of the expert group.
        group: the same ranks.

    Raises:
        ModelError: this kind of experts is untested, or they have an adapter.
    """

    def __init__(self, model: PreTrainedModel, *, mesh: DeviceMesh, group: ExpertGroup) -> None:
        self._mesh = mesh
        self._group = group
        self._experts = set(_experts(model))

    def apply(self, layer: nn.Module) -> nn.Module | None:
        """Keep this rank's experts of a layer, in place; return the module that holds them, or None."""
        module: Any = next((module for module in layer.modules() if module in self._experts), None)
        if module is None:
            return None
        experts = next(iter(module.parameters())).shape[0]
        for key, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, key, own_experts(parameter, rank=self._group.rank, mesh=self._mesh))
        forward = module.forward

        def own(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            # Code that watches the experts, or reads the module, sees the number of all experts.
            module.num_experts = experts // self._group.size
            try:
                with _computing_with_parts(module):
                    return forward(states, chosen, weights)
            finally:
                module.num_experts = experts

        def dispatched(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return self._group.dispatched(states, chosen, weights, experts=experts, compute=own)

        # Not part of compiled graphs, because the number of tokens that travel is known only at run time.
        module.forward = torch.compiler.disable(dispatched)
        return module


def is_dealt_out(tensor: DTensor) -> bool:
    """Return True if a parameter is of experts that are dealt out to ranks."""
    return EXPERT in (tensor.device_mesh.mesh_dim_names or ())


def own_experts(parameter: Parameter, *, rank: int, mesh: DeviceMesh) -> Parameter:
    """Return a rank's part of a parameter [experts, ...], dealt out evenly to all ranks of the mesh."""
    size = parameter.shape[0] // mesh.size()
    # A copy, so that the whole tensor can be freed.
    part = parameter.detach()[rank * size : (rank + 1) * size].clone(memory_format=torch.contiguous_format)
    return Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False), requires_grad=parameter.requires_grad)


@contextmanager
def _computing_with_parts(module: nn.Module) -> Generator[None]:
    """Make a module's own parameters plain tensors (this rank's parts) within the block."""
    whole = dict(module._parameters)  # pyright: ignore[reportPrivateUsage]  # which takes no plain tensor by setattr
    for name, parameter in whole.items():
        if isinstance(parameter, DTensor):
            module._parameters[name] = parameter.to_local()  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(whole)


def _style_of(plan: Mapping[str, str], name: str) -> str | None:
    """Return the style that a transformers plan gives to a module or parameter (a star stands for layer numbers)."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _experts(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules that hold a layer's experts."""
    remedy = f"leave out distributed.expert_parallel_size; it supports {', '.join(sorted(ARCHITECTURES))}"
    config: Any = model.config.get_text_config()
    if config.model_type not in ARCHITECTURES:
        raise ModelError(f"expert parallelism has not been tested with {type(model).__name__}", remedy=remedy)
    # Before 5.19 transformers has it only under a private name.
    plan = (model.ep_plan if hasattr(model, "ep_plan") else model._ep_plan) or {}
    for name, module in model.named_modules():
        if _style_of(plan, name) != _DISPATCHED:
            continue
        if hasattr(module, "base_layer"):
            raise ModelError(
                f"the adapter changes {name}, whose experts would be distributed over devices",
                remedy="set adapter.targets to linear layers, or leave out distributed.expert_parallel_size",
            )
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        if any(_style_of(plan, f"{name}.{key}") != _WHOLE for key in keys):
            raise ModelError(f"transformers splits parameters of {name} in an unsupported way", remedy=remedy)
        yield module
