"""Recorder of the experts that the sequences of a batch are routed to while they are generated."""

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
    """Experts ``chosen`` [rows, tokens, L, K] in one forward pass."""

    chosen: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int16))


class RouteRecorder:
    """Sees which experts tokens go through in forward passes of a mixture; in others it sees nothing.

    Args:
        model: a mixture of experts, as :func:`stacked_experts` finds them.
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
        """Record one pass over the last ``new`` tokens of each row; after the block their experts are there."""
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
            if self._seen is not None:  # hidden states, the experts chosen, their weights
                self._seen[layer] = arguments[1]

        return see


class RoutedPasses:
    """Forward passes of a batch that note the experts of its rows, if any of its requests asks for them.

    Args:
        decoder: of the batch.
        rows: of the batch; they ask this object for their experts.
        shares: of the batch, in order.
        recorder: attached; ``None`` if no request asks for experts.
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
        """Logits [N, V] after the prompts."""
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
        """Logits after ``fed``, which is completion token ``step`` of the rows ``live``, at the places ``node``."""
        if self._recorder is None:
            return self._decoder.step(fed)
        with self._recorder.pass_of(rows=len(fed), new=1) as seen:
            logits = self._decoder.step(fed)
        self._tokens[live, step] = seen.chosen[node, 0]
        return logits

    def _routed(self, row: int, length: int) -> RoutedExperts | None:
        """Return the experts of a row whose completion has ``length`` tokens; its last token was never an input."""
        share = self._rows.share[row]
        if not self._shares[share].request.params.routed_experts:
            return None
        return RoutedExperts.of(np.concatenate([self._prompts[share], self._tokens[row, : max(0, length - 1)]]))
