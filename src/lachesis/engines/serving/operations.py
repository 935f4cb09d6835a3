"""The table of all operations of an inference server: servers mount it, clients call its rows.

A new operation is a row here, with the types of its body and answer, and a method of that name on the engines, or on
:class:`~lachesis.engines.serving.server.Server` if it does not involve the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeGuard, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from lachesis.common.json_values import is_object
from lachesis.engines.base import PauseMode
from lachesis.engines.serving.backend import (
    MEMORY_PARTS,
    AdapterStatus,
    DigestRequest,
    MemoryPart,
    ModelInfo,
    ReceiverSpec,
    ReceiverState,
    ReceiverStatus,
    TensorInfo,
    TransferKind,
)
from lachesis.engines.serving.bodies import SINGLE, Flag, Request, Text, TokenIds, Whole
from lachesis.engines.serving.generation import POLICY
from lachesis.engines.serving.tokens import TokensAnswer, TokensBody
from lachesis.transport.layout import ChannelBackend

Q = TypeVar("Q", bound=Request)
A = TypeVar("A", bound=BaseModel)
VERSION = "weight_version"


def _resolved(path: Any, info: ValidationInfo) -> Any:
    """Return a path without symbolic links; on a server, require that it is inside the server's roots."""
    if not (isinstance(path, str | Path) and str(path)):
        raise ValueError("Input should be a path")
    return path if info.context is None else info.context(path)


def _from_hex(value: Any) -> Any:
    return int(value, 16) if isinstance(value, str) else value


ResolvedPath = Annotated[Path, BeforeValidator(_resolved)]
Version = Annotated[Whole, Field(ge=0, le=(1 << 53) - 1)]
Hex = Annotated[int, BeforeValidator(_from_hex), PlainSerializer("{:016x}".format)]


class Nothing(Request):
    """A request without fields."""


class Claim(Request):
    owner: Text
    takeover: Flag = False


class Release(Request):
    owner: Text


class LoadAdapter(Request):
    """The request to load an adapter. Without a version the current one is incremented."""

    aliases: ClassVar = {"lora_path": "adapter_path", "lora_name": "adapter_name"}
    also = ("lora_int_id", "load_inplace")

    adapter_path: ResolvedPath
    adapter_name: Text = POLICY
    weight_version: Version | None = None


class UnloadAdapter(Request):
    """The request to unload an adapter, by default the active one."""

    aliases: ClassVar = {"lora_name": "adapter_name"}
    also = ("lora_int_id",)

    adapter_name: Text | None = None
    weight_version: Version | None = None


class NewVersion(Request):
    weight_version: Version


class ExportShared(Request):
    path: ResolvedPath


class Reload(Request):
    path: ResolvedPath
    weight_version: Version | None = None


class Pause(Request):
    mode: PauseMode = "keep"


class Sleep(Request):
    level: Annotated[Whole, Field(ge=1, le=2)] = 1


class WakeUp(Request):
    """The request to reallocate parts of memory, by vLLM's names: ``weights``, ``kv_cache``, or both."""

    tags: Annotated[tuple[MemoryPart, ...], SINGLE] = MEMORY_PARTS


class CanaryRequest(Request):
    token_ids: TokenIds


class ProofRequest(CanaryRequest, DigestRequest):
    """The request for a canary reading and digests of tensors at the same weights."""


class Empty(BaseModel):
    """An empty answer."""


class Answer(BaseModel):
    """The base of all answers about weights, with their version and the server's session."""

    weight_version: int = -1
    session_id: str = ""


class Stamped(BaseModel):
    """The base of answers in which a client requires the version and the session."""

    weight_version: int
    session_id: str


