"""A plugin of vLLM's whose CPU kernels leave weights as they were loaded, as those of a GPU do.

Those of vLLM's CPU build keep a packed copy and empty the parameter, so that neither digests nor copies in place are
possible there.
"""

from __future__ import annotations

import torch
from torch import nn


def keep_weights() -> None:
    """Before vLLM's workers load the model."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _plain


def _plain(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
