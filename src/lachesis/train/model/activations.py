"""Which activations of the decoder layers are kept for the backward pass, and which are computed again."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from lachesis.config.schema import Activations
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.attention import ATTENTION_OPERATORS

_SPARES = "_lachesis_spares_memory"


def keep_activations(model: PreTrainedModel, which: Activations) -> None:
    """Have the layers keep all of them, the results of attention alone (``selective``), or their inputs alone.

    What is not kept is computed again in the backward pass. Attention costs the square of a sequence's length, so that
    in a long one it is most of a layer's work, and its result the least of a layer's memory. ``auto``, which a run has
    decided before (:mod:`lachesis.run.activations`), keeps all.
    """
    setattr(model, _SPARES, which in ("selective", "recompute"))
    if which == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif which == "selective":
        for layer in decoder_layers(model):
            layer.forward = MethodType(_keeping_attention, layer)


def spares_memory(model: nn.Module) -> bool:
    """Whether its layers keep less than all, so that what runs beside them should not keep much either."""
    return getattr(model, _SPARES, False)


def _keeping_attention(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer)
    if not layer.training:
        return forward(*args, **kwargs)
    contexts = partial(create_selective_checkpoint_contexts, list(ATTENTION_OPERATORS))
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
