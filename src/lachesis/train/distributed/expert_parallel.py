"""Expert parallelism: each layer's experts dealt out to the ranks of an expert group, by transformers' plan.

Like a layer's other matrices under tensor parallelism (:mod:`~lachesis.train.distributed.tensor_parallel`) they are
DTensors over the ranks that have them, and FSDP further shards a rank's experts over the ranks of other groups that
have the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.train.distributed.cut import computing_with_parts, part_of, style_of
from lachesis.train.model.dispatch import ExpertGroup, shared_out
from lachesis.train.model.tensor import TensorGroup

# Whose experts were compared with those of one process, by model_type.
ARCHITECTURES = frozenset({"qwen3_moe"})
# What transformers calls it where tokens travel to experts that have whole matrices.
_DISPATCHED, _WHOLE = "ep_dispatch_experts", "grouped_gemm"


class ExpertCut:
    """Distribution of a model's experts over ranks.

    Args:
        model: not sharded yet; it may have an adapter.
        mesh: of the expert group.
        group: the same ranks.
        tensor: the ranks that have the same tokens.

    Raises:
        ModelError: this kind of experts is untested, or they have an adapter.
    """

    def __init__(
        self, model: PreTrainedModel, *, mesh: DeviceMesh, group: ExpertGroup, tensor: TensorGroup | None
    ) -> None:
        self._mesh = mesh
        self._group = group
        self._tensor = tensor
        self._experts = set(_experts(model))

    def apply(self, layer: nn.Module) -> nn.Module | None:
        """Keep this rank's experts of a layer, in place; return the module that holds them, or None."""
        module: Any = next((module for module in layer.modules() if module in self._experts), None)
        if module is None:
            return None
        experts = next(iter(module.parameters())).shape[0]
        for key, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, key, part_of(parameter, 0, rank=self._group.rank, mesh=self._mesh))
        forward = module.forward

        def own(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            # What watches the experts, and whoever else looks at the module, sees the number of all.
            module.num_experts = experts // self._group.size
            try:
                with computing_with_parts(module):
                    return forward(states, chosen, weights)
            finally:
                module.num_experts = experts

        def dispatched(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return self._group.dispatched(states, chosen, weights, experts=experts, compute=own)

        # Not a part of compiled graphs: how many tokens travel is known on the way alone.
        module.forward = torch.compiler.disable(shared_out(self._tensor, dispatched))
        return module


def _experts(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules that hold a layer's experts."""
    remedy = f"leave distributed.expert_parallel_size out; it is for {', '.join(sorted(ARCHITECTURES))}"
    config: Any = model.config.get_text_config()
    if config.model_type not in ARCHITECTURES:
        raise ModelError(f"the experts of {type(model).__name__} have not been tried in parts", remedy=remedy)
    # Below 5.19 transformers has it by a private name alone.
    plan = (model.ep_plan if hasattr(model, "ep_plan") else model._ep_plan) or {}
    for name, module in model.named_modules():
        if style_of(plan, name) != _DISPATCHED:
            continue
        if hasattr(module, "base_layer"):
            raise ModelError(
                f"the adapter changes {name}, which devices are to share",
                remedy="set adapter.targets to linear layers, or leave distributed.expert_parallel_size out",
            )
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        if any(style_of(plan, f"{name}.{key}") != _WHOLE for key in keys):
            raise ModelError(f"transformers has parameters of {name} cut in a way that is not built", remedy=remedy)
        yield module
