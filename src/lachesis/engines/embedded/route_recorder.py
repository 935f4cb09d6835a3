"""Recording of the experts to which the tokens of a batch are routed during generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lachesis.common.routed_experts import RoutedExperts
from lachesis.engines.embedded.decoder import Decoder
from lachesis.engines.embedded.experts import decoder_layer_count, stacked_experts
from lachesis.engines.embedded.rows import BatchRows, Share


@dataclass(slots=True)
class SeenRoutes:
    """The experts ``chosen`` [rows, tokens, L, K] in one forward pass."""

    chosen: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int16))


class RouteRecorder:
    """Records the experts of each token in forward passes of a mixture-of-experts model.

    Args:
        model: the model, with experts that :func:`stacked_experts` finds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._experts = stacked_experts(model)
        self._layers = decoder_layer_count(model)
        self._seen: dict[int, Tensor] | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the recorder's hooks to the model inside the context; remove them afterwards."""
        hooks = [module.register_forward_pre_hook(self._see(layer)) for layer, module in self._experts.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def pass_of(self, *, rows: int, new: int) -> Iterator[SeenRoutes]:
        """Record one pass over the last ``new`` tokens of each row; the result is complete after the block."""
        found, self._seen = SeenRoutes(), {}
        try:
            yield found
            chosen = torch.stack([self._seen[layer] for layer in self._experts])  # [layers with experts, tokens, k]
        finally:
            self._seen = None
        chosen = chosen.view(len(chosen), rows, -1, chosen.shape[-1])[:, :, -new:]
        found.chosen = np.zeros((rows, new, self._layers, chosen.shape[-1]), dtype=np.int16)
        found.chosen[:, :, [*self._experts]] = chosen.permute(1, 2, 0, 3).cpu().numpy()

    def _see(self, layer: int) -> Any:
        def see(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if self._seen is not None:  # hidden states, chosen experts, their weights
                self._seen[layer] = arguments[1]

        return see


class RoutedPasses:
    """Forward passes of a batch, which record the experts of its rows if any request wants them.

    Args:
        decoder: the decoder of the batch.
        rows: the rows of the batch, which get their experts from this object.
        shares: the shares of the batch, in order.
        recorder: an attached recorder; ``None`` if no request wants experts.
    """

    def __init__(
        self, decoder: Decoder, rows: BatchRows, shares: Sequence[Share], *, recorder: RouteRecorder | None
    ) -> None:
        self._decoder = decoder
        self._rows = rows
        self._shares = shares
        self._recorder = recorder
        self._prompts: list[np.ndarray] = []  # [P, L, K] of each share
        self._tokens = np.empty(0, dtype=np.int16)  # [R, T, L, K]

    def prefill(self) -> Tensor:
        """Return logits [N, V] after the prompts."""
        if self._recorder is None:
            return self._decoder.prefill()
        lengths = [len(share.request.prompt_ids) for share in self._shares]
        with self._recorder.pass_of(rows=len(lengths), new=max(lengths)) as seen:
            logits = self._decoder.prefill()
        # Shorter prompts are at the end of their rows.
        self._prompts = [rows[-length:] for rows, length in zip(seen.chosen, lengths, strict=True)]
        self._tokens = np.zeros((len(self._rows.all), self._rows.max_tokens, *seen.chosen.shape[2:]), dtype=np.int16)
        self._rows.routed = self._routed
        return logits

    def step(self, fed: Tensor, *, live: np.ndarray, node: np.ndarray, step: int) -> Tensor:
        """Return logits after ``fed``, completion token ``step`` of the rows ``live`` at decoder rows ``node``."""
        if self._recorder is None:
            return self._decoder.step(fed)
        with self._recorder.pass_of(rows=len(fed), new=1) as seen:
            logits = self._decoder.step(fed)
        self._tokens[live, step] = seen.chosen[node, 0]
        return logits

    def _routed(self, row: int, length: int) -> RoutedExperts | None:
        """Return the experts of a row with ``length`` completion tokens; the last token was never an input."""
        share = self._rows.share[row]
        if not self._shares[share].request.params.routed_experts:
            return None
        return RoutedExperts.of(np.concatenate([self._prompts[share], self._tokens[row, : max(0, length - 1)]]))
