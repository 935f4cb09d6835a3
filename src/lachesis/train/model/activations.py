"""Activation checkpointing: which activations of decoder layers are kept for the backward pass."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from lachesis.config.schema import SPARING, Activations
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.attention import ATTENTION_OPERATORS
from lachesis.train.model.offload import HostMemory

_SPARES = "_lachesis_spares_memory"


def keep_activations(model: PreTrainedModel, which: Activations) -> None:
    """Set which activations of the layers are kept for the backward pass.

    ``selective`` keeps the results of attention beside the layers' inputs, ``recompute`` their inputs alone, on their
    device, and ``offload`` the inputs in the host's memory. Everything else is recomputed in the backward pass.
    Attention costs the square of a sequence's length: in a long one it is most of a layer's work, and its result the
    least of a layer's memory. ``auto``, which a run has resolved before (:mod:`lachesis.run.parts`), keeps all.
    """
    setattr(model, _SPARES, which in SPARING)
    if which in ("recompute", "offload"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if which == "offload":
        memory = HostMemory()
        for layer in decoder_layers(model):
            checkpointed = partial(_offloading, memory, layer._gradient_checkpointing_func)
            layer._gradient_checkpointing_func = checkpointed  # pyright: ignore[reportArgumentType]  # no parameter
    elif which == "selective":
        for layer in decoder_layers(model):
            layer.forward = MethodType(_keeping_attention, layer)


def _offloading(memory: HostMemory, checkpointed: Any, *args: Any) -> Any:
    """Run a layer under transformers' own checkpointing, with its inputs kept in ``memory``; save nothing else."""
    with memory.keeping():
        return checkpointed(*args)


def spares_memory(model: nn.Module) -> bool:
    """Return True if the model's layers discard activations, so that code beside them should keep little too."""
    return getattr(model, _SPARES, False)


def _keeping_attention(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer)
    if not layer.training:
        return forward(*args, **kwargs)
    contexts = partial(create_selective_checkpoint_contexts, list(ATTENTION_OPERATORS))
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
