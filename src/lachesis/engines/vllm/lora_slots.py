"""The single adapter of an engine worker: its tensors in vLLM's LoRA slots, replaced in place.

Every request carries the same LoRARequest, so that it computes with the current content of the slots: a swap reaches
requests in flight. If the adapter's id is not registered, vLLM loads the adapter from the path in the request, which
may be gone; therefore the id is always registered. Without an adapter it stands for zeros, which have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lachesis.common.errors import EngineError
from lachesis.engines.serving.adapter_files import adapted_module, adapted_modules
from lachesis.engines.serving.backend import LoraSpec, Refused

# vLLM numbers its own adapters from 1.
ADAPTER_ID = 1_000_003
PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class ModuleSlots:
    """The slots of an adapted module: tensors A [adapters, 1, rank, in] and B [adapters, 1, out, rank].

    Each may consist of several side by side in ``out``. ``shards`` is the tensor parallelism that may cut either.
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    shards: int

    @property
    def features(self) -> tuple[int, int]:
        """Return the input and output features of this worker's part."""
        return self.a[0].shape[-1], sum(part.shape[-2] for part in self.b)

    def fits(self, whole_in: int, whole_out: int) -> bool:
        """Return True if an adapter for a layer with these input and output features fits."""
        own_in, own_out = self.features
        if self.shards == 1:
            return (whole_in, whole_out) == (own_in, own_out)
        return whole_in in (own_in, own_in * self.shards) and whole_out % self.shards == 0 and whole_out >= own_out

    def read(self, index: int, *, rank: int) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of the adapter in slot ``index``."""
        return self.a[0][index, 0, :rank], torch.cat([part[index, 0, :, :rank] for part in self.b])


@dataclass(kw_only=True, eq=False)
class LoraSlots:
    """vLLM's slots for adapters; see the module's docstring.

    Args:
        worker_loras: vLLM's ``WorkerLoRAManager``.
        model: the served model, whose ``lora_manager`` holds the slots.
        device: the device of the slots.
        tensor_parallel_size: the engine's tensor-parallel size.
        lora_model: vLLM's ``LoRAModel``, ``peft_helper`` its ``PEFTHelper``, ``name_mapper`` its renames for the model;
            passed in because they differ between versions of vLLM.
    """

    worker_loras: Any
    model: Any
    device: torch.device
    tensor_parallel_size: int
    lora_model: Any
    peft_helper: Any
    name_mapper: Any

    def __post_init__(self) -> None:
        self._manager = self.model.lora_manager
        self._config = self.worker_loras.lora_config
        self._spec: LoraSpec | None = None
        self._names: tuple[str, ...] = ()
        # Kept alive, because a CUDA graph may have been captured with their memory.
        self._released = release_output_heads(self.model)

    @property
    def spec(self) -> LoraSpec | None:
        """Return the specification of the active adapter; ``None`` for the base weights."""
        return self._spec

    def clear(self) -> None:
        """Serve the base weights: zero the slots, under the adapter id that requests carry."""
        rank = self._manager.get_dummy_lora_warmup_rank(1)
        self._replace(self._manager.create_dummy_lora(ADAPTER_ID, rank, self.worker_loras.embedding_modules))
        self._spec, self._names = None, ()

    def check(self, shapes: Mapping[str, tuple[int, ...]], spec: LoraSpec) -> None:
        """Raise Refused (422) unless tensors of these names and shapes are a whole adapter of this model.

        ``shapes`` maps peft's names, as in "model.layers.0.mlp.up_proj.lora_A.weight", to shapes.
        """
        slots = dict(self._slots())
        for module, (whole_in, whole_out) in adapted_modules(shapes, r=spec.r).items():
            slot = slots.get(self._engine_name(module))
            if slot is None:
                raise Refused(
                    f"the adapter changes the module {module!r}, which this server's model lacks or cannot adapt",
                    status=422,
                    remedy="train the adapter on the served model, on linear layers other than the output head",
                )
            if not slot.fits(whole_in, whole_out):
                raise Refused(
                    f"the adapter's tensors of {module!r} have shapes {[spec.r, whole_in]} and {[whole_out, spec.r]}, "
                    f"but the served layer maps {slot.features[0]} to {slot.features[1]} features",
                    status=422,
                    remedy="train the adapter on the served model",
                )

    def load(self, tensors: Mapping[str, Tensor], spec: LoraSpec) -> None:
        """Activate an adapter; the engine takes over the tensors, named by peft, which must not change afterwards.

        Raises:
            Refused: (422) the tensors are not an adapter of this model.
            EngineError: vLLM failed; the previous adapter is active again.
        """
        tensors = {"{}.lora_{}.weight".format(*adapted_module(name)): tensor for name, tensor in tensors.items()}
        self.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, spec)
        helper = self.peft_helper.from_dict(
            {
                "r": spec.r,
                "lora_alpha": spec.alpha,
                "target_modules": list(spec.target_modules),
                "use_rslora": spec.rslora,
            }
        )
        adapter = self.lora_model.from_lora_tensors(
            lora_model_id=ADAPTER_ID,
            # vLLM requires the prefix of peft's names, and strips it.
            tensors={PREFIX + name: tensor for name, tensor in tensors.items()},
            peft_helper=helper,
            device=str(self.device),
            dtype=self._config.lora_dtype,
            model_vocab_size=self.worker_loras.vocab_size,
            weights_mapper=self.name_mapper,
        )
        self._replace(adapter)
        self._spec, self._names = spec, tuple(tensors)

    def refresh(self) -> None:
        """Rewrite the slots from the registered adapter, because their memory was dropped."""
        self._manager.deactivate_adapter(ADAPTER_ID)
        self._manager.activate_adapter(ADAPTER_ID)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter in the slots by peft's names: A, and B times the scaling, in the slots' dtype.

        Raises:
            Refused: (409) no adapter is active, or the slots of one process hold only a part of it.
        """
        if self._spec is None:
            raise Refused("no adapter is active", status=409, remedy="load one first")
        if self.tensor_parallel_size > 1:
            raise Refused(
                f"each of {self.tensor_parallel_size} tensor-parallel workers holds only a part of the adapter, so the "
                "whole adapter has no digest",
                status=409,
                remedy="prove the transfer with the canary",
            )
        index = self._manager.lora_index_to_id.index(ADAPTER_ID)
        slots = dict(self._slots())
        held: dict[str, Tensor] = {}
        for module in dict.fromkeys(adapted_module(name)[0] for name in self._names):
            a, b = slots[self._engine_name(module)].read(index, rank=self._spec.r)
            held[module + _A], held[module + _B] = a, b
        return held

    def _replace(self, adapter: Any) -> None:
        before = self._manager.get_adapter(ADAPTER_ID)
        try:
            self._put(adapter)
        except Exception as error:
            if before is not None:
                self._put(before)
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(
                f"vLLM could not load the adapter: {reason}; the previous one is active",
                remedy="look at the server's log",
            ) from error

    def _put(self, adapter: Any) -> None:
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER_ID)

    def _engine_name(self, module: str) -> str:
        if self.name_mapper is None:
            return module
        renamed = self.name_mapper._map_name(f"{module}{_A}")
        return module if renamed is None else renamed.removesuffix(_A)

    def _slots(self) -> Iterator[tuple[str, ModuleSlots]]:
        """Yield the slots of every module that can be adapted, by its name before vLLM fuses q, k, v or gate, up."""
        for name, module in self._manager.modules.items():
            a, b = _stacked(module, "lora_a_stacked"), _stacked(module, "lora_b_stacked")
            if any(part.ndim != 4 for part in (*a, *b)):
                continue  # experts and embeddings have other layouts
            parts = self._manager.packed_modules.get(name)
            if parts is None and a:
                yield name, ModuleSlots(a, b, self.tensor_parallel_size)
            elif parts is not None and len(parts) == len(a):
                for i, part in enumerate(parts):
                    yield part, ModuleSlots((a[i],), (b[i],), self.tensor_parallel_size)


def release_output_heads(model: Any) -> list[Any]:
    """Remove the slots from output heads; return the layers that had them.

    A head with slots costs a product over the vocabulary for every token. Worse, vLLM looks up its adapter by the index
    of the sampled token, which fails for prompt logprobs such as a canary's.
    """
    released = []
    for name, module in list(model.lora_manager.modules.items()):
        owner, _, last = name.rpartition(".")
        if last == "lm_head":
            model.get_submodule(owner).logits_processor = module.base_layer
            released.append(model.lora_manager.modules.pop(name))
    return released


def _stacked(module: Any, attribute: str) -> tuple[Tensor, ...]:
    slots = getattr(module, attribute, ())
    return (slots,) if isinstance(slots, Tensor) else tuple(slots)
