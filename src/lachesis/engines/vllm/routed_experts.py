"""The routed experts that vLLM returns with ``--enable-return-routed-experts``."""

from __future__ import annotations

from typing import Any

import numpy as np

from lachesis.common.errors import EngineError
from lachesis.common.routed_experts import RoutedExperts


def returns_routes(config: Any) -> bool:
    """Return True if vLLM was started to return routed experts: a model option in 0.26, an output option in 0.32."""
    holder = getattr(config, "aux_output_config", config.model_config)
    return bool(getattr(holder, "enable_return_routed_experts", False))


def read_routes(output: Any) -> RoutedExperts | None:
    """Read the experts of all tokens but the last from a request's last output.

    Return ``None`` if there is no token.

    Raises:
        EngineError: vLLM returned too few, or its kernels did not record them (a token has the same expert twice).
    """
    (completion,) = output.outputs
    if not completion.token_ids:
        return None
    chosen, wanted = completion.routed_experts, len(output.prompt_token_ids) + len(completion.token_ids) - 1
    if chosen is None or len(chosen) < wanted:
        raise EngineError(
            f"vLLM returned the experts of {0 if chosen is None else len(chosen)} of {wanted} tokens",
            remedy="report this bug with the server's log, and set algorithm.router_replay: false",
        )
    last = np.sort(chosen[wanted - 1].astype(np.int64), axis=-1)  # [L, K]; layers without experts have zeros
    if last.shape[-1] > 1 and not (np.diff(last) > 0).all(-1).any():
        raise EngineError(
            "vLLM returned one expert twice in each layer: its kernels on this device do not record their experts",
            remedy="set algorithm.router_replay: false, or serve on a GPU",
        )
    return RoutedExperts.of(chosen[:wanted])
