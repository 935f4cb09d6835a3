"""Reader of the canary in the trainer: logprobs of a fixed sequence, computed as in training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.common.errors import first_line
from lachesis.train.batch import MicroBatch, plain_micro_batch
from lachesis.train.model.forward import ForwardPlan, target_logprobs
from lachesis.train.model.quantization import looks_at_inputs

_log = logging.getLogger(__name__)


class CanaryReader:
    """Reader of a model's canaries.

    A sequence of a dozen tokens keeps a GPU busy for less time than it takes to launch its thousand kernels. So the
    second reading of a sequence is captured as a CUDA graph, and later ones replay it: the graph reads the weights in
    place, with their current values. If weights have moved, the graph is captured again. A network that waits for the
    GPU, as int8 layers do, cannot be captured and is run each time.

    Args:
        transformer: the causal language model, adapter included.
        plan: how it is run in training.
        device: where it computes.
        capture: allow CUDA graphs; not if passes wait for other ranks.
    """

    def __init__(
        self, transformer: PreTrainedModel, *, plan: ForwardPlan, device: torch.device, capture: bool = True
    ) -> None:
        self._transformer = transformer
        self._plan = plan
        self._device = device
        self._seen: tuple[int, ...] | None = None
        self._captured: _Captured | None = None
        self._micro = lru_cache(1)(lambda tokens: plain_micro_batch(tokens).to(device))
        # Runs of recurrent layers are laid out on the CPU.
        self._capture = capture and plan.recurrent is None and not looks_at_inputs(transformer)

    @torch.no_grad()
    def read(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprobs [T - 1] of ``token_ids`` [T] after the first, at temperature 1, in nats."""
        tokens = tuple(token_ids)
        captured = self._graph(tokens) if self._capture and self._device.type == "cuda" else None
        if captured is None:
            return self._run(self._micro(tokens)).tolist()
        captured.graph.replay()
        return captured.logprobs.tolist()

    def _graph(self, tokens: tuple[int, ...]) -> _Captured | None:
        """Return the captured graph that replays a reading of ``tokens``, or None if the model must be run."""
        if self._seen != tokens:
            # The first run of a shape may compile or load kernels, which cannot happen during a capture.
            self._seen, self._captured = tokens, None
        elif self._captured is None or self._captured.places != self._places():
            self._captured = self._try_capture(self._micro(tokens))
        return self._captured

    def _run(self, micro: MicroBatch) -> Tensor:
        logprobs = target_logprobs(self._transformer, micro, plan=self._plan).logprobs
        return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))

    def _places(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._transformer.parameters())

    def _try_capture(self, micro: MicroBatch) -> _Captured | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logprobs = self._run(micro)
        except RuntimeError as error:
            _log.info("reading the canary without a CUDA graph: %s", first_line(error))
            self._capture = False
            _end_capture()
            return None
        return _Captured(graph, micro, logprobs, self._places())


def _end_capture() -> None:
    """Reset the CUDA random generator after a capture that failed.

    After an aborted capture torch (2.11, 2.13) leaves its generator capturing, so that every random number on the GPU
    raises. A successful capture ends that state.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")


@dataclass(frozen=True, slots=True)
class _Captured:
    """Captured graph with the tensors that it reads and writes; ``places`` are the addresses of the weights."""

    graph: torch.cuda.CUDAGraph
    micro: MicroBatch
    logprobs: Tensor
    places: tuple[int, ...]
