"""State of a policy to save and resume: its tensors, whole or in the ranks' parts, and its other states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lachesis.train.distributed.sharded_checkpoint import (
    REFERENCE,
    WEIGHTS,
    PartsSave,
    Written,
    read_parts,
    saved_tensors,
    whole_bytes,
)
from lachesis.train.distributed.strategy import Strategy
from lachesis.train.host_memory import HostMemory
from lachesis.train.iterations import OldLogprobStore
from lachesis.train.losses.kl import KlWeight
from lachesis.train.losses.reference import Reference, load_reference, require_same_reference
from lachesis.train.optim.optimizer import PolicyOptimizer
from lachesis.train.optim.sharding import ShardedOptimizer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class PolicyState:
    """Part of a :class:`~lachesis.train.policy.Policy` that checkpoints, bridges and exports see."""

    model: PreTrainedModel | PeftModel
    strategy: Strategy
    optimizer: PolicyOptimizer
    reference: Reference | None
    kl_weight: KlWeight
    _old: OldLogprobStore
    _saving: PartsSave | None
    _host_memory: HostMemory

    def whole(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield these parameters of the model whole, even if sharded over ranks; they are read-only.

        They come on demand, few in memory at a time if the caller keeps none. All ranks are busy until the last has
        come or the caller closes the iterator.
        """
        return self.strategy.gather([parameter.detach() for parameter in parameters])

    def full_parameters(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield :meth:`whole` parameters by name."""
        return self.strategy.gather([self.model.get_parameter(name).detach() for name in names])

    def weights(self) -> dict[str, Tensor]:
        """Return every trained tensor, whole, by name; on the CPU if they are sharded."""
        chosen = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self.strategy.sharded:
            return {name: parameter.detach() for name, parameter in chosen.items()}
        return {name: tensor.cpu() for name, tensor in zip(chosen, self.whole([*chosen.values()]), strict=True)}

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module) -> None:
        """Copy the trained weights into a whole model that was loaded as the policy's own was, in place."""
        own = dict(model.named_parameters())
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        for name, tensor in zip(trained, self.whole([*trained.values()]), strict=True):
            own[name].copy_(tensor)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what :meth:`weights` returned, in place, because an engine may share the storage."""
        own = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            own[name].copy_(self.strategy.spread(own[name], tensor))

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint, its schedule included."""
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`optimizer_state`. Raises CheckpointError for another optimizer's."""
        self.optimizer.load_state_dict(dict(state))

    def state_dict(self) -> dict[str, Any]:
        """Return the rest of a checkpoint beyond weights and optimizer: reference, KL weight, old logprobs in use."""
        return {
            "reference": self.reference_state(),
            "kl_weight": self.kl_weight.value,
            "old_logprobs": self.old_logprobs(),
        }

    def reference_state(self) -> dict[str, Tensor]:
        """Return the reference's tensors, whole, by name; none if there is no reference."""
        reference = {} if self.reference is None else self.reference.state_dict()
        return dict(zip(reference, self.strategy.gather([*reference.values()]), strict=True))

    def reserve_copies(self) -> None:
        """Begin to allocate host memory for the copies of :meth:`begin_parts`, beside the following work."""
        self._host_memory.reserve(self._parts()[1].values())

    def begin_parts(self, directory: str, copied: bool) -> dict[str, Any]:
        """Begin to write this rank's part of a sharded policy: weights, optimizer and reference.

        Args:
            directory: the same for all ranks.
            copied: write from a copy in host memory while training continues; otherwise it must wait for the write.

        Returns:
            The states of optimizer and reference, with names in place of tensors.
        """
        if copied:
            self._host_memory.wait()
        state, tensors = self._parts()
        self._saving = PartsSave(tensors, Path(directory), copied=copied)
        return state

    def parts_bytes(self) -> int:
        """Return the size in bytes of all ranks' parts on disk."""
        return whole_bytes(self._parts()[1])

    def parts_written(self) -> bool:
        """Return True if all ranks have written their current parts."""
        assert self._saving is not None, "begin_parts() comes before"
        return self._saving.written

    def finish_parts(self) -> list[Written]:
        """Wait until all ranks have written their parts, and index them; return all files, on rank 0.

        Raises:
            CheckpointError: one of them could not.
        """
        assert self._saving is not None, "begin_parts() comes before"
        saving, self._saving = self._saving, None
        return saving.finish()

    def load_parts(self, directory: str, state: Mapping[str, Any]) -> None:
        """Resume from the parts of a checkpoint, of which each rank reads its own.

        Args:
            state: as :meth:`begin_parts` returned it.

        Raises:
            CheckpointError: they belong to another optimizer or reference, or cannot be read.
        """
        read, saved = partial(read_parts, Path(directory)), saved_tensors(Path(directory))
        if self.reference is not None:
            require_same_reference(self.reference, {key: saved[name] for key, name in state["reference"].items()})
        read(self._live_parts())
        assert isinstance(self.optimizer, ShardedOptimizer)
        self.optimizer.load_parts(state["optimizer"], saved=saved, read=read)
        self.kl_weight.restore(state)

    def sees(self, path: str) -> bool:
        """Return True if all ranks have this file."""
        return Path(path).is_file()

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert isinstance(self.optimizer, ShardedOptimizer), "a policy that is not sharded is saved whole"
        optimizer, tensors = self.optimizer.parts()
        reference = {} if self.reference is None else self.reference.state_dict()
        state = {"optimizer": optimizer, "reference": {name: f"{REFERENCE}{name}" for name in reference}}
        return state, tensors | self._live_parts()

    def _live_parts(self) -> dict[str, Tensor]:
        """Return this rank's weights and reference, by their names in a checkpoint."""
        trained = {f"{WEIGHTS}{n}": p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        reference = {} if self.reference is None else self.reference.state_dict()
        return trained | {f"{REFERENCE}{name}": tensor for name, tensor in reference.items()}

    def old_logprobs(self) -> list[Tensor]:
        """Return log π_old in use, of each micro-batch."""
        return self._old.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointError: it is of another reference.
        """
        if self.reference is not None:
            load_reference(self.reference, state["reference"], spread=self.strategy.spread)
        self.kl_weight.restore(state)
        self._old.load_state_dict(state["old_logprobs"])

    def load_old_logprobs(self, held: list[Tensor]) -> None:
        """Restore what :meth:`old_logprobs` returned."""
        self._old.load_state_dict(held)
