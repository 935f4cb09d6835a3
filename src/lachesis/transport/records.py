"""What both sides of a channel have to agree on before tensors travel. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ChannelBackend = Literal["nccl", "gloo", "ipc"]


@dataclass(frozen=True, slots=True)
class ReceivedTensor:
    """A tensor that comes over a channel; of its name in the trainer, peft's or Hugging Face's."""

    name: str
    shape: tuple[int, ...]
    dtype: str
