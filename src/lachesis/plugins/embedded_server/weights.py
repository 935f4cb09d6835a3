"""Weights of an embedded engine from a server's point of view: change, describe, digest and share them.

Methods are synchronous and called from worker threads. A change happens between two generated tokens; anything that can
fail is done before it, so that it happens completely or not at all. Only an update that is loaded as it arrives may
break off halfway, which ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lachesis.common.errors import LachesisError, ModelError, StaleWeights
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.serving.adapter_files import WEIGHTS_NAME, adapted_module, adapted_modules, read_adapter
from lachesis.engines.serving.backend import (
    AdapterStatus,
    DigestRequest,
    ReceiverSpec,
    Refused,
    TensorInfo,
    check_fits,
)
from lachesis.engines.serving.session import Session
from lachesis.plugins.embedded_server.loading import load_causal_lm
from lachesis.transport.bridge_file import BridgeFile, write_bridge_file
from lachesis.transport.digest import digests, served_lora_b
from lachesis.transport.shared_tensors import SharedFile, dtype_name, export_cuda, export_from_file, share_tensors

_CONFIG = "config.json"


# A [rank, in] and B [out, rank] of each module in the model's dtype; the scaling is folded into B, as in vLLM.
LoraPairs = Mapping[str, tuple[Tensor, Tensor]]


class LoraSlot:
    """Slot for one adapter in a model of linear layers; a new adapter takes effect with the next forward pass.

    Hooks are added to the layers once, and cost nothing without an adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        self.weights: LoraPairs | None = None
        for name, layer in self._layers.items():
            layer.register_forward_hook(self._hook(name))

    def check(self, modules: Mapping[str, tuple[int, int]], *, made_for: str = "") -> None:
        """Raise Refused (422) unless each of ``modules`` is a linear layer here with these (in, out) features."""
        hint = f"it was trained on {made_for!r}" if made_for else "it was trained on another model"
        if unknown := [name for name in modules if name not in self._layers]:
            raise Refused(
                f"the adapter changes {_list(unknown)}, which are not linear layers of this model",
                status=422,
                remedy=hint,
            )
        for name, features in modules.items():
            layer = self._layers[name]
            own = tuple(layer.weight.shape) if isinstance(layer, Conv1D) else tuple(layer.weight.shape[::-1])
            if features != own:
                raise Refused(
                    f"the adapter expects {name} to have {features[0]} inputs and {features[1]} outputs, but it has "
                    f"{own[0]} and {own[1]}",
                    status=422,
                    remedy=hint,
                )

    def prepare(self, raw: Mapping[str, Tensor], *, scaling: float) -> LoraPairs:
        """Return the weights to serve, from tensors under peft's names that :meth:`check` has accepted."""
        by_name = {adapted_module(name): tensor for name, tensor in raw.items()}
        pairs = {}
        for module in sorted({module for module, _ in by_name}):
            weight = self._layers[module].weight
            a = by_name[module, "A"].detach().to(device=weight.device, dtype=weight.dtype, copy=True)
            b = served_lora_b(by_name[module, "B"].to(weight.device), scaling=scaling, dtype=weight.dtype)
            pairs[module] = (a, b)
        return pairs

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        def add(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            pair = None if self.weights is None else self.weights.get(name)
            if pair is None:
                return None
            return output + nn.functional.linear(nn.functional.linear(inputs[0], pair[0]), pair[1])

        return add


class EmbeddedWeights:
    """Changes and reads the weights of one engine.

    Args:
        engine: generates with ``model``.
        model: the model with these weights. path: the directory that it was loaded from, for descriptions.
        max_lora_rank: largest adapter; 0 where none may be loaded.
    """

    def __init__(self, engine: EmbeddedEngine, model: PreTrainedModel, *, path: str, max_lora_rank: int) -> None:
        self._engine = engine
        self._model = model
        self._path = path
        self._max_lora_rank = max_lora_rank
        self._slot = LoraSlot(model) if max_lora_rank else None
        self._shared: SharedFile | None = None
        self._exported = False
        self.adapter: AdapterStatus | None = None

    @property
    def dtype(self) -> str:
        """Dtype of the model, by torch's name."""
        return dtype_name(self._model.dtype)

    @property
    def device(self) -> str:
        """Device that holds the model."""
        return str(self._model.device)

    def load_adapter(self, *, name: str, path: Path) -> None:
        """Serve with the adapter in ``path``; raise Refused if it is not an adapter of this model."""
        slot = self._lora_slot()
        files = read_adapter(path, max_rank=self._max_lora_rank)
        slot.check(files.modules, made_for=files.base_model)
        try:
            raw = load_file(path / WEIGHTS_NAME)
        except (OSError, SafetensorError) as error:
            raise Refused(f"{path / WEIGHTS_NAME} cannot be read: {error}", remedy="save the adapter again") from error
        weights = slot.prepare(raw, scaling=files.spec.scaling)
        self._set_adapter(weights, AdapterStatus(name, files.spec.r, files.spec.alpha, path))

    def unload_adapter(self, *, name: str) -> None:
        """Serve the base weights. Raises Refused (404) if ``name`` is not the current adapter."""
        if self.adapter is None or self.adapter.name != name:
            in_force = f"{self.adapter.name!r} is" if self.adapter else "none is"
            raise Refused(f"no adapter {name!r} is loaded", status=404, remedy=f"{in_force} loaded")
        self._set_adapter(None, None)

    def check_receivable(self, spec: ReceiverSpec) -> None:
        """Raise Refused (422) unless an update of these tensors can be loaded."""
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
        if spec.lora is not None:
            self._lora_slot().check(adapted_modules(shapes, r=spec.lora.r))
        else:
            self._check_whole(shapes, what="the announced update")

    def apply(self, tensors: Iterable[tuple[str, Tensor]], spec: ReceiverSpec) -> None:
        """Make a received update the engine's weights; its spec was found receivable.

        Raises:
            StaleWeights: it broke off while it was loaded, so the weights mix two versions.
        """
        if spec.lora is not None:
            weights = self._lora_slot().prepare(dict(tensors), scaling=spec.lora.scaling)
            self._set_adapter(weights, AdapterStatus(spec.lora.name, spec.lora.r, spec.lora.alpha))
            return
        try:
            self._copy(tensors)
        except LachesisError as error:
            raise StaleWeights(
                f"an update broke off while it was loaded, and the weights are of two versions: {error.message}",
                remedy="restart the server",
            ) from error

    def reload(self, path: Path) -> None:
        """Load a checkpoint of the same architecture. Raises Refused (400, 422) if it is not one."""
        if not (path / _CONFIG).is_file():
            raise Refused(f"{path} has no {_CONFIG}", remedy="name a checkpoint directory")
        try:
            # Read completely, on the CPU, so that the engine is unchanged if it cannot be read.
            fresh = dict(load_causal_lm(path, dtype=self.dtype, device="cpu").named_parameters())
        except ModelError as error:
            raise Refused(error.message, remedy=error.remedy) from error
        shapes = {name: tuple(tensor.shape) for name, tensor in fresh.items()}
        self._check_whole(shapes, what=f"the checkpoint in {path}")
        self._copy(fresh.items())

    def state_dict_info(self) -> dict[str, TensorInfo]:
        """Describe every parameter, tied ones once."""
        return {
            name: TensorInfo(tuple(parameter.shape), dtype_name(parameter.dtype), str(parameter.device))
            for name, parameter in self._parameters().items()
        }

    def digests(self, request: DigestRequest) -> dict[str, int]:
        """Digest tensors as they are now; raise Refused (404) for unknown names, (422) for rows that do not exist."""
        with self._engine.exclusive():
            named = self._named()
            if request.slices is None:
                found: dict[str, Tensor] = dict(self._parameters())
            else:
                found = {key: part.of(named) for key, part in request.slices.items()}
            if request.adapter and self._slot is not None and self._slot.weights is not None:
                pairs = self._slot.weights.items()
                found |= {
                    f"{name}.lora_{part}.weight": t for name, pair in pairs for part, t in zip("AB", pair, strict=True)
                }
            return digests(found)

    def export_shared(self, path: Path, *, session: Session, engine: str) -> None:
        """Write the bridge file; on the CPU the parameters move into shared memory first."""
        with self._engine.exclusive():
            parameters = self._parameters()
            self._exported = True
            if self._model.device.type == "cuda":
                tensors = {name: export_cuda(parameter) for name, parameter in parameters.items()}
            else:
                self._shared = self._shared or share_tensors(self._model.parameters())
                tensors = {name: export_from_file(parameter, self._shared) for name, parameter in parameters.items()}
        bridge = BridgeFile(
            model=self._path,
            session_id=session.session_id,
            url=session.url,
            pid=session.pid,
            engine=engine,
            tensors=tensors,
        )
        write_bridge_file(path, bridge)

    def move(self, device: str) -> None:
        """Move the model, such as when the engine falls asleep or wakes up. Raises Refused (409) if it is shared."""
        with self._engine.exclusive():
            if self._exported and device != self.device:
                raise Refused("the weights are shared with another process", status=409, remedy="close that bridge")
            self._model.to(device)  # type: ignore[arg-type]
            if self._slot is not None and self._slot.weights is not None:
                pairs = self._slot.weights.items()
                self._slot.weights = {name: (a.to(device), b.to(device)) for name, (a, b) in pairs}

    def close(self) -> None:
        """Remove the shared memory; mappings in other processes stay. Idempotent."""
        if self._shared is not None:
            self._shared.close()

    def _set_adapter(self, weights: LoraPairs | None, status: AdapterStatus | None) -> None:
        with self._changing():
            self._lora_slot().weights = weights
            self.adapter = status

    @torch.no_grad()
    def _copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new base weights in place; drop an adapter that was trained on the old ones."""
        own = self._named()
        with self._changing():
            for name, tensor in tensors:
                own[name].copy_(tensor)
            if self._slot is not None:
                self._slot.weights = None
            self.adapter = None

    def _check_whole(self, shapes: Mapping[str, tuple[int, ...]], *, what: str) -> None:
        """Raise Refused (422) unless tensors of these names and shapes are exactly the model's."""
        named = self._named()
        offered = {id(named[name]) for name in shapes if name in named}
        wanted = {name: tuple(parameter.shape) for name, parameter in named.items()}
        # A tied parameter needs only one of its names.
        tied = [name for name, parameter in named.items() if id(parameter) in offered]
        check_fits(shapes, wanted, tied=tied, what=what)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._engine.exclusive():
            yield
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)

    def _lora_slot(self) -> LoraSlot:
        if self._slot is None:
            raise Refused("this server was started without LoRA", status=409, remedy="start it with --enable-lora")
        return self._slot

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _named(self) -> dict[str, nn.Parameter]:
        """Return the parameters under all their names, including tied ones."""
        return dict(self._model.named_parameters(remove_duplicate=False))


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
