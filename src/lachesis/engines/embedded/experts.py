"""Where a mixture of experts of transformers has its experts. An engine looks there, and so does training."""

from __future__ import annotations

import re

from torch import nn

_LAYER = re.compile(r"\.(\d+)\.")


def stacked_experts(model: nn.Module) -> dict[int, nn.Module]:
    """The modules that hold the experts of a layer in parameters [experts, ., .], by the number of the layer.

    Their second argument is, for each token, which of them it goes through: [tokens, k].
    """
    return {
        layer_number(name): module
        for name, module in model.named_modules()
        if "experts" in name.split(".") and any(p.ndim == 3 for p in module.parameters(recurse=False))
    }


def layer_number(name: str) -> int:
    """3 of ``model.layers.3.mlp.experts``: the first number among a module's names."""
    found = _LAYER.search(f".{name}.")
    if found is None:
        raise ValueError(f"{name} is in no layer")
    return int(found[1])


def decoder_layer_count(model: nn.Module) -> int:
    """How many decoder layers a model of transformers has, those without experts among them."""
    config = getattr(model, "config")  # noqa: B009 - of transformers' models, whose type is not known here
    return int(config.get_text_config().num_hidden_layers)
