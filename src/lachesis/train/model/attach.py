"""A model without weights of its own, for tensors that come from somewhere else."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lachesis.common.errors import ModelError, first_line
from lachesis.config.schema import ModelConfig


class WeightSource(Protocol):
    """Tensors that a model can be attached to, such as :class:`lachesis.bridges.engine_weights.EngineWeights`."""

    @property
    def dtype(self) -> torch.dtype: ...

    def attach(self, model: PreTrainedModel) -> int: ...


def attached_transformer(config: ModelConfig, weights: WeightSource) -> PreTrainedModel:
    """The causal language model of ``config.path`` whose parameters are ``weights``; nothing is loaded.

    Raises:
        ModelError: there is no such model, or the weights are of another one or in another dtype.
    """
    dtype = weights.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    model = empty_transformer(config, dtype=dtype)
    weights.attach(model)
    return model


def empty_transformer(config: ModelConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of ``config.path`` with all parameters on the meta device, ties kept.

    Buffers, such as the frequencies of rotary embeddings, are computed for real, on the CPU: they are in no
    checkpoint, and nothing would bring them later.

    Raises:
        ModelError: there is no such model.
    """
    try:
        found = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(found, dtype=dtype, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"no causal language model is described in {config.path!r}: {first_line(error)}",
            remedy="set model.path to a directory with config.json, or to a hub id in the cache",
        ) from error
    # Moving parameters to the meta device one by one has parted those that are tied.
    model.tie_weights()
    # A model need not have this file; then its end tokens are those of its config.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(config.path)
    return model.eval()
