"""The policy: forward, loss, backward over a batch's micro-batches, and the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lachesis.metrics.values import Max, Mean, MetricValue, Sum
from lachesis.train.backends.base import Backend
from lachesis.train.batch import Batch, MicroBatch
from lachesis.train.forward import ForwardPlan, plan_forward, target_logprobs
from lachesis.train.loss import PolicyLoss, policy_loss
from lachesis.train.loss_options import LossOptions
from lachesis.train.model import LoadedModel, Reference
from lachesis.train.optimizer import PolicyOptimizer


class OptimizerBuilder(Protocol):
    """Makes the optimizer over the parameters that are trained."""

    def __call__(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]], /) -> PolicyOptimizer: ...


class Policy:
    """A model that learns from batches.

    Args:
        loaded: model, tokenizer and adapter.
        backend: how the model is placed and sharded.
        optimizer_builder: makes the optimizer.
        options: the loss.
        packing: as ``model.packing``.
        compile_layers: compile decoder layers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        backend: Backend,
        optimizer_builder: OptimizerBuilder,
        options: LossOptions,
        packing: str = "auto",
        compile_layers: bool = False,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.transformer = loaded.transformer
        self.options = options
        self.backend = backend
        # Dropout (an adapter's) is for accumulate() only: probes, canary and engine see the network as it is.
        self.model.eval()
        self.plan: ForwardPlan = plan_forward(self.transformer, packing=packing)  # type: ignore[arg-type]
        self.reference = Reference(loaded) if options.beta > 0 else None
        backend.prepare(self.transformer, compile_layers=compile_layers)
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = optimizer_builder(trained)
        self.device = next(self.transformer.parameters()).device

    def accumulate(self, batch: Batch) -> dict[str, MetricValue]:
        """Forward and backward over all micro-batches; gradients add up, nothing is updated.

        The gradient is that of the loss over the whole batch, whatever the split into micro-batches.
        """
        self.model.train()
        num_sequences, num_tokens = self.backend.sum_counts(batch.num_sequences, batch.num_tokens)
        parts = []
        for micro in batch.micro_batches:
            micro = micro.to(self.device)
            output = self._loss(micro, num_sequences=num_sequences, num_tokens=num_tokens)
            output.loss.backward()
            parts.append({"loss": output.loss.detach(), **output.metrics})
        self.model.eval()
        # One transfer for all micro-batches: reading a number off a GPU waits for all work before it.
        metrics = _fetch(parts)
        metrics["tokens_trained"] = Sum(float(batch.num_tokens))
        metrics["tokens_forward"] = Sum(float(sum(micro.num_inputs for micro in batch.micro_batches)))
        metrics["micro_batches"] = Sum(float(len(batch.micro_batches)))
        metrics["skipped_zero_advantage"] = Sum(float(batch.skipped_sequences))
        return metrics

    def step(self) -> dict[str, MetricValue]:
        """Clip, update, advance the schedule, clear the gradients.

        Raises:
            TrainingError: the gradient is not finite; the weights are as before.
        """
        rate = self.optimizer.learning_rate
        norm = self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": Mean(norm), "learning_rate": Mean(rate)}

    @torch.no_grad()
    def canary(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of ``token_ids[1:]`` at temperature 1, through the path that training takes."""
        micro = canary_micro_batch(token_ids).to(self.device)
        return target_logprobs(self.transformer, micro, plan=self.plan).logprobs.float().tolist()

    def _loss(self, micro: MicroBatch, *, num_sequences: int, num_tokens: int) -> PolicyLoss:
        reference = self._reference_logprobs(micro)
        found = target_logprobs(self.transformer, micro, plan=self.plan)
        logprobs, entropies = found.logprobs, found.entropies
        if micro.expand is not None:
            logprobs, entropies = logprobs.index_select(0, micro.expand), entropies.index_select(0, micro.expand)
        output = policy_loss(
            logprobs,
            row=micro.row,
            mask=torch.ones_like(logprobs),
            advantages=micro.advantages,
            old_logprobs=micro.old_logprobs,
            ref_logprobs=reference,
            entropies=entropies,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            options=self.options,
        )
        difference = (logprobs.detach() - micro.old_logprobs).abs()
        known = ~difference.isnan()
        alignment = torch.stack([difference.nansum(), known.sum().to(difference.dtype)])
        aligned = {"logprob_diff_mean": alignment, "logprob_diff_max": difference.nan_to_num(0.0).max()}
        return PolicyLoss(output.loss, {**output.metrics, **aligned})

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        with self.reference.active():
            logprobs = target_logprobs(self.reference.transformer, micro, plan=self.plan).logprobs
        return logprobs if micro.expand is None else logprobs.index_select(0, micro.expand)


def _fetch(parts: Sequence[dict[str, Tensor]]) -> dict[str, MetricValue]:
    """Merge the micro-batches' values on the device and fetch all at once.

    Pairs [2] are (weighted sum, weight); scalars are maxima where their name ends so, else sums.
    """
    if not parts:
        return {"loss": Sum(0.0)}
    metrics: dict[str, MetricValue] = {}
    merged = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    merged = {name: values.amax(0) if name.endswith("_max") else values.sum(0) for name, values in merged.items()}
    numbers = iter(torch.cat([value.flatten().float() for value in merged.values()]).tolist())
    for name, value in merged.items():
        if value.dim() == 1:
            metrics[name] = Mean(next(numbers), next(numbers))
        else:
            metrics[name] = Max(next(numbers)) if name.endswith("_max") else Sum(next(numbers))
    return metrics


def canary_micro_batch(token_ids: Sequence[int]) -> MicroBatch:
    """One plain sequence whose every token but the first is predicted, at temperature 1."""
    ids = torch.tensor(token_ids, dtype=torch.int64)
    inputs = ids.numel() - 1
    ends = torch.tensor([0, inputs], dtype=torch.int32)
    return MicroBatch(
        input_ids=ids[:-1],
        position_ids=torch.arange(inputs),
        cu_seq_q=ends,
        cu_seq_k=ends,
        key_index=None,
        max_q=inputs,
        max_k=inputs,
        predict=torch.arange(inputs),
        targets=ids[1:],
        inverse_temperature=torch.ones(inputs),
        expand=None,
        row=torch.zeros(inputs, dtype=torch.int64),
        old_logprobs=torch.full((inputs,), float("nan")),
        advantages=torch.zeros(1),
    )
