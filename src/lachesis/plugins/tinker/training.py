"""A training run: an adapter, the gradient that its requests have added up, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lachesis.common.errors import DataError, LachesisError, TrainingError, first_line
from lachesis.plugins.tinker.adapters import AdapterBank
from lachesis.plugins.tinker.data import check_pass, loss_inputs, micro_batches
from lachesis.plugins.tinker.losses import loss_named, options_of
from lachesis.plugins.tinker.records import AdamStep, LoraShape, Pass, PassResult
from lachesis.train.model.forward import ForwardPlan, target_logprobs

_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class Base:
    """The model that all runs share.

    ``max_tokens``: most tokens of one forward pass; ``max_context``: of one sequence.
    """

    bank: AdapterBank
    plan: ForwardPlan
    device: torch.device
    vocab_size: int
    max_context: int
    max_tokens: int


class TrainingRun:
    """Training of one client's adapter. All methods run in the thread of the worker.

    A request that fails changes no weight. If it is a forward_backward, the gradient added up so far is dropped and
    the next step refused: clients ask for the step before they know how the pass went.
    """

    def __init__(self, base: Base, shape: LoraShape, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.shape = shape
        self._base = base
        # With an adapter on the head, logits are not a linear map of the hidden states alone.
        self._plan = replace(base.plan, head="model") if shape.train_unembed else base.plan
        self.adapter = base.bank.add(shape, tensors)
        self._optimizer = torch.optim.AdamW(self._parameters.values())
        self.failed = ""

    @property
    def _parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return self._base.bank.parameters(self.adapter)

    def forward_backward(self, asked: Pass) -> PassResult:
        """Compute logprobs and loss of the data; unless ``forward_only``, add up the gradient.

        Raises:
            DataError: the request is wrong.
            TrainingError: logprobs or loss are not finite.
        """
        try:
            check_pass(asked, vocab_size=self._base.vocab_size, max_context=self._base.max_context)
            with self._base.bank.active(self.adapter), torch.set_grad_enabled(not asked.forward_only):
                return self._pass(asked)
        except BaseException as error:
            if not asked.forward_only:
                self.drop_gradient(error)
            raise

    def drop_gradient(self, error: BaseException) -> None:
        """Drop the gradient after a failed forward_backward, as the sum would lack a part that the client asked for."""
        self._optimizer.zero_grad()
        self.failed = self.failed or (error.message if isinstance(error, LachesisError) else first_line(error))

    def _pass(self, asked: Pass) -> PassResult:
        loss, options = loss_named(asked.loss), options_of(asked.loss, asked.options)
        found: list[np.ndarray] = []
        total = 0.0
        for part, micro in micro_batches(asked.data, max_tokens=self._base.max_tokens):
            here = micro.to(self._base.device)
            logprobs = target_logprobs(self._base.bank.model, here, plan=self._plan).logprobs
            inputs = loss_inputs(part, names=loss.inputs, device=self._base.device)
            lengths = [datum.tokens.size for datum in part]
            value = loss.summed(logprobs, inputs, options, lengths=lengths)
            if not math.isfinite(summed := value.item()) or not bool(logprobs.isfinite().all()):
                raise TrainingError(
                    f"the {asked.loss} of this run is not finite (loss {summed:g})",
                    remedy="load an earlier state, and lower the learning rate: the weights have become too large",
                )
            if not asked.forward_only:
                value.backward()
            total += summed
            found += np.split(logprobs.detach().float().cpu().numpy(), np.cumsum(lengths)[:-1])
        return PassResult(found, total)

    def step(self, adam: AdamStep) -> dict[str, float]:
        """Clip the gradient, make a step of AdamW, clear the gradient, and return the metrics.

        Raises:
            DataError: a parameter is wrong.
            TrainingError: the gradient is missing or not finite, or an earlier forward_backward failed.
        """
        failed, self.failed = self.failed, ""
        try:
            if failed:
                raise TrainingError(
                    f"the step is refused, because a forward_backward before it failed: {failed}",
                    remedy="its gradient was dropped: send the data again",
                )
            return self._step(adam)
        finally:
            self._optimizer.zero_grad()

    def _step(self, adam: AdamStep) -> dict[str, float]:
        if wrong := _wrong_parameter(adam):
            raise DataError(f"the optimizer's {wrong}", remedy="correct the AdamParams")
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise TrainingError("the step has no gradient", remedy="send a forward_backward first")
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient's norm is {norm:g}: the step is refused, and the gradient was dropped",
                remedy="look for extreme weights, advantages or logprobs in the data",
            )
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(
                [*self._parameters.values()], adam.grad_clip_norm, torch.tensor(norm, device=self._base.device)
            )
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self._optimizer.step()
        return {"grad_norm": norm, "learning_rate": adam.learning_rate}

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the adapter's current tensors."""
        return self._base.bank.tensors(self.adapter)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return moments and step counts, by ``KIND:PARAMETER``; none before the first step."""
        return {
            f"{kind}:{name}": self._optimizer.state[parameter][kind].detach().cpu().clone()
            for name, parameter in self._parameters.items()
            for kind in _STATES
            if parameter in self._optimizer.state
        }

    def gradient(self) -> dict[str, Tensor]:
        """Return the gradient that has been added up since the last step, by the parameters' names; copied."""
        return {name: p.grad.detach().cpu().clone() for name, p in self._parameters.items() if p.grad is not None}

    def add_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """Take a gradient that :meth:`gradient` returned."""
        for name, tensor in gradient.items():
            parameter = self._parameters[name]
            parameter.grad = tensor.to(parameter.device, copy=True)

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> None:
        """Take a saved adapter, and its optimizer's state or a fresh one; a gradient that was there is dropped.

        Raises:
            DataError: the adapter is of another shape; nothing is changed.
        """
        self._base.bank.load(self.adapter, weights)
        self._optimizer.zero_grad()
        self.failed = ""
        self._optimizer.state.clear()
        if not optimizer:
            return
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter] = {
                # A count is kept on the CPU, as torch's own is.
                kind: optimizer[f"{kind}:{name}"].clone().to("cpu" if kind == "step" else parameter.device)
                for kind in _STATES
                if f"{kind}:{name}" in optimizer
            }

    def close(self) -> None:
        """Free its memory."""
        self._base.bank.remove(self.adapter)


def _wrong_parameter(adam: AdamStep) -> str:
    checks = {
        f"learning_rate {adam.learning_rate:g} is negative or not finite": 0 <= adam.learning_rate < math.inf,
        f"beta1 {adam.beta1:g} is not at least 0 and below 1": 0 <= adam.beta1 < 1,
        f"beta2 {adam.beta2:g} is not at least 0 and below 1": 0 <= adam.beta2 < 1,
        f"eps {adam.eps:g} is not above 0": 0 < adam.eps < math.inf,
        f"weight_decay {adam.weight_decay:g} is negative or not finite": 0 <= adam.weight_decay < math.inf,
        f"grad_clip_norm {adam.grad_clip_norm:g} is negative or not finite": 0 <= adam.grad_clip_norm < math.inf,
    }
    return next((wrong for wrong, right in checks.items() if not right), "")
