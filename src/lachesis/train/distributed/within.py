"""Running a function as if it were a model's forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[], tuple[Tensor, ...]]
# The method that a strategy gives a model whose parameters are whole during its forward only.
METHOD = "run_within"


def run_within(model: torch.nn.Module, function: Function) -> tuple[Tensor, ...]:
    """``function()``, in which the model's own parameters (embeddings, head) are whole, as they are in its forward.

    Where they always are, that is all. The tensors that it returns are those that a backward pass begins from.
    """
    run = getattr(model, METHOD, None)
    return function() if run is None else run(function)
