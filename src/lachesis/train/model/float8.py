"""Float8 matrix products in the linear layers while training, by torchao.

Weights, gradients and everything between the layers stay in the model's dtype, under the same names and in the same
storage: only the products round their two factors to float8, times a scale that brings the largest value of a tensor
(``float8``) or of each of its rows (``float8_rowwise``) to the format's largest. Weights and activations take e4m3;
incoming gradients take e5m2, or e4m3 by rows (Micikevicius et al. 2022, arXiv 2209.05433). It speeds up large layers,
most of all by rows, which need no pass for a tensor's largest value; it saves no memory. Only passes of the loss use
it: the policy's, its old logprobs and a reference. The canary, probes and generation in this process use the unrounded
network, so that the comparison with an engine does not depend on it. (Generation in another thread during a loss is in
float8 as well, with the logprobs of what it sampled from.)

A row or tensor of zeros, from padding or an advantage of 0, would be divided by 0 and give NaN. torchao's scale uses at
least 1e-12, so zeros stay zeros.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from lachesis.common.errors import DependencyError, ModelError

logger = logging.getLogger(__name__)

Float8Scaling = Literal["float8", "float8_rowwise"]
_RECIPES = {"float8": "tensorwise", "float8_rowwise": "rowwise"}
# The factor that float8 kernels require in the sizes of a weight, and the first NVIDIA GPUs that have such kernels.
_MULTIPLE = 16
_CAPABILITY = (8, 9)
# Small layers that choose among experts: rounding can change a choice entirely.
_ROUTERS = ("gate", "router")


class Float8Switch:
    """Switch of a model's float8 layers, shared with copies of the model.

    All copies use the same switch.
    """

    def __init__(self) -> None:
        self.active = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @contextmanager
    def on(self) -> Iterator[None]:
        """Compute in float8 within the block, which must include the backward pass: checkpointing recomputes in it."""
        self.active = True
        try:
            yield
        finally:
            self.active = False


def compute_in_float8(model: PreTrainedModel, scaling: Float8Scaling) -> Float8Switch:
    """Convert the linear layers of a model in place, and return the switch, which is off.

    Parameters stay the same objects. The LM head, routers, and layers with a size that is not a multiple of 16 are left
    out. A CPU lacks such products, so factors are rounded the same way and multiplied in float32.

    Raises:
        DependencyError: torchao is not installed.
        ModelError: the GPU has no float8 products, or the model has no layer to convert.
    """
    if importlib.util.find_spec("torchao") is None:
        raise DependencyError(
            f"model.matmul_dtype {scaling} needs torchao, which is not installed",
            remedy="pip install torchao, or set model.matmul_dtype: auto",
        )
    emulated = _check_device(model.device, scaling)
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    head = model.get_output_embeddings()
    chosen = {name for name, module in linear.items() if module is not head and _fits(name, module)}
    if not chosen:
        raise ModelError(
            f"model.matmul_dtype {scaling}: {type(model).__name__} has no linear layer whose sizes are multiples of "
            f"{_MULTIPLE}",
            remedy="set model.matmul_dtype: auto",
        )
    switch = _convert(model, chosen, scaling=scaling, emulated=emulated)
    left = len(linear) - len(chosen) - (head in linear.values())
    logger.info("%d linear layers compute in %s, %d others and the head do not", len(chosen), scaling, left)
    return switch


def _fits(name: str, layer: nn.Linear) -> bool:
    sizes = (layer.in_features, layer.out_features)
    return name.rpartition(".")[2] not in _ROUTERS and all(size % _MULTIPLE == 0 for size in sizes)


def _check_device(device: torch.device, scaling: str) -> bool:
    """Return True if products must be emulated. Raise ModelError if the GPU cannot compute them."""
    if device.type != "cuda":
        logger.warning(
            "model.matmul_dtype %s is emulated on a %s: factors are rounded to float8 and multiplied in float32; the "
            "model learns as on a GPU, but slower than without float8",
            *(scaling, device.type.upper()),
        )
        return True
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        raise ModelError(
            f"model.matmul_dtype {scaling} needs a GPU of compute capability 8.9 or more (Ada, Hopper and later), but "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}",
            remedy="set model.matmul_dtype: auto",
        )
    return False


def _convert(model: PreTrainedModel, chosen: set[str], *, scaling: Float8Scaling, emulated: bool) -> Float8Switch:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(_RECIPES[scaling])
    # The backward pass keeps sums in fewer bits than float32, as the forward pass does: rounding the factors changes so
    # much more that gradients stay as close to those of 16 bits (benchmarks/RESULTS.md, "8B with LoRA, beside TRL").
    back = replace(recipe.gemm_config_grad_input, use_fast_accum=True)
    # The gradient of a weight sums over tokens, of which a micro-batch has any number: padded to a multiple of 16.
    config = replace(recipe, gemm_config_grad_input=back, pad_inner_dim=True, emulate=emulated)
    training = model.training
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    model.train(training)  # new modules are in training mode
    switch = Float8Switch()
    for name in chosen:
        module: Any = model.get_submodule(name)
        module.__class__ = _switched_class(type(module))
        module.switch = switch
    return switch


@cache
def _switched_class(float8_linear: type[nn.Linear]) -> type[nn.Linear]:
    """Return torchao's layer with a switch; the class is only known once torchao is imported."""

    class SwitchedFloat8Linear(float8_linear):  # type: ignore[misc, valid-type]
        switch: Float8Switch

        def forward(self, input: Tensor) -> Tensor:
            # A tensor without elements has no largest element.
            if not self.switch.active or not input.numel():
                return functional.linear(input, self.weight, self.bias)
            # One row per token, because torchao's result for a tensor with more dimensions or gaps cannot be reshaped.
            output = super().forward(input.reshape(-1, self.in_features))
            return output.reshape(*input.shape[:-1], self.out_features)

    return SwitchedFloat8Linear
