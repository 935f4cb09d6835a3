"""Parameters split among ranks that compute together, in addition to FSDP's sharding."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

# The dimensions of a mesh over which parameters are cut so: by their matrices, and by their experts.
TENSOR, EXPERT = "tensor", "expert"


def cut_by(tensor: Tensor) -> str | None:
    """Return the mesh dimension over which a part of a tensor was cut, or None."""
    names = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
    return next((name for name in (TENSOR, EXPERT) if name in names), None)


def style_of(plan: Mapping[str, str], name: str) -> str | None:
    """Return the style that a transformers plan gives to a module or parameter (a star stands for layer numbers)."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def part_of(parameter: Parameter, dimension: int, *, rank: int, mesh: DeviceMesh) -> Parameter:
    """Return a rank's part of a parameter, cut evenly in this dimension over all ranks of the mesh."""
    size = parameter.shape[dimension] // mesh.size()
    part = parameter.detach().narrow(dimension, rank * size, size)
    # A copy, after which the whole can be let go.
    cut = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format), mesh, [Shard(dimension)], run_check=False
    )
    return Parameter(cut, requires_grad=parameter.requires_grad)


@contextmanager
def computing_with_parts(module: nn.Module, *, adds_bias: bool = True) -> Generator[None]:
    """Make a module's own parameters plain tensors (this rank's parts) within the block.

    A bias is replaced by 0 unless this rank adds it.
    """
    whole = dict(module._parameters)  # pyright: ignore[reportPrivateUsage]  # which takes no plain tensor by setattr
    for name, parameter in whole.items():
        if parameter is not None:
            part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            module._parameters[name] = part if name != "bias" or adds_bias else part * 0  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(whole)
