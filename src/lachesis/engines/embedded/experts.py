"""Location of the experts in a transformers mixture, shared by engines and training.

An engine looks there, and so does training.
"""

from __future__ import annotations

import re

from torch import nn

_LAYER = re.compile(r"\.(\d+)\.")


def stacked_experts(model: nn.Module) -> dict[int, nn.Module]:
    """Return the modules that hold a layer's experts in parameters [experts, ., .], by layer number.

    Their second argument is, for each token, which of them it goes through: [tokens, k].
    """
    return {
        layer_number(name): module
        for name, module in model.named_modules()
        if "experts" in name.split(".") and any(p.ndim == 3 for p in module.parameters(recurse=False))
    }


def layer_number(name: str) -> int:
    """Return 3 for ``model.layers.3.mlp.experts``: the first number among a module's names."""
    found = _LAYER.search(f".{name}.")
    if found is None:
        raise ValueError(f"{name} is in no layer")
    return int(found[1])


def decoder_layer_count(model: nn.Module) -> int:
    """Return the number of a transformers model's decoder layers, including those without experts."""
    config = getattr(model, "config")  # noqa: B009 - of transformers' models, whose type is not known here
    return int(config.get_text_config().num_hidden_layers)
