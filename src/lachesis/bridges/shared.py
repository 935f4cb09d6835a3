"""Single-copy bridge: the engine's tensors are the trainer's storage, so the optimizer step is the transfer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lachesis.bridges.base import PolicyT
from lachesis.bridges.external import ExternalBridge, Servers
from lachesis.bridges.names import map_parameters
from lachesis.bridges.sent_weights import text_config
from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, EngineError, ModelError
from lachesis.config.schema import SharedBridgeConfig
from lachesis.engines.http.control import ServerControl, ServerInfo
from lachesis.engines.serving.backend import DigestSlice
from lachesis.transport.bridge_file import (
    BRIDGE_FILE,
    BridgeFile,
    check_session,
    find_bridge_file,
    read_bridge_file,
    search_places,
)
from lachesis.transport.shared_tensors import Attachments, dtype_name

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineWeights:
    """Tensors of one engine, mapped into this process, and the models that are attached to them.

    Args:
        server: control of the engine's server.
        owner: the name under which this run claims the engine.
        export_directory: where the engine writes its bridge file if none is found; has to be one of the
            directories that the server may use.
        config_path: the bridge file, or its directory; ``None`` searches the documented places.
        takeover: claim the engine even from another run.
        limit_s: limit for finding the engine and its export, in seconds.
    """

    server: ServerControl
    _: KW_ONLY
    owner: str
    export_directory: Path
    config_path: str | Path | None = None
    takeover: bool = False
    limit_s: float | None = None
    slices: Mapping[str, DigestSlice] = field(default_factory=dict[str, DigestSlice], init=False)
    _attachments: Attachments = field(default_factory=Attachments, init=False)
    _file: BridgeFile | None = field(default=None, init=False)
    _tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False)
    _attached: dict[str, tuple[nn.Parameter, int]] = field(
        default_factory=dict[str, tuple[nn.Parameter, int]], init=False
    )

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the engine's weights, which are opened if necessary."""
        return self._first().dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the engine's weights, as this process numbers its devices."""
        return self._first().device

    def open(self) -> BridgeFile:
        """Claim the engine, find or ask for its bridge file, and map its tensors. Idempotent.

        Raises:
            ConfigError: the engine splits its weights over several GPUs.
            EngineError: another run has the engine, it shares nothing, or the file is missing, stale or wrong.
            DeadlineExceeded: the server did not answer in time.
        """
        if self._file is not None:
            return self._file
        deadline = Deadline("attaching to the engine's weights", self.limit_s, "deadlines.sync_s")
        info = self.server.info(deadline=deadline)
        _refuse_split(info.model.tensor_parallel_size, info.url)
        self.server.claim(self.owner, takeover=self.takeover, deadline=deadline)
        file = self._find(info, deadline=deadline)
        _refuse_split(file.tp_degree * file.dp_shard_degree, info.url)
        self._tensors = {name: self._attachments.tensor(name, shared) for name, shared in file.tensors.items()}
        self._file = file
        return file

    @torch.no_grad()
    def attach(self, model: PreTrainedModel) -> int:
        """Make the engine's tensors the parameters of ``model``, which has them on the meta device; ties stay.

        Fused matrices are attached by rows, so that ``data_ptr`` of q, k and v point into one. Buffers move to
        the engine's device. Nothing of the model is on the meta device afterwards.

        Returns:
            The number of parameters that were attached.

        Raises:
            ModelError: the engine serves another model, in another dtype, or stores it in an unknown way.
            ConfigError, EngineError, DeadlineExceeded: as :meth:`open`.
        """
        file = self.open()
        parameters = dict(model.named_parameters())
        slices = map_parameters(
            {name: tuple(p.shape) for name, p in parameters.items()},
            {name: tuple(t.shape) for name, t in self._tensors.items()},
            model_type=text_config(model).model_type,
            engine_kind=file.engine,
            mixtures=True,
        )
        self._check_dtypes(parameters, slices)
        self._check_head(slices)
        views = {}
        for name, entry in slices.items():
            rows = entry.of(self._tensors)
            views[id(parameters[name])] = nn.Parameter(rows, requires_grad=parameters[name].requires_grad)
        for module in model.modules():
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, leaf, views[id(parameter)])
            for leaf, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_meta:
                    raise EngineError(
                        f"the buffer {type(module).__name__}.{leaf} is on the meta device; engines share no buffers",
                        remedy="build the model with lachesis.train.model.loading.empty_transformer",
                    )
                setattr(module, leaf, buffer.to(self.device))
        self.slices = slices
        self._attached = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
        _log.info("Attached %d tensors", len(self._attached))
        return len(self._attached)

    def check_attached(self) -> None:
        """Check that nothing has moved the model's parameters since they were attached.

        Raises:
            ModelError: nothing was attached, or a parameter has been moved to other memory.
        """
        moved = [name for name, (parameter, pointer) in self._attached.items() if parameter.data_ptr() != pointer]
        others = f" (and {len(moved) - 1} more)" * (len(moved) > 1)
        problem = f"{moved[0]} no longer lies in the engine's memory{others}" if moved else ""
        if not self._attached:
            problem = "the policy's model was never attached to the engine's memory"
        if problem:
            raise ModelError(
                f"{problem}, so the engine would not see updates",
                remedy="build the policy on the engine's weights, and do not move or cast the model afterwards",
            )

    def close(self) -> None:
        """Release the engine's memory; attached models keep what they use. Idempotent."""
        self._attachments.close()
        self._tensors = {}
        self._attached = {}
        self._file = None

    def _find(self, info: ServerInfo, *, deadline: Deadline) -> BridgeFile:
        """Return this session's bridge file; replace a stale one that was found by search."""

        def read(path: Path) -> BridgeFile:
            file = read_bridge_file(path)
            check_session(file, session_id=info.session_id)
            return file

        if self.config_path not in (None, "", "auto"):
            return read(find_bridge_file(self.config_path))
        for place in search_places():
            if place.is_file():
                try:
                    return read(place)
                except EngineError as error:
                    _log.info("asking the engine to export its weights again: %s", error.message)
        path = self.export_directory.absolute() / BRIDGE_FILE
        self.server.export_shared(path, deadline=deadline)
        return read(path)

    def _check_dtypes(self, parameters: Mapping[str, nn.Parameter], slices: Mapping[str, DigestSlice]) -> None:
        for name, entry in slices.items():
            theirs, ours = self._tensors[entry.name].dtype, parameters[name].dtype
            if theirs != ours:
                raise ModelError(
                    f"{name} is {dtype_name(ours)} in the trainer and {dtype_name(theirs)} in the engine",
                    remedy=f"set model.dtype to {dtype_name(theirs)}, or start the engine with --dtype "
                    f"{dtype_name(ours)}",
                )

    def _check_head(self, slices: Mapping[str, DigestSlice]) -> None:
        """Check that a head listed beside tied embeddings is the same memory."""
        used = {entry.name for entry in slices.values()}
        heads = [name for name in self._tensors if name.endswith("lm_head.weight") and name not in used]
        embeddings = {self._tensors[name].data_ptr() for name in used if "embed_tokens" in name or "wte" in name}
        for name in heads:
            if self._tensors[name].data_ptr() not in embeddings:
                raise ModelError(
                    f"the engine has a separate {name}, but the trainer's is tied to its embeddings",
                    remedy="set the same tie_word_embeddings in both models' config.json",
                )

    def _first(self) -> Tensor:
        self.open()
        return next(iter(self._tensors.values()))


