"""What a server needs of the engine behind it, and the records that cross between routes and engine. No torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lachesis.common.errors import EngineError
from lachesis.common.types import FinishReason
from lachesis.engines.base import PauseMode
from lachesis.transport.records import ChannelBackend, ReceivedTensor

ReceiverState = Literal["idle", "connecting", "connected", "error"]
TransferKind = Literal["lora", "full"]


class Refused(EngineError):
    """A request that is the caller's fault. The engine goes on as before.

    ``status`` is the HTTP status: 400 malformed, 401 no token, 403 not allowed there, 404 unknown name,
    409 not in this state, 413 too large, 422 well-formed but it does not fit this model.
    """

    def __init__(self, message: str, *, status: int = 400, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that is served.

    ``model`` is the path or name it was loaded from, ``served_names`` the names under which requests may ask
    for it besides ``policy`` and the adapter's; ``dtype`` is torch's name without the module ("bfloat16").
    """

    model: str
    served_names: tuple[str, ...]
    dtype: str
    vocab_size: int
    max_model_len: int
    tensor_parallel_size: int
    device: str
    lora_enabled: bool
    max_lora_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """``n`` completions of one prompt; exactly one of ``prompt`` and ``prompt_token_ids`` is set.

    ``sampling`` holds the fields that the caller gave, under vLLM's names and with checked types, without
    ``n``, ``logprobs`` and ``prompt_logprobs``. ``logprobs = k`` asks for the ``k`` likeliest tokens at each
    place besides the sampled one, whose logprob is always returned. ``model`` has been checked.
    """

    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    model: str | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSequence:
    """One finished completion of T tokens.

    ``token_logprobs`` [T] are of the distribution sampled from. ``top_logprobs`` [T], where asked for, map
    token ids to logprobs, the sampled token first. The times are ``time.monotonic()`` of this host at the
    first and the last token. A completion that was ended has the finish reason ``abort`` and may be empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    first_token_time: float
    last_token_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """All completions of one request, in order.

    ``prompt_logprobs`` [P], where asked for, has ``None`` for the first position and a map for the others.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[GeneratedSequence, ...]
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """What is new in completion ``index`` since its last chunk; ``finish_reason`` is set in its last one.

    ``prompt_token_ids`` come with the first chunk of a request. ``time`` is ``time.monotonic()`` at the last
    token of the chunk.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    time: float


@dataclass(frozen=True, slots=True)
class DigestSlice:
    """Rows ``start`` to ``start + rows - 1`` of the engine's tensor ``name``; all from ``start`` without ``rows``."""

    name: str
    start: int = 0
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Which tensors to digest.

    ``slices`` maps the name in the answer to a slice of an engine's tensor; ``None`` asks for every parameter
    of the engine under its own name, an empty map for none. ``adapter`` asks for the active adapter's tensors.
    """

    slices: Mapping[str, DigestSlice] | None = None
    adapter: bool = False


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """The adapter in force. ``path`` is ``None`` where its tensors came over a channel."""

    name: str
    rank: int
    alpha: float
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, dtype (torch's name without the module) and device of one parameter of the engine."""

    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """How to apply LoRA tensors: ``scaling`` is alpha / r, or alpha / sqrt(r) where ``rslora``."""

    r: int
    alpha: float
    target_modules: tuple[str, ...]
    rslora: bool = False
    name: str = "policy"

    @property
    def scaling(self) -> float:
        """What B is multiplied by."""
        return self.alpha / (self.r**0.5 if self.rslora else self.r)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSpec:
    """A channel that the engine joins as ``rank`` of ``world_size``, and the tensors of one update, in order.

    ``init_method`` is "tcp://host:port". ``lora`` is set exactly where ``kind`` is "lora". ``param_mappings``
    is what the caller said about the engine's names; empty where the engine is to map them itself.
    """

    init_method: str
    world_size: int
    backend: ChannelBackend
    kind: TransferKind
    tensors: tuple[ReceivedTensor, ...]
    rank: int = 1
    lora: LoraSpec | None = None
    param_mappings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReceiverStatus:
    """Where the receiver stands. ``detail`` says why it is in ``error``."""

    state: ReceiverState = "idle"
    detail: str = ""
    spec: ReceiverSpec | None = None
    updates: int = 0


class ServedEngine(Protocol):
    """An engine behind our routes. All of it runs on the server's event loop, which it must not block.

    Errors are :class:`LachesisError`; what is the caller's fault is :class:`Refused`, and after it the engine
    serves what it served before. A change of weights is whole when its call returns, and if it raises the
    weights are those from before. The routes make one such call at a time; they reset the prefix cache and
    record the version, the engine knows no versions. Generation and changes may overlap: requests in flight go
    on under the new weights. Cancelling a call of ``generate`` or closing ``stream`` aborts the request.
    """

    @property
    def kind(self) -> str:
        """As in "vllm 0.32.0" or "embedded"."""
        ...

    @property
    def sampling_fields(self) -> frozenset[str]:
        """Names that :attr:`GenerateRequest.sampling` may have."""
        ...

    def model_info(self) -> ModelInfo: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """All ``n`` completions. While the engine is paused or asleep, requests wait."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """The same, in pieces; pieces of the ``n`` completions come interleaved."""
        ...

    async def canary(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Logprob of token i + 1 given those before, at temperature 1, adapter included; works while paused."""
        ...

    async def digests(self, request: DigestRequest) -> dict[str, int]:
        """Exact digests of what the engine holds; works while paused. Refused (404) for unknown names."""
        ...

    async def load_adapter(self, *, name: str, path: Path) -> None:
        """Put the adapter in ``path`` in force, in the place of the one before, for requests in flight too."""
        ...

    async def unload_adapter(self, *, name: str) -> None:
        """Serve the base weights again. Refused (404) where ``name`` is not the adapter in force."""
        ...

    def adapter(self) -> AdapterStatus | None: ...

    async def start_receiver(self, spec: ReceiverSpec) -> None:
        """Check the spec against the model and join the channel in the background. Refused (409) for a second."""
        ...

    def receiver(self) -> ReceiverStatus: ...

    async def receive(self) -> None:
        """Read one update off the channel and load it. Refused (409) where no channel is connected."""
        ...

    async def stop_receiver(self) -> None:
        """Leave the channel. Idempotent."""
        ...

    async def export_shared(self, path: Path) -> None:
        """Write the bridge file by which another process attaches to the parameters."""
        ...

    async def state_dict_info(self) -> dict[str, TensorInfo]: ...

    async def reload(self, path: Path) -> None:
        """Load a checkpoint directory of the same architecture into the running engine; drops the adapter."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: ``keep`` freezes requests, ``drain`` finishes them, ``abort`` ends them. Idempotent."""
        ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def sleep(self, level: int) -> None:
        """Give memory back (level 1: weights to the host; 2: weights dropped). Idempotent."""
        ...

    async def wake_up(self) -> None: ...

    async def is_sleeping(self) -> bool: ...

    async def reset_prefix_cache(self) -> None: ...

    async def health(self) -> None:
        """Raise EngineError where the engine is dead."""
        ...
