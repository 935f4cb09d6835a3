"""Load of a mixture's experts: its measurement, and the auxiliary loss that balances it.

Routers and experts are found as transformers describes them: every architecture's routers by the recordable outputs of
its class, its experts by their stacked weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from lachesis.common.errors import ModelError
from lachesis.engines.embedded.experts import stacked_experts
from lachesis.metrics.values import Max, Mean, MetricValue


def watch_experts(model: PreTrainedModel, *, coefficient: float | Literal["model"] | None) -> ExpertRouting | None:
    """Return a recorder of a mixture's routing; ``None`` for a model without experts.

    Raises:
        ModelError: a model without experts has a weight for a router loss; or as :class:`ExpertRouting`.
    """
    if stacked_experts(model):
        return ExpertRouting(model, coefficient=coefficient)
    if isinstance(coefficient, float | int) and coefficient > 0:
        raise ModelError(
            f"algorithm.router_aux_loss_coef is {coefficient:g}, but {type(model).__name__} has no experts",
            remedy="remove the key, or set model.path to a mixture of experts",
        )
    return None


@dataclass(slots=True)
class Routed:
    """Routing of one forward pass, with a tensor for each layer in order.

    ``chosen`` are int64 [tokens, k], the experts that each token went through; ``logits`` are [tokens, experts], the
    routers', with their graph.
    """

    chosen: list[Tensor] = field(default_factory=list[Tensor])
    logits: list[Tensor] = field(default_factory=list[Tensor])


class ExpertRouting:
    """Recorder of a model's routing while it is trained.

    Args:
        model: a mixture of experts; hooks are added to its layers, and cost nothing outside of :meth:`watched`.
        coefficient: as ``algorithm.router_aux_loss_coef``.

    Raises:
        ModelError: an auxiliary loss is wanted, and the model's routers are unknown.
    """

    def __init__(self, model: PreTrainedModel, *, coefficient: float | Literal["model"] | None = None) -> None:
        config: Any = model.config.get_text_config()
        if coefficient == "model" or (coefficient is None and getattr(config, "output_router_logits", False)):
            coefficient = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
        self.coefficient = coefficient or 0.0
        self.top_k = int(getattr(config, "num_experts_per_tok", 1))
        self._seen: Routed | None = None
        self._experts = [*stacked_experts(model).values()]
        self._sizes = torch.tensor([experts_of(module) for module in self._experts], dtype=torch.float64)
        self._most_experts = int(self._sizes.max())
        # Compiled, it would differ from layer to layer, and after eight of them nothing would be compiled.
        see: Any = torch.compiler.disable(self._see_experts)
        for module in self._experts:
            module.register_forward_pre_hook(see, with_kwargs=True)
        recorder = _recorder(model)
        if self.coefficient and recorder is None:
            raise ModelError(
                f"algorithm.router_aux_loss_coef needs the routers of {type(model).__name__}, but transformers does "
                "not say where they are",
                remedy="set algorithm.router_aux_loss_coef: 0",
            )
        if self.coefficient and recorder is not None:
            for _, module in routers(model):
                module.register_forward_hook(self._see_router(recorder.index))
        self._load: Tensor | None = None
        self._loss = Mean(0.0, 0.0)

    @contextmanager
    def watched(self) -> Iterator[Routed]:
        """Yield the routing of the forward passes in the block, without recomputations of the backward pass."""
        self._seen = seen = Routed()
        try:
            yield seen
        finally:
            self._seen = None

    def count(self, routed: Routed, *, valid: Tensor | None) -> None:
        """Add a pass to the metrics of :meth:`take`.

        ``valid`` [tokens] marks tokens that are not padding; all if unset.
        """
        # Experts that are called without a choice (Llama 4's compute all tokens) have no load to report.
        if len(routed.chosen) != len(self._experts):
            return
        loads = [expert_load(c, valid=valid, experts=self._most_experts) for c in routed.chosen]
        self._load = torch.stack(loads) if self._load is None else self._load + torch.stack(loads)

    def auxiliary_loss(self, routed: Routed, *, valid: Tensor | None, share: float) -> Tensor:
        """Return the pass's part of the auxiliary loss, times its coefficient.

        ``share`` is the share of the step's tokens in this pass. Evenness is measured over a micro-batch, as in Switch
        Transformers: averaging smaller batches gives another loss.
        """
        loss = load_balancing_loss(routed.logits, top_k=self.top_k, valid=valid)
        self._loss = self._loss.merge(Mean(float(loss.detach()) * share, share))
        return self.coefficient * share * loss

    def take(self, sum_values: Callable[[Tensor], Tensor] = lambda values: values) -> dict[str, MetricValue]:
        """Return metrics of the passes since the last call; each expert's tokens are counted over all ranks.

        Args:
            sum_values: adds up a tensor over all ranks, which call this together.
        """
        load, loss = self._load, self._loss
        self._load, self._loss = None, Mean(0.0, 0.0)
        metrics: dict[str, MetricValue] = {"router_aux_loss": loss} if self.coefficient else {}
        if load is None:  # still sum, because other ranks may have had tokens
            load = torch.zeros(len(self._experts), self._most_experts, dtype=torch.int64)
        load = sum_values(load)
        if not load.any():
            return metrics
        shares, sizes = load.double() / load.sum(-1, keepdim=True), self._sizes.to(load.device)
        entropy = torch.special.entr(shares).sum(-1) / sizes.log().clamp_min(math.log(2))
        return metrics | {
            "expert_load_max": Max(float((shares.amax(-1) * sizes).max())),
            "expert_load_entropy": Mean(float(entropy.mean())),
        }

    def _see_experts(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._seen is None:
            return
        for value in (*arguments, *keywords.values()):  # hidden states, the experts chosen, their weights
            if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point():
                self._seen.chosen.append(value.detach())
                return

    def _see_router(self, index: int) -> Any:
        @torch.compiler.disable
        def see(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if self._seen is not None:
                self._seen.logits.append(output[index] if isinstance(output, tuple) else output)

        return see


def experts_of(module: nn.Module) -> int:
    """Return the number of experts in a module of :func:`~lachesis.engines.embedded.experts.stacked_experts`."""
    number = getattr(module, "num_experts", None)
    return number if isinstance(number, int) else next(p.shape[0] for p in module.parameters() if p.ndim == 3)


def expert_load(chosen: Tensor, *, valid: Tensor | None, experts: int) -> Tensor:
    """Count the tokens that went through each expert: int64 [experts], from ``chosen`` int64 [tokens, k]."""
    chosen = chosen if valid is None else chosen[valid]
    return (chosen.reshape(-1, 1) == torch.arange(experts, device=chosen.device)).sum(0)


def load_balancing_loss(logits: Sequence[Tensor], *, top_k: int, valid: Tensor | None = None) -> Tensor:
    """Return ``experts * sum_e(f_e * P_e)``, which is top_k for a perfectly even load.

    The formula is eq. 4 to 6 of Switch Transformers (Fedus et al., arXiv 2101.03961). f is the share of tokens that
    chose an expert, P the mean probability that its router gave it, both over the tokens of all layers, as in
    transformers.

    Args:
        logits: [tokens, experts] of each layer.
        top_k: experts of a token.
        valid: [tokens], False for padding; all True if unset.
    """
    kept = [layer if valid is None else layer[valid] for layer in logits]
    together = torch.cat([*kept])
    probabilities = together.softmax(-1, dtype=torch.promote_types(together.dtype, torch.float32))
    experts = probabilities.shape[-1]
    load = expert_load(probabilities.topk(top_k).indices, valid=None, experts=experts)
    return experts * (load.to(probabilities.dtype) / len(probabilities) * probabilities.mean(0)).sum()


def routers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model's routers with their names, in the order of the layers; none if its class names none."""
    recorder = _recorder(model)
    if recorder is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
            yield name, module


def _recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """Return the description of a model's routers and their logits that its class gives, or None."""
    for module in model.modules():
        found: Any = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if isinstance(found, OutputRecorder):
            return found
        if isinstance(found, type) and issubclass(found, nn.Module):
            return OutputRecorder(found)
    return None
