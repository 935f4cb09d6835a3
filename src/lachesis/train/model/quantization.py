"""Quantized base weights in 8 or 4 bits, by bitsandbytes; adapters are trained on top of them in the usual dtype.

``nf4`` is QLoRA's (Dettmers et al. 2023, arXiv 2305.14314): 4 bits a weight, a scale for each 64 weights, and those
scales in 8 bits themselves. ``int8`` is LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): 8 bits a weight and a
scale for each row. Embeddings, norms and the LM head stay unchanged, and so do the fused experts of a mixture,
which are not linear layers.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from lachesis.common.errors import DependencyError, ModelError

Quantization = Literal["int8", "nf4"]


def quantization_config(kind: Quantization) -> BitsAndBytesConfig:
    """Return the configuration to load a quantized model with; :func:`settle` is to follow.

    Raises:
        DependencyError: bitsandbytes is not installed.
    """
    require_bitsandbytes(f"model.quantization {kind}")
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def require_bitsandbytes(what: str) -> None:
    """Raise DependencyError if bitsandbytes is not installed; ``what`` needs it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise DependencyError(
            f"{what} needs bitsandbytes, which is not installed",
            remedy="pip install bitsandbytes, or use weights in 16 bits (model.quantization: none)",
        )


def settle(model: PreTrainedModel) -> None:
    """Make quantized layers compute in the model's dtype, and alike in training and evaluation.

    On a CPU bitsandbytes computes differently in evaluation, so ratios would compare two networks. Linear8bitLt rounds
    its inputs to 8 bits in evaluation, and not in training. Linear4bit, on a processor with bf16 instructions,
    rearranges its weights at the first pass in evaluation and has no gradient from then on. Both are kept to their
    behaviour in training. On a GPU the two agree.

    Raises:
        ModelError: the files of a quantized model hold no scales, or int8 in float32 on a GPU, where inputs are
            rounded to 8 bits.
    """
    for layer in quantized_layers(model):
        if all(scales is None for scales in _scales(layer)):
            raise ModelError(
                "its config.json says that bitsandbytes quantized the weights (quantization_config), but its files "
                "hold no scales of them",
                remedy="remove quantization_config from config.json, and set model.quantization to quantize on loading",
            )
        if hasattr(layer.weight, "quant_state"):
            layer.compute_dtype = model.dtype
            layer.support_avx512bf16_for_cpu = False
        elif model.device.type == "cpu":
            layer.register_forward_pre_hook(_as_in_training)
        elif model.dtype == torch.float32:
            raise ModelError(
                "model.quantization int8 rounds the inputs of layers to 8 bits on a GPU, but with model.dtype float32 "
                "two passes must agree almost exactly",
                remedy="set model.dtype: bfloat16, or model.quantization: nf4",
            )


def _scales(layer: Any) -> tuple[Any, ...]:
    """Return the places of a quantized layer's scales: of 4 bits, then of 8 before and after its first pass."""
    places = ((layer.weight, "quant_state"), (layer.weight, "SCB"), (getattr(layer, "state", None), "SCB"))
    return tuple(getattr(owner, name, None) for owner, name in places)


def quantized_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers whose weights bitsandbytes holds."""
    if "bitsandbytes" not in sys.modules:  # it is imported if there are any; importing it takes half a second
        return []
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    return [module for module in model.modules() if isinstance(module, Linear4bit | Linear8bitLt)]


def looks_at_inputs(model: nn.Module) -> bool:
    """Return True if a pass waits for the GPU: int8 layers look for outliers among their inputs."""
    return any(not hasattr(layer.weight, "quant_state") for layer in quantized_layers(model))


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters, with scales and tables of quantized ones.

    Tied ones count once.
    """
    held = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    return sum(held.values()) + sum(_statistics_bytes(layer) for layer in quantized_layers(model))


def _statistics_bytes(layer: Any) -> int:
    """Return the bytes of a quantized layer's scales and tables."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        scales = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
        return scales.nbytes
    tensors = [state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return sum(tensor.nbytes for tensor in tensors)


def _as_in_training(module: nn.Module, args: tuple[Any, ...]) -> None:
    module.training = True
