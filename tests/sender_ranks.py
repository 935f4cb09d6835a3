"""Ranks that send a policy's weights together, as threads of this process over one whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lachesis.train.distributed.rank_sending import SendsWeights
from lachesis.train.distributed.strategy import SingleDevice


class ThreadRank(SendsWeights):
    """One rank; ``making`` stands for what goes wrong while its share is made."""

    def __init__(self, model: nn.Module, *, rank: int, ranks: int) -> None:
        self.model = model  # type: ignore[assignment]
        self.device = torch.device("cpu")
        self.strategy = SingleDevice()
        self.strategy.rank, self.strategy.world_size = rank, ranks
        self.making: Callable[[], None] = lambda: None

    def share(self, senders: Sequence[int], *, saved: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().share(senders, saved=saved):
            self.making()
            yield name, tensor


class ThreadRanks(ThreadRank):
    """Rank 0, seen from a bridge, and the others."""

    def __init__(self, model: nn.Module, *, ranks: int) -> None:
        super().__init__(model, rank=0, ranks=ranks)
        self.following = [ThreadRank(model, rank=rank, ranks=ranks) for rank in range(1, ranks)]
        self.told: list[SimpleNamespace] = []
        self.machine: str | None = None  # of rank 0, if it is to be another than that of the others

    @contextmanager
    def others(self, step: str, told: Mapping[str, Any]) -> Iterator[list[Any]]:
        answers: list[Any] = []
        self.told.append(SimpleNamespace(step=step, **told))
        if self.machine is not None:
            told = {**told, "host": self.machine}
        with ThreadPoolExecutor(len(self.following)) as pool:
            parts = [pool.submit(rank.send_share, step, told) for rank in self.following]
            yield answers
            answers += [part.result() for part in parts]
