"""References of the KL term, held only if something needs one (``beta`` > 0, or a loss that asks for it).

``base`` is the model that training started from; ``ema`` becomes alpha·policy + (1 - alpha)·ref every
``ref_sync_steps`` optimizer steps (TR-DPO, arXiv 2404.09656; TRL's ``sync_ref_model``); ``sampler`` stands for the
samples' own logprobs: the policy itself, some versions ago.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lachesis.common.errors import CheckpointError, TrainingError
from lachesis.config.schema import AlgorithmConfig
from lachesis.engines.embedded.adapters import is_adapted
from lachesis.train.batch import MicroBatch
from lachesis.train.model import attention
from lachesis.train.model.forward import ForwardPlan, loss_token_logprobs
from lachesis.train.model.loading import LoadedModel

if TYPE_CHECKING:
    from peft import PeftModel


class Reference(ABC):
    """Source of the KL term's logprobs.

    By default no step changes it and it has no state to save.
    """

    plan: ForwardPlan

    @abstractmethod
    def weights(self) -> AbstractContextManager[PreTrainedModel]:
        """Return a context in which a model has the reference's weights."""

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Return log π_ref of the loss tokens, [N], at the samples' temperatures; NaN where unknown.

        No gradient.
        """
        with self.weights() as model:
            return loss_token_logprobs(model, micro, plan=self.plan).logprobs

    def after_step(self, step: int) -> None:
        """Update the reference after optimizer step ``step`` (counted from 1, over the whole run)."""
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that a checkpoint needs to resume exactly: live tensors by name, not copies."""
        return {}


def second_model(loaded: LoadedModel, options: AlgorithmConfig | None) -> PreTrainedModel | None:
    """Return the copy of the model that the reference of full fine-tuning needs, or None."""
    if options is None or options.kl_reference == "sampler" or is_adapted(loaded.model):
        return None
    # Weights that are not read yet cannot be copied; they will be read into both models.
    empty = {} if loaded.unread is None else {id(p): _like(p) for p in loaded.transformer.parameters()}
    return copy.deepcopy(loaded.transformer, empty).requires_grad_(False).eval()


def _like(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False)


def build_reference(
    loaded: LoadedModel, *, plan: ForwardPlan, options: AlgorithmConfig, second: PreTrainedModel | None = None
) -> Reference:
    """Build the reference of a policy over ``loaded``, which still is the model that training starts from.

    Args:
        second: made by :func:`second_model`, and placed like the policy's model.
    """
    if options.kl_reference == "sampler":
        return SamplerReference()
    if is_adapted(loaded.model):
        if options.kl_reference == "base" and not loaded.continued:
            return AdapterOff(loaded.model, loaded=loaded, plan=plan)
        return AveragedAdapter(loaded.model, loaded=loaded, plan=plan, options=options)
    assert second is not None, "second_model() makes it where it is needed"
    return Copy(loaded, second, plan=plan, options=options)