class ServerInfo(Stamped):
    """The identity and state of a server. In the answer the model's fields are beside the others.

    ``url`` is the server's address for clients. ``generated_tokens`` counts all tokens since the engine's start,
    including unfinished requests; ``None`` if not counted.
    """

    url: str = Field(default="", exclude=True)
    paused: bool
    sleeping: bool
    owner: str | None = None
    engine: str
    pid: int
    model: ModelInfo
    adapter: AdapterStatus | None = None
    lachesis: str = ""
    generated_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_model(cls, reply: Any) -> Any:
        return reply | {"model": reply} if isinstance(reply.get("model"), str) else reply

    @model_serializer(mode="wrap")
    def _flat(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        document = serialize(self)
        model = document.pop("model")
        return document | model


class Owned(Answer):
    owner: str | None = None


class Loaded(Answer):
    status: str = "success"
    adapter: AdapterStatus | None = None


class Located(Answer):
    path: Path


class Paused(Answer):
    paused: bool


class Sleeping(Answer):
    sleeping: bool


class LoraStatus(Answer):
    status: Literal["connected", "idle"]
    detail: str
    adapter: AdapterStatus | None
    lora_enabled: bool
    max_lora_rank: int


class ReceiverReport(BaseModel):
    """The state of the receiver, and the specification with which it was started."""

    status: ReceiverState
    detail: str = ""
    updates: int = 0
    copied: int = 0
    init_method: str | None = None
    world_size: int | None = None
    rank: int | None = None
    backend: ChannelBackend | None = None
    kind: TransferKind | None = None
    num_params: int = 0

    @model_validator(mode="before")
    @classmethod
    def _of_engine(cls, found: Any) -> Any:
        """Accept, on a server, the engine's status, alone or within the server's state."""
        known = found if is_object(found) else {}
        receiver = known.get("receiver") if is_object(found) else found
        if not isinstance(receiver, ReceiverStatus):
            return found
        spec = {} if receiver.spec is None else dict(receiver.spec) | {"num_params": len(receiver.spec.tensors)}
        told = {
            "status": receiver.state,
            "detail": receiver.detail,
            "updates": receiver.updates,
            "copied": receiver.copied,
        }
        return known | spec | told


class Receiving(ReceiverReport, Answer):
    """A receiver report with version and session."""


class Debug(ServerInfo):
    """The content of :class:`ServerInfo`, the receiver's state, and this server's documented environment variables."""

    receiver: ReceiverReport
    adapter_roots: list[Path]
    variables: dict[str, str | None]


class StateDict(Answer):
    num_params: int = 0
    param_mappings: dict[str, TensorInfo]


class Canary(Stamped):
    logprobs: tuple[float, ...]
    cached_tokens: int = 0


class Digests(Stamped):
    digests: dict[str, Hex]


class Proof(Canary, Digests):
    """A canary reading and digests of the same weights."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[Q, A]):
    """An operation: a route with its request and answer.

    Args:
        name: the method that performs it: of ``Server``, with the request, or of the engine, with the request's fields
            as keywords. It returns the part of the answer beyond the server's state. Empty if there is no such part.
        path: the route's path; ``aliases`` are other paths to it.
        request: class that a body is parsed into.
        answer: class of the answer that clients get.
        method: GET has no body.
        guarded: True if it needs the session's token. An unguarded operation changes nothing and may be resent.
        loading: for changes of weights, a description with the request's fields in braces. One such operation runs at a
            time; at its end the prefix cache is reset and the request's version is recorded.
    """

    name: str
    path: str
    request: type[Q]
    answer: type[A]
    _: KW_ONLY
    aliases: tuple[str, ...] = ()
    method: Literal["GET", "POST"] = "POST"
    guarded: bool = True
    loading: str = ""


HEALTH = Operation("health", "/health", Nothing, Empty, method="GET", guarded=False)
PROBE = Operation("health_generate", "/health_generate", Nothing, Empty, method="GET", guarded=False)
INFO = Operation("", "/bridge/info", Nothing, ServerInfo, method="GET", guarded=False)
DEBUG = Operation("", "/bridge/debug", Nothing, Debug, method="GET", guarded=False)
IS_PAUSED = Operation("", "/bridge/is_paused", Nothing, Paused, method="GET", guarded=False)
IS_SLEEPING = Operation("", "/bridge/is_sleeping", Nothing, Sleeping, method="GET", guarded=False)
LORA_STATUS = Operation("lora_status", "/lora/status", Nothing, LoraStatus, method="GET", guarded=False)
RECEIVER = Operation("", "/nccl/status", Nothing, Receiving, method="GET", guarded=False)
STATE_DICT = Operation("state_dict", "/bridge/state_dict_info", Nothing, StateDict, method="GET", guarded=False)
CANARY = Operation("canary", "/bridge/canary", CanaryRequest, Canary, guarded=False)
# vLLM has this route only with --enable-scale-out, with other names for tokens.
TOKENS = Operation("generate_tokens", "/inference/v1/generate", TokensBody, TokensAnswer, guarded=False)
DIGESTS = Operation("digests", "/bridge/digests", DigestRequest, Digests, guarded=False)
PROVE = Operation("prove", "/bridge/prove", ProofRequest, Proof, guarded=False)
CLAIM = Operation("claim", "/bridge/claim", Claim, Owned)
RELEASE = Operation("release", "/bridge/release", Release, Owned)
LOAD_ADAPTER = Operation(
    "load_adapter", "/lora/load", LoadAdapter, Loaded, loading="loading adapter {adapter_name!r}",
    aliases=("/v1/load_lora_adapter", "/set_lora_adapter", "/set_lora_adapter/"),
)  # fmt: skip
UNLOAD_ADAPTER = Operation(
    "unload_adapter", "/lora/unload", UnloadAdapter, Loaded, loading="unloading the adapter",
    aliases=("/v1/unload_lora_adapter",),
)  # fmt: skip
START_RECEIVER = Operation("start_receiver", "/nccl/start_receiver", ReceiverSpec, Receiving)
RECEIVE = Operation("receive", "/nccl/receive", NewVersion, Receiving, loading="receiving an update")
STOP_RECEIVER = Operation("stop_receiver", "/nccl/stop_receiver", Nothing, Receiving)
EXPORT = Operation("export_shared", "/bridge/export", ExportShared, Located)
PAUSE = Operation("pause", "/bridge/pause", Pause, Paused)
RESUME = Operation("resume", "/bridge/resume", Nothing, Paused)
SLEEP = Operation("sleep", "/bridge/sleep", Sleep, Sleeping)
WAKE_UP = Operation("wake_up", "/bridge/wake_up", WakeUp, Sleeping)
RELOAD = Operation("reload", "/bridge/reload", Reload, Located, loading="loading {path}")
SET_VERSION = Operation("set_version", "/bridge/set_version", NewVersion, Answer, loading="setting the version")


def _is_operation(value: object) -> TypeGuard[Operation[Any, Any]]:
    return isinstance(value, Operation)


OPERATIONS = tuple(value for value in globals().values() if _is_operation(value))
