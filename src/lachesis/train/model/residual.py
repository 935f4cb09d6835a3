"""Residual stream in float32 under 16-bit weights.

A decoder sums the outputs of its layers: x + attention(norm(x)) + mlp(norm(...)) + ... With bf16 weights transformers
keeps that sum in bf16 too, and rounds it twice a layer to 8 significant bits. Here the sum alone is widened: a layer's
input is cast up, and the outputs of its parts (norms, attention, feed-forward) are cast back to the weights' dtype, so
that all matrix products and the attention are unchanged. The norms see float32 and round once, at their end. It is
done by forward hooks, which travel with the modules: training, canary, generation in this process and references all
run the same network.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError, first_line
from lachesis.train.distributed.strategy import decoder_layers

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@torch.no_grad()
def keep_residual_in_float32(model: PreTrainedModel) -> None:
    """Widen the residual stream of a model in 16 bits; one in float32 has it already and is left alone.

    Raises:
        ModelError: the architecture adds up elsewhere than in its decoder layers, or has norms that take no
            float32 beside 16-bit weights (those of torch do not). The model is then as it was.
    """
    if model.dtype not in _SIXTEEN_BITS:
        return
    layers = decoder_layers(model)
    hooks = _install(model, layers, dtype=model.dtype)
    reason = _why_not(model, layers)
    if reason is not None:
        for hook in hooks:
            hook.remove()
        raise ModelError(
            f"the residual stream of {type(model).__name__} cannot be kept in float32: {reason}",
            remedy="set model.residual_dtype: auto, or model.dtype: float32",
        )


def _install(model: PreTrainedModel, layers: list[nn.Module], *, dtype: torch.dtype) -> list[RemovableHandle]:
    # The same objects for all layers, so that compiled layers are one program.
    widen = partial(_cast_input, before=dtype, after=torch.float32)
    narrow_input = partial(_cast_input, before=torch.float32, after=dtype)
    narrow_output = partial(_cast_output, before=torch.float32, after=dtype)
    hooks = []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(widen, with_kwargs=True))
        for part in layer.children():
            hooks.append(part.register_forward_hook(narrow_output))
            if not _is_norm(part):
                hooks.append(part.register_forward_pre_hook(narrow_input, with_kwargs=True))
    last_norms = [part for part in model.base_model.children() if _is_norm(part)]
    return hooks + [norm.register_forward_hook(narrow_output) for norm in last_norms]


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _cast_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, before: torch.dtype, after: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the hidden states (the first argument, or the one of that name) from one dtype to another."""
    if args:
        return (_cast(args[0], before=before, after=after), *args[1:]), kwargs
    if "hidden_states" in kwargs:
        kwargs = kwargs | {"hidden_states": _cast(kwargs["hidden_states"], before=before, after=after)}
    return args, kwargs


def _cast_output(
    module: nn.Module, args: tuple[Any, ...], output: Any, *, before: torch.dtype, after: torch.dtype
) -> Any:
    if isinstance(output, tuple):
        return (_cast(output[0], before=before, after=after), *output[1:])
    return _cast(output, before=before, after=after)


def _cast(value: Any, *, before: torch.dtype, after: torch.dtype) -> Any:
    return value.to(after) if isinstance(value, Tensor) and value.dtype == before else value


def _why_not(model: PreTrainedModel, layers: list[nn.Module]) -> str | None:
    """Run a few tokens and return why the residual stream cannot be widened, or None.

    Each layer has to take and give float32, and the head the weights' dtype.
    """
    given: list[Any] = []
    watching = [layer.register_forward_hook(lambda _module, _args, output: given.append(output)) for layer in layers]
    ids = torch.arange(4, device=model.device)[None]
    try:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return first_line(error)
    finally:
        for hook in watching:
            hook.remove()
    dtypes = {value.dtype for output in given for value in [output[0] if isinstance(output, tuple) else output]}
    if len(given) != len(layers) or dtypes != {torch.float32}:
        return "its layers do not add up what their parts give, they do so inside of them"
    if hidden.dtype != model.dtype:
        return f"its last norm gives {hidden.dtype}"
    return None
