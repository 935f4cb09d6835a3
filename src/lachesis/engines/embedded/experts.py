"""Location of the experts in a transformers mixture-of-experts model, for engines and training.

Engines record routing there, and training replays it.
"""

from __future__ import annotations

import re

from torch import nn

_LAYER = re.compile(r"\.(\d+)\.")


def stacked_experts(model: nn.Module) -> dict[int, nn.Module]:
    """Return the modules that hold a layer's experts in parameters [experts, ., .], by layer number.

    The second argument of these modules is each token's choice of experts: [tokens, k].
    """
    return {
        layer_number(name): module
        for name, module in model.named_modules()
        if "experts" in name.split(".") and any(p.ndim == 3 for p in module.parameters(recurse=False))
    }


def layer_number(name: str) -> int:
    """Return the first number in a module's name: 3 for ``model.layers.3.mlp.experts``."""
    found = _LAYER.search(f".{name}.")
    if found is None:
        raise ValueError(f"{name} has no layer number")
    return int(found[1])


def decoder_layer_count(model: nn.Module) -> int:
    """Return the number of a transformers model's decoder layers, including those without experts."""
    config = getattr(model, "config")  # noqa: B009 - of transformers' models, whose type is not known here
    return int(config.get_text_config().num_hidden_layers)
