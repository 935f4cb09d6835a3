"""Repeatable passes of a model, without dropout, router noise and batch-dependent rotary factors.

Otherwise ratios would compare two networks, and a sample's logprobs would depend on its neighbours in the batch.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lachesis.common.errors import ConfigError


def make_repeatable(model: PreTrainedModel) -> None:
    """Make the model compute the same in every pass: in training and sampling, alone and beside other sequences."""
    switch_off_dropout(model)
    switch_off_router_noise(model)
    fix_rotary_factors(model)


def switch_off_router_noise(model: PreTrainedModel) -> None:
    """Keep routers that add noise while they are trained (PhiMoE, DBRX, Mixtral's jitter) in evaluation mode."""
    for module in model.modules():
        named = {**vars(module), **dict(module.named_children())}
        if any(re.search("jitter|noise|noisy", name) and value is not None for name, value in named.items()):
            module.register_forward_pre_hook(_in_evaluation)


def _in_evaluation(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    module.training = False


def fix_rotary_factors(model: PreTrainedModel) -> None:
    """Choose the rotary factors once, for sequences of all lengths, as vLLM does.

    For longrope (Phi 3.5, Phi 4 mini) these are the long ones, for ``dynamic`` those of the original context.
    transformers chooses by the largest position of a pass, which depends on the other sequences of a pack or batch, and
    in cached generation changes them in the middle of a sequence.
    """
    modules: list[Any] = [*model.modules()]
    for module in modules:
        kinds: Any = getattr(module, "rope_type", None)
        by_layer: dict[str | None, str] = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type in (name for name, kind in by_layer.items() if kind == "longrope"):
            _use_long_factors(module, layer_type)
        fixed = {name: "fixed" if kind in ("longrope", "dynamic") else kind for name, kind in by_layer.items()}
        if fixed != by_layer:
            module.rope_type = fixed if isinstance(kinds, dict) else fixed[None]


def require_long_factors(model: PreTrainedModel, max_model_len: int | None) -> None:
    """Refuse an engine that would choose other factors of longrope than :func:`fix_rotary_factors` has.

    Args:
        max_model_len: longest sequence of a vLLM engine, by which it chooses; the model's own if None.

    Raises:
        ConfigError: it would choose the short ones.
    """
    parameters: Any = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    if parameters.get("rope_type") == "longrope" and max_model_len is not None and max_model_len <= original:
        raise ConfigError(
            f"with engine.max_model_len {max_model_len} vLLM uses the short rotary factors of this model (longrope, "
            f"up to {original} tokens), but training uses the long ones",
            remedy=f"set engine.max_model_len above {original}, or leave it out",
        )


def _use_long_factors(module: Any, layer_type: str | None) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    own = getattr(module, f"{prefix}inv_freq")
    longer = parameters["original_max_position_embeddings"] + 1
    named = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, own.device, seq_len=longer, **named)
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(own.dtype), persistent=False)
    if "long_mscale" in parameters:  # PhiMoE computes the factors in each pass, from its configuration
        module.config = copy.deepcopy(module.config)
        module.config.rope_parameters |= {f"short_{name}": parameters[f"long_{name}"] for name in ("factor", "mscale")}


def switch_off_dropout(model: PreTrainedModel) -> None:
    """Switch dropout off, because the ratios of GRPO would otherwise compare two random networks."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention takes its rate as a number, which each architecture keeps under a name like attention_dropout.
        rates = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        for name in rates:
            setattr(module, name, 0.0)
