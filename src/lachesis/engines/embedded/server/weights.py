"""The weights of an embedded engine from a server's point of view: change, describe, digest and share them.

Methods are synchronous and called from worker threads. A change happens between two tokens of what is being
generated; whatever can fail is done before it, so that a change is whole or has not happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.embedded.loading import load_causal_lm
from lachesis.engines.embedded.lora import LoraSlot, LoraWeights, read_weights, received_modules
from lachesis.engines.serving.adapter_files import read_adapter
from lachesis.engines.serving.served import (
    AdapterStatus,
    DigestRequest,
    DigestSlice,
    ReceiverSpec,
    Refused,
    TensorInfo,
)
from lachesis.engines.serving.session import Session
from lachesis.transport.bridge_file import BridgeFile, write_bridge_file
from lachesis.transport.digest import digests
from lachesis.transport.shared_tensors import SharedFile, dtype_name, export_cuda, export_from_file, share_tensors

_CONFIG = "config.json"


class EmbeddedWeights:
    """Changes and reads the weights of one engine.

    Args:
        engine: generates with ``model``.
        model: whose weights these are.
        path: where it was loaded from, for descriptions.
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
        """Of the model, by torch's name."""
        return dtype_name(self._model.dtype)

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(self._model.device)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model has logits for."""
        return self._model.config.get_text_config(decoder=True).vocab_size

    def load_adapter(self, *, name: str, path: Path) -> None:
        """Put the adapter in ``path`` in force. Raises Refused where it is no adapter of this model."""
        slot = self._lora_slot()
        files = read_adapter(path, max_rank=self._max_lora_rank)
        self._set_adapter(read_weights(files, slot), AdapterStatus(name, files.r, files.alpha, path))

    def unload_adapter(self, *, name: str) -> None:
        """Serve the base weights. Raises Refused (404) where ``name`` is not the adapter in force."""
        if self.adapter is None or self.adapter.name != name:
            in_force = f"{self.adapter.name!r} is" if self.adapter else "none is"
            raise Refused(f"no adapter {name!r} is loaded", status=404, remedy=f"{in_force} in force")
        self._set_adapter(None, None)

    def check_receivable(self, spec: ReceiverSpec) -> None:
        """Raise Refused (422) unless an update of these tensors can be loaded."""
        if spec.lora is not None:
            self._lora_slot().check(received_modules(spec.tensors, spec.lora))
            return
        own = self._parameters()
        named = {tensor.name: tensor for tensor in spec.tensors}
        _check_names(named, own, tied=self._named())
        for name, tensor in named.items():
            _check_shape(name, tensor.shape, tuple(self._named()[name].shape))

    def apply(self, tensors: Mapping[str, Tensor], spec: ReceiverSpec) -> None:
        """Make a received update the engine's weights; its spec was found receivable."""
        if spec.lora is not None:
            slot, lora = self._lora_slot(), spec.lora
            weights = slot.prepare(tensors, scaling=lora.scaling)
            self._set_adapter(weights, AdapterStatus(lora.name, lora.r, lora.alpha))
            return
        own = self._named()
        self._copy({name: (own[name], tensor) for name, tensor in tensors.items()})

    def reload(self, path: Path) -> None:
        """Load a checkpoint of the same architecture. Raises Refused (400, 422) where it is none."""
        if not (path / _CONFIG).is_file():
            raise Refused(f"{path} has no {_CONFIG}", remedy="name a checkpoint directory")
        try:
            # On the CPU and whole, so that nothing of the engine has changed where it cannot be read.
            fresh = load_causal_lm(path, dtype=self.dtype, device="cpu")
        except ModelError as error:
            raise Refused(error.message, remedy=error.remedy) from error
        own, new = self._parameters(), dict(fresh.named_parameters())
        _check_names(new, own, tied=own)
        for name, tensor in new.items():
            _check_shape(name, tuple(tensor.shape), tuple(own[name].shape))
        self._copy({name: (own[name], tensor) for name, tensor in new.items()})

    def state_dict_info(self) -> dict[str, TensorInfo]:
        """Every parameter, tied ones once."""
        return {
            name: TensorInfo(tuple(parameter.shape), dtype_name(parameter.dtype), str(parameter.device))
            for name, parameter in self._parameters().items()
        }

    def digests(self, request: DigestRequest) -> dict[str, int]:
        """Digests of what is held now. Raises Refused (404) for unknown names, (422) for rows that are not there."""
        with self._engine.exclusive():
            named = self._named()
            if request.slices is None:
                found: dict[str, Tensor] = dict(self._parameters())
            else:
                found = {key: _rows(named, part) for key, part in request.slices.items()}
            if request.adapter and self._slot is not None and self._slot.weights is not None:
                found |= self._slot.weights.tensors()
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
        """Move the model, as when the engine falls asleep or wakes up. Refused (409) where it is shared."""
        with self._engine.exclusive():
            if self._exported and device != self.device:
                raise Refused("the weights are shared with another process", status=409, remedy="close that bridge")
            self._model.to(device)  # type: ignore[arg-type]
            if self._slot is not None and self._slot.weights is not None:
                pairs = {name: (a.to(device), b.to(device)) for name, (a, b) in self._slot.weights.pairs.items()}
                self._slot.weights = LoraWeights(pairs)

    def close(self) -> None:
        """Remove the shared memory; what others have mapped stays. Idempotent."""
        if self._shared is not None:
            self._shared.close()

    def _set_adapter(self, weights: LoraWeights | None, status: AdapterStatus | None) -> None:
        with self._changing():
            self._lora_slot().weights = weights
            self.adapter = status

    @torch.no_grad()
    def _copy(self, pairs: Mapping[str, tuple[nn.Parameter, Tensor]]) -> None:
        """New base weights; an adapter that was trained on the old ones goes."""
        with self._changing():
            for own, new in pairs.values():
                own.copy_(new)
            if self._slot is not None:
                self._slot.weights = None
            self.adapter = None

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
        """Parameters under all their names, tied ones too."""
        return dict(self._model.named_parameters(remove_duplicate=False))


def _check_names(new: Mapping[str, object], own: Mapping[str, object], *, tied: Mapping[str, object]) -> None:
    unknown = sorted(name for name in new if name not in tied)
    known = {id(tied[name]) for name in new if name in tied}
    missing = sorted(name for name, parameter in own.items() if id(parameter) not in known)
    for names, what in ((unknown, "which this model does not have"), (missing, "which has to be there too")):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise Refused(
                f"these are not the weights of this model: {shown}, {what}",
                status=422,
                remedy="send every parameter under transformers' names",
            )


def _check_shape(name: str, new: tuple[int, ...], own: tuple[int, ...]) -> None:
    if new != own:
        raise Refused(
            f"{name} has shape {list(new)}, in this model it is {list(own)}",
            status=422,
            remedy="use weights of the same architecture",
        )


def _rows(named: Mapping[str, Tensor], part: DigestSlice) -> Tensor:
    if part.name not in named:
        raise Refused(f"no parameter {part.name!r} is here", status=404, remedy="see /bridge/state_dict_info")
    tensor = named[part.name]
    if tensor.ndim == 0:
        return tensor
    rows = tensor.shape[0] - part.start if part.rows is None else part.rows
    if part.start + rows > tensor.shape[0] or rows < 0:
        raise Refused(
            f"rows {part.start} to {part.start + rows - 1} are not in {part.name}, which has {tensor.shape[0]}",
            status=422,
            remedy="see /bridge/state_dict_info",
        )
    return tensor[part.start : part.start + rows]
