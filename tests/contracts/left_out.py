"""A plugin of vLLM whose layers leave out their adapter: what vLLM does where it activates no module of a hybrid."""

from __future__ import annotations

import os
from typing import Any

LEFT_OUT = "LACHESIS_TEST_LEFT_OUT"


def leave_out() -> None:
    """Make vLLM's layers of the mixer's input ignore their adapter while a file exists, as plugin of its processes."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    def leave(whole: Any, file: str) -> Any:
        def apply(self: Any, x: Any, bias: Any = None) -> Any:
            if self.base_layer.prefix.endswith("in_proj") and os.path.exists(file):
                return self.base_layer.quant_method.apply(self.base_layer, x, bias)
            return whole(self, x, bias)

        return apply

    for layer in (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA):
        layer.apply = leave(layer.apply, os.environ[LEFT_OUT])
