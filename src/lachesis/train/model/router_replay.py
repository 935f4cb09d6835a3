"""Router replay: routers choose the experts that an engine has used (R3, Ma et al. 2025, arXiv:2510.11370).

Engine and trainer compute the same router with other kernels: if two experts have nearly equal scores they may choose
differently, and compute different networks from that layer on. Replayed, a token goes through the experts that it was
sampled with, weighted by the router's present scores, so that the router learns through its weights of the chosen
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError, TrainingError
from lachesis.engines.embedded.experts import layer_number, stacked_experts
from lachesis.metrics.values import Mean, MetricValue
from lachesis.train.model.experts import routers

# The largest difference in experts' weights between two ways of computing one formula.
_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
_LEAST_ROUNDING = 1e-5

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Weights [tokens, k] of the experts [tokens, k] by a router's logits [tokens, experts]."""


def _softmax(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)


def _softmax_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = _softmax(logits, chosen)
    return weights / weights.sum(-1, keepdim=True)


def _sigmoid(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.float().sigmoid().gather(-1, chosen)


def _sigmoid_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = _sigmoid(logits, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20)


# Qwen's and OLMoE's with and without norm_topk_prob (Mixtral's and GPT-OSS's are the latter), and DeepSeek's.
_FORMULAS: tuple[Weigh, ...] = (_softmax_of_chosen, _softmax, _sigmoid_of_chosen, _sigmoid)


@dataclass(slots=True)
class _Router:
    """Router of a layer.

    ``weigh`` computes the weights of its ``k`` chosen experts by the formula found in :meth:`RouterReplay.learning`.
    """

    name: str
    layer: int
    scale: float
    weigh: Weigh | None = None
    k: int = 0


class RouterReplay:
    """Replay of expert choices: a model's routers take them from a tensor while :meth:`replaying`.

    Args:
        model: a mixture of experts; hooks are added to its routers, and do nothing at other times.

    Raises:
        ModelError: the model has no experts, or transformers does not name its routers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._kind = type(model).__name__
        self._routers: list[_Router] = []
        self._routed: Tensor | None = None
        self._learning = False
        self._counting = False
        self._differing: list[Tensor] = []
        for name, module in routers(model):
            router = _Router(name, layer_number(name), float(getattr(module, "routed_scaling_factor", 1.0)))
            self._routers.append(router)
            module.register_forward_hook(self._replace(router))
        if not stacked_experts(model):
            raise self._refused("it is not a mixture of experts")
        if not self._routers:
            raise self._refused("transformers does not say where its routers are")

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Learn from a pass in the block how each router weights the experts that it chooses.

        Raises:
            ModelError: a router uses an unknown formula, or did not run.
        """
        self._learning = True
        try:
            yield
        finally:
            self._learning = False
        if unseen := [router.name for router in self._routers if router.weigh is None]:
            raise self._refused(f"its router {unseen[0]} did not run in a pass")

    @contextmanager
    def replaying(self, routed: Tensor | None, *, counting: bool = False) -> Iterator[None]:
        """Send tokens through these experts within the block, backward passes included.

        Args:
            routed: int16 [tokens, layers, k] in the order in which the routers see tokens; -1 leaves the choice to
                the router. Everywhere, if unset.
            counting: count differing choices for :meth:`take`.

        Raises:
            TrainingError: the experts belong to another model.
        """
        if routed is not None:
            self._require_own(routed)
        before = self._routed, self._counting
        self._routed, self._counting = routed, counting
        try:
            yield
        finally:
            self._routed, self._counting = before

    def take(self) -> dict[str, MetricValue]:
        """Return metrics of this rank's passes since the last call."""
        if not self._differing:
            return {}
        differing, known = torch.stack(self._differing).sum(0).tolist()
        self._differing = []
        return {"router_replay_difference": Mean(differing, known)}

    def _replace(self, router: _Router) -> Any:
        # Compiled, it would differ from layer to layer, and after eight of them nothing would be compiled.
        @torch.compiler.disable
        def replace(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            if self._learning:
                router.weigh, router.k = self._formula(router, output), output[2].shape[-1]
            if self._routed is None:
                return None
            logits, weights, own = output
            assert router.weigh is not None, "learning() has seen to it"
            given = self._routed[:, router.layer].to(own.dtype)
            known = given >= 0
            chosen = torch.where(known, given, own)
            if self._counting:
                self._differing.append(_differing(chosen, own, known[:, 0]))
            return logits, (router.weigh(logits, chosen) * router.scale).to(weights.dtype), chosen

        return replace

    @torch.no_grad()
    def _formula(self, router: _Router, output: Any) -> Weigh:
        """Return the known formula by which the router weights its choice. Raises ModelError."""
        if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(part, Tensor) for part in output)):
            raise self._refused(f"its router {router.name} does not return logits, weights and chosen experts")
        logits, weights, own = output
        if own.is_floating_point() or weights.shape != own.shape or logits.shape[:-1] != own.shape[:-1]:
            raise self._refused(f"its router {router.name} returns {_shapes(output)}, not k experts for each token")
        apart = [float((w(logits, own) * router.scale - weights.float()).abs().max()) for w in _FORMULAS]
        nearest = min(range(len(apart)), key=apart.__getitem__)
        if not apart[nearest] <= _ROUNDING.get(weights.dtype, _LEAST_ROUNDING):
            raise self._refused(
                f"its router {router.name} weights experts by an unknown formula (differing by {apart[nearest]:.3g})"
            )
        return _FORMULAS[nearest]

    def _require_own(self, routed: Tensor) -> None:
        last = self._routers[-1]
        if routed.shape[1] <= last.layer or routed.shape[2] != last.k:
            raise TrainingError(
                f"the engine's routed experts are {routed.shape[2]} per token in {routed.shape[1]} layers, but layer "
                f"{last.layer} of {self._kind} chooses {last.k}",
                remedy="let the engine serve the trained model",
            )

    def _refused(self, why: str) -> ModelError:
        return ModelError(
            f"the routing of {self._kind} cannot be replayed: {why}", remedy="set algorithm.router_replay: false"
        )


@torch.no_grad()
def _differing(chosen: Tensor, own: Tensor, known: Tensor) -> Tensor:
    """Count the ``known`` tokens whose experts differ from the router's own choice, and all known tokens."""
    other = (chosen.sort(-1).values != own.sort(-1).values).any(-1) & known
    return torch.stack([other.sum(), known.sum()])


def _shapes(parts: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for part in parts)
