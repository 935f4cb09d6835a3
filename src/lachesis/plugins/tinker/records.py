"""Records between the modules of this package: numbers and token ids, nothing of the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lachesis.common.types import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """Shape of an adapter: its rank, its layers, and the seed of its initial values."""

    rank: int
    seed: int
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence to learn from.

    ``tokens`` int64 [T]; ``targets`` int64 [T]: the loss at t is of the logprob of ``targets[t]`` after
    ``tokens[: t + 1]``; ``inputs`` float32 [T] each, by the names of the loss function.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Forward pass, and the backward pass unless ``forward_only``."""

    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class PassResult:
    """``logprobs``: float32 [T] of each datum's targets. ``loss``: the sum over all tokens of all data."""

    logprobs: Sequence[np.ndarray]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Step of AdamW, with the names of torch; ``grad_clip_norm`` 0 does not clip."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Request for completions of a prompt, and for logprobs of the prompt itself.

    ``prompt_logprobs``: how many of its last tokens are scored; ``top_prompt_logprobs``: K likeliest tokens of each.
    """

    generation: GenerationRequest
    prompt_logprobs: int = 0
    top_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """``prompt_logprobs`` float32 [P], NaN where none was asked for or there is none (the first token).

    ``top_ids`` int32 and ``top_logprobs`` float32 [P, K]; a row without an answer holds 0 and -99999.
    """

    completions: Sequence[Completion]
    prompt_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
