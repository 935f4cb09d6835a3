"""Parameters of which ranks that compute together have a part each, beside what FSDP shards of them."""

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
    """The dimension of the mesh over which such a part of a tensor was cut; None where there is none."""
    names = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
    return next((name for name in (TENSOR, EXPERT) if name in names), None)


def style_of(plan: Mapping[str, str], name: str) -> str | None:
    """What a plan of transformers says of a module or parameter, where layers are numbered by a star."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def part_of(parameter: Parameter, dimension: int, *, rank: int, mesh: DeviceMesh) -> Parameter:
    """A rank's part of a parameter, cut in this dimension over all ranks of the mesh; they divide it."""
    size = parameter.shape[dimension] // mesh.size()
    part = parameter.detach().narrow(dimension, rank * size, size)
    # A copy, after which the whole can be let go.
    cut = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format), mesh, [Shard(dimension)], run_check=False
    )
    return Parameter(cut, requires_grad=parameter.requires_grad)


@contextmanager
def computing_with_parts(module: nn.Module, *, adds_bias: bool = True) -> Generator[None]:
    """Within it a module's own parameters are plain tensors, this rank's parts; or 0 in the place of a bias."""
    whole = dict(module._parameters)  # pyright: ignore[reportPrivateUsage]  # which takes no plain tensor by setattr
    for name, parameter in whole.items():
        if parameter is not None:
            part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            module._parameters[name] = part if name != "bias" or adds_bias else part * 0  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(whole)