class SharedBridge(ExternalBridge[PolicyT]):
    """Bridge of two processes, trainer and engine, over one copy of the weights.

    Args:
        servers: one, which the policy trains in.
        weights: its tensors. The policy builder that :meth:`prepare` is given has to attach its model to them.

    Raises:
        ConfigError: there are several servers.
    """

    def __init__(self, servers: Servers[PolicyT], *, weights: EngineWeights) -> None:
        super().__init__(servers, capabilities=SharedBridgeConfig.capabilities)
        self._weights = weights
        if len(servers.engine.controls) > 1:
            raise ConfigError(
                "bridge.kind shared_vllm shares weights with one engine, but engine.urls names "
                f"{len(servers.engine.controls)}",
                remedy="name one server, or use bridge.kind broadcast or lora_only",
            )

    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        """Map the engine's tensors, then build the policy on them.

        Raises:
            ConfigError, EngineError, ModelError: as :meth:`EngineWeights.open` and :meth:`EngineWeights.attach`,
                or the policy has its weights elsewhere.
        """
        self._weights.open()

        def build() -> PolicyT:
            policy = policy_builder()
            self._weights.check_attached()
            return policy

        return super().prepare(build)

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        self._weights.check_attached()
        if self._weights.device.type == "cuda":
            # The engine reads on streams of another process, which do not wait for this process's.
            torch.cuda.synchronize(self._weights.device)
        deadline.check("the optimizer step is still running on the GPU")
        # The engine then drops its caches, which the earlier weights computed.
        self.engine.set_version(version)
        _log.info("[SINGLE-COPY] Weights updated in-place - step %d", version)

    def close(self) -> None:
        self._weights.close()
        super().close()


def _refuse_split(parts: int, url: str) -> None:
    if parts > 1:
        raise ConfigError(
            f"the engine at {url} splits its weights over {parts} GPUs: each matrix lies in pieces in {parts} "
            "processes, so a trainer's parameter, which is one tensor, cannot share its memory",
            remedy="start the engine with --tensor-parallel-size 1, or use bridge.kind broadcast or lora_only",
        )
