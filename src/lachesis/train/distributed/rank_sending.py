"""Sending of a policy's weights to the engines by all ranks together, each its part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lachesis.bridges.senders import ShareSender, deal, dealt_specs, dealt_weights, exhaust, weight_sizes
from lachesis.bridges.sent_weights import as_saved
from lachesis.common.deadline import Deadline
from lachesis.common.errors import LachesisError
from lachesis.train.distributed.strategy import Strategy

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class SendsWeights:
    """Part of the policies of several ranks (:class:`~lachesis.train.policy.Policy`) that takes part in transfers."""

    model: PreTrainedModel | PeftModel
    strategy: Strategy
    device: torch.device
    _sender: ShareSender | None = None

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that could send."""
        return self.strategy.world_size

    def share(self, senders: Sequence[int], *, saved: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank sends as one of ``senders``, in order, by a checkpoint's names if ``saved``.

        Consume all of it, because ranks gather for one another.
        """
        parts = deal(weight_sizes(self.model), senders=senders)
        tensors = dealt_weights(self.model, parts, rank=self.strategy.rank, gather=self.strategy.gather_to)
        return as_saved(self.model, tensors) if saved else tensors

    def send_share(self, step: str, told: Mapping[str, Any]) -> Any:
        """Take part in a transfer as a rank other than 0; failures of the engines are part of the answer.

        Args:
            step: ``listen`` for new channels, with addresses in the answer, or ``send`` over them.
            told: rank 0's arguments.
        """
        if step == "listen":
            return self._listen(told)
        began = time.perf_counter()
        senders: list[int] = told["senders"]
        stream = self.share(senders, saved=told["saved"])
        found: dict[str, Any] = {}
        if self.strategy.rank in senders:
            found = self._send(stream, told)
        exhaust(stream)  # other ranks still gather
        return {**found, "seconds": time.perf_counter() - began}

    def _listen(self, told: Mapping[str, Any]) -> dict[str, str]:
        if self.strategy.rank not in told["candidates"]:
            return {}
        self._sender = self._sender or ShareSender(self.device)
        try:
            return {"address": self._sender.listen(told["urls"], secret=told["secret"], host=told["host"])}
        except LachesisError as error:
            return {"error": str(error)}

    def _send(self, stream: Iterator[tuple[str, Tensor]], told: Mapping[str, Any]) -> dict[str, Any]:
        assert self._sender is not None, "it has listened before"
        senders = told["senders"]
        specs, sender_of = dealt_specs(self.model, senders=senders, saved=told["saved"])
        own = senders.index(self.strategy.rank)
        try:
            sent = self._sender.send(
                stream,
                [spec for spec, sender in zip(specs, sender_of, strict=True) if sender == own],
                world_size=told["world_size"],
                backend=told["backend"],
                deadline=Deadline(told["what"], told["limit_s"], "deadlines.sync_s"),
            )
        except LachesisError as error:
            return {"error": str(error)}
        return {"bytes": sent.num_bytes, "most_under_way": sent.most_under_way}