@torch.no_grad()
def load_reference(
    reference: Reference, saved: Mapping[str, Tensor], *, spread: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Restore a reference from its saved ``state_dict``, in whole tensors.

    Args:
        spread: given the target and a whole tensor, returns this rank's part to copy.

    Raises:
        CheckpointError: it is of another reference.
    """
    require_same_reference(reference, saved)
    for name, tensor in reference.state_dict().items():
        tensor.copy_(spread(tensor, saved[name]))


def require_same_reference(reference: Reference, saved: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless a reference's tensors match the saved ones by name and shape."""
    own = reference.state_dict()
    different = sorted(own.keys() ^ saved.keys()) + sorted(
        name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape
    )
    if different:
        raise CheckpointError(
            f"the checkpoint's KL reference does not fit: {len(different)} tensors differ, such as {different[0]}",
            remedy="resume with the KL reference, model and adapter settings with which the run was started",
        )


@torch.no_grad()
def _follow(
    reference: Mapping[str, Tensor], policy: Mapping[str, Tensor], *, step: int, options: AlgorithmConfig
) -> None:
    """Set ref ← alpha·policy + (1 - alpha)·ref in place, if ``step`` is a multiple of ``ref_sync_steps``."""
    if step % options.ref_sync_steps == 0:
        for name, tensor in reference.items():
            tensor.lerp_(policy[name].detach().to(tensor.dtype), options.ref_mixup_alpha)


class SamplerReference(Reference):
    """Reference to the samples' own logprobs: nothing is computed or held (Atropos's meaning of reference)."""

    def weights(self) -> AbstractContextManager[PreTrainedModel]:
        raise TrainingError("the sampling policy is not kept", remedy="choose another algorithm.kl_reference")

    def logprobs(self, micro: MicroBatch) -> Tensor:
        return micro.sampling_logprobs


class AdapterOff(Reference):
    """Reference to the base model under an adapter, which is switched off for the pass."""

    def __init__(self, adapted: PeftModel, *, loaded: LoadedModel, plan: ForwardPlan) -> None:
        self._adapted = adapted
        self._transformer = loaded.transformer
        self.plan = plan

    @contextmanager
    def weights(self) -> Generator[PreTrainedModel]:
        with self._adapted.disable_adapter():
            yield self._transformer


class Copy(Reference):
    """Reference to a second model: frozen for ``base``, following the policy for ``ema``."""

    def __init__(
        self, loaded: LoadedModel, second: PreTrainedModel, *, plan: ForwardPlan, options: AlgorithmConfig
    ) -> None:
        self._policy = dict(loaded.transformer.named_parameters())
        self._transformer = second
        # Since the copy was made, the plan has chosen how the policy's attention is computed.
        chosen = loaded.transformer.config._attn_implementation  # pyright: ignore[reportPrivateUsage]  # has no other name
        if chosen == attention.ATTENTION_NAME:
            attention.install(second)
        elif chosen is not None:
            second.set_attn_implementation(chosen)  # pyright: ignore[reportUnknownMemberType]  # a bare dict in it
        self.plan = plan
        self._options = options

    def weights(self) -> AbstractContextManager[PreTrainedModel]:
        return nullcontext(self._transformer)

    def after_step(self, step: int) -> None:
        _follow(self.state_dict(), self._policy, step=step, options=self._options)

    def state_dict(self) -> dict[str, Tensor]:
        # A frozen copy need not be saved, because every start of the run loads the same model.
        moves = self._options.kl_reference == "ema"
        return {n: p.detach() for n, p in self._transformer.named_parameters()} if moves else {}


class AveragedAdapter(Reference):
    """Reference to the adapter's average or its initial state, swapped in for the pass without a copy.

    The factors A and B are averaged separately. That is not the average of their products, but has the same rank, start
    and limit.
    """

    def __init__(self, adapted: PeftModel, *, loaded: LoadedModel, plan: ForwardPlan, options: AlgorithmConfig) -> None:
        self._adapted = adapted
        self._transformer = loaded.transformer
        self.plan = plan
        self._options = options
        self._policy = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._policy.items()}

    @contextmanager
    def weights(self) -> Generator[PreTrainedModel]:
        """Point parameters at the average within the block; their own storage is written to only if sharded."""
        training = self._adapted.training
        self._adapted.eval()  # an average has no dropout
        try:
            self._exchange()
            yield self._transformer
        finally:
            self._exchange()
            self._adapted.train(training)

    def _exchange(self) -> None:
        for name, parameter in self._policy.items():
            average = self._average[name]
            if isinstance(parameter, DTensor) and isinstance(average, DTensor):
                # FSDP gathers from the storage that it knows.
                own, other = parameter.to_local().detach(), average.to_local()
                kept = own.clone()
                own.copy_(other)
                other.copy_(kept)
            else:
                self._average[name], parameter.data = parameter.data, average

    def after_step(self, step: int) -> None:
        if self._options.kl_reference == "ema":  # else it stays the adapter from which training started
            _follow(self._average, self._policy, step=step, options=self._options)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._average)
