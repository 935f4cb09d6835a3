"""Contract between a server's routes and the engine behind it, and the records that cross it. No torch."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from lachesis.common.json_values import is_array, is_object
from lachesis.engines.base import PauseMode
from lachesis.engines.serving.bodies import SINGLE, Count, Flag, Number, Request, Text, Whole, given, parse
from lachesis.engines.serving.bodies import Refused as Refused
from lachesis.engines.serving.generation import POLICY, GenerateBody, GenerateChunk, GenerateResult
from lachesis.transport.layout import ChannelBackend, ReceivedTensor, Staging

if TYPE_CHECKING:
    from torch import Tensor

MemoryPart = Literal["weights", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")
"""Parts of memory that a sleeping engine has released, by vLLM's names."""

ReceiverState = Literal["idle", "connecting", "connected", "error"]
TransferKind = Literal["lora", "full"]
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_INIT_METHOD = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})")


def _nested(kind: type[Any], value: Any, *, where: str, **defaults: Any) -> Any:
    """Return the fields that a nested object sets; return other values unchanged, for the type to reject."""
    if not is_object(value):
        return value
    return defaults | given(value, [field.name for field in fields(kind)], where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model.

    ``model`` is the path or name it was loaded from, ``served_names`` are the names for it in requests, besides
    ``policy`` and the adapter's name; ``dtype`` is torch's name without the module ("bfloat16").
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
    quantization: str = "none"
    kv_cache_dtype: str = "auto"

    @property
    def rounds(self) -> int:
        """Return how many of two parts (weights; keys and values) are in 8 bits, but in 16 or more in the trainer."""
        return ("fp8" in self.quantization) + ("fp8" in self.kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class DigestSlice:
    """Rows ``start`` to ``start + rows - 1`` of the engine's tensor ``name``; without ``rows`` all from ``start``."""

    name: Text
    start: Count = 0
    rows: Count | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return these rows of the engine's tensor; a scalar is returned whole.

        Raises:
            Refused: (404) there is no tensor of this name; (422) it does not have these rows.
        """
        self.check({name: tuple(tensors[name].shape) for name in {self.name} & tensors.keys()})
        tensor = tensors[self.name]
        return tensor if tensor.ndim == 0 else tensor[self.start : self.end(tensor.shape[0])]

    def end(self, rows: int) -> int:
        """Return the end of these rows in a tensor of ``rows`` rows."""
        return rows if self.rows is None else self.start + self.rows

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise Refused, as :meth:`of`, unless the tensor exists and has these rows."""
        remedy = "look at /bridge/state_dict_info"
        if self.name not in shapes:
            raise Refused(f"the engine has no parameter {self.name!r}", status=404, remedy=remedy)
        shape = shapes[self.name]
        if shape and not self.start <= self.end(shape[0]) <= shape[0]:
            what = f"rows {self.start} to {self.end(shape[0])} of {self.name!r} were requested, but it has {shape[0]}"
            raise Refused(what, status=422, remedy=remedy)


def check_fits(
    offered: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], *, tied: Collection[str], what: str
) -> None:
    """Raise Refused (422) unless ``offered`` holds the tensors ``wanted``, each of its shape.

    ``tied`` are names of tensors that the model shares with others: a checkpoint may have them or not.
    """
    if missing := [name for name in wanted if name not in offered and name not in tied]:
        raise Refused(
            f"{what} lacks {len(missing)} of the model's {len(wanted)} tensors, such as {missing[0]!r}",
            status=422,
            remedy="give all of the model's tensors under their names in its checkpoint",
        )
    if extra := [name for name in offered if name not in wanted and name not in tied]:
        raise Refused(
            f"{what} has {len(extra)} tensors that the model does not have, such as {extra[0]!r}",
            status=422,
            remedy="use a checkpoint of the served model",
        )
    for name, shape in offered.items():
        if name in wanted and tuple(shape) != tuple(wanted[name]):
            raise Refused(
                f"{what} has {name!r} of shape {list(shape)}, but the model's has shape {list(wanted[name])}",
                status=422,
                remedy="use weights of the served model",
            )


class DigestRequest(Request):
    """A request for digests of tensors.

    ``slices`` maps names in the answer to slices of the engine's tensors, by default of the tensor with that name;
    ``None`` means every parameter of the engine under its own name, an empty map none. ``adapter`` requests the active
    adapter's tensors.
    """

    slices: dict[str, DigestSlice] | None = None
    adapter: Flag = False

    @property
    def asks(self) -> bool:
        """Return True if any digest is requested."""
        return self.adapter or self.slices != {}

    @field_validator("slices", mode="before")
    @classmethod
    def _named(cls, slices: Any) -> Any:
        if not is_object(slices):
            return slices
        return {name: _nested(DigestSlice, part, where=f"slices.{name}", name=name) for name, part in slices.items()}


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """The active adapter. ``path`` is ``None`` if its tensors came over a channel."""

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
    """The way to apply LoRA tensors: ``scaling`` is alpha / r, or alpha / sqrt(r) with ``rslora``."""

    r: Annotated[Whole, Field(ge=1, le=1 << 16)]
    alpha: Annotated[Number, Field(gt=0)]
    target_modules: Annotated[tuple[Text, ...], SINGLE]
    rslora: Flag = False
    name: Text = POLICY

    @property
    def scaling(self) -> float:
        """Return the factor of B."""
        return self.alpha / (self.r**0.5 if self.rslora else self.r)


def _tensor(value: Any) -> ReceivedTensor:
    """Parse the announcement of a tensor; raise Refused (400) if its shape or dtype is invalid."""
    if isinstance(value, ReceivedTensor):
        return value
    name, shape, dtype = value["name"], value["shape"], value["dtype"]
    if not is_array(shape) or any(type(size) is not int or not 0 < size < 1 << 40 for size in shape):
        raise Refused(f"the shape of {name!r} is not a list of sizes", remedy="send a list of integers from 1 up")
    plain = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if plain not in _DTYPES:
        raise Refused(f"{name!r} has the unknown dtype {dtype!r}", remedy=f"send one of {', '.join(_DTYPES)}")
    return ReceivedTensor(name, tuple(shape), plain)


class ReceiverSpec(Request):
    """A channel for the engine to join as ``rank`` of ``world_size``, and the tensors of an update, in order.

    ``init_method`` is "tcp://host:port". ``lora`` is set if and only if ``kind`` is "lora". ``param_mappings`` are the
    caller's mappings of the engine's names; if empty, the engine maps them itself. Bodies may have the documented
    ``param_metadata`` instead of ``tensors``. ``secret`` authenticates the engine to the trainer.

    If several ranks of the trainer send, the others are at ``senders``, each on its own channel with the same
    ranks, and ``sender_of`` gives the sender of each tensor: 0 is the one at ``init_method``.

    ``staging`` is where the engine keeps an update until it has fully arrived.
    """

    also = ("param_metadata",)

    init_method: str
    world_size: Annotated[Whole, Field(ge=2, le=1024)]
    backend: ChannelBackend = "nccl"
    kind: TransferKind
    tensors: tuple[Annotated[ReceivedTensor, BeforeValidator(_tensor)], ...]
    rank: Annotated[Whole, Field(ge=1)] = 1
    lora: LoraSpec | None = None
    param_mappings: Mapping[str, Any] = Field(default_factory=dict)
    secret: str = Field(default="", repr=False)
    senders: tuple[Text, ...] = ()
    sender_of: tuple[Whole, ...] = ()
    staging: Staging = "auto"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all senders."""
        return (self.init_method, *self.senders)

    def share(self, sender: int) -> tuple[ReceivedTensor, ...]:
        """Return the tensors from one sender, in order."""
        if not self.senders:
            return self.tensors
        return tuple(tensor for tensor, by in zip(self.tensors, self.sender_of, strict=True) if by == sender)

    @field_validator("init_method")
    @classmethod
    def _is_address(cls, value: str) -> str:
        match = _INIT_METHOD.fullmatch(value)
        if match is None or not 1 <= int(match[2]) <= 65535:
            raise Refused(f"init_method {value!r} is not an address", remedy='send "tcp://HOST:PORT"')
        return value

    @field_validator("senders")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(cls._is_address, value))

    @model_validator(mode="before")
    @classmethod
    def _documented(cls, fields: dict[str, Any]) -> dict[str, Any]:
        lora = fields.get("lora")
        filled = {"kind": "full" if lora is None else "lora"} | fields
        if isinstance(lora, dict):
            filled["lora"] = _nested(LoraSpec, lora, where="lora")
        if "param_metadata" in fields:
            filled["tensors"] = _announced(fields["param_metadata"])
        return filled

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.rank >= self.world_size:
            raise Refused(f"rank {self.rank} is not below world_size {self.world_size}", remedy="correct one of them")
        if (self.kind == "lora") != (self.lora is not None):
            there = "set" if self.lora else "absent"
            raise Refused(f"kind is {self.kind!r} but lora is {there}", remedy='send kind "lora" together with lora')
        if not self.tensors or len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise Refused("param_names is empty or contains a name twice", remedy="name every tensor once")
        senders = set(range(len(self.addresses))) if self.senders else set[int]()
        if set(self.sender_of) != senders or len(self.sender_of) != (len(self.tensors) if senders else 0):
            raise Refused("sender_of does not give a sender for each tensor", remedy="correct the field")
        return self


class _Metadata(Request):
    """The tensors of an update as three parallel lists; shapes and dtypes may also be maps by name."""

    param_names: Annotated[tuple[Text, ...], SINGLE]
    param_shapes: list[Any] | dict[str, Any]
    param_dtypes: list[Any] | dict[str, Any]
    num_params: Whole | None = None


def _announced(metadata: Any) -> list[dict[str, Any]]:
    if not is_object(metadata):
        raise Refused("the field 'param_metadata' is not an object", remedy="correct the field")
    parsed = parse(_Metadata, metadata, where="param_metadata")
    names = parsed.param_names
    columns: list[list[Any]] = []
    if parsed.num_params not in (None, len(names)):
        raise Refused(f"num_params is {parsed.num_params}, but there are {len(names)} names", remedy="correct it")
    for field, column in (("param_shapes", parsed.param_shapes), ("param_dtypes", parsed.param_dtypes)):
        if len(column) != len(names) or (isinstance(column, dict) and column.keys() != set(names)):
            raise Refused(f"{field} has {len(column)} entries for {len(names)} names", remedy="send one for each name")
        columns.append([column[name] for name in names] if isinstance(column, dict) else column)
    return [{"name": name, "shape": s, "dtype": d} for name, s, d in zip(names, *columns, strict=True)]


@dataclass(frozen=True, slots=True)
class ReceiverStatus:
    """The state of the receiver.

    ``detail`` gives the reason for ``error``; ``copied`` counts the updates that were copied directly to the tensors'
    known places.
    """

    state: ReceiverState = "idle"
    detail: str = ""
    spec: ReceiverSpec | None = None
    updates: int = 0
    copied: int = 0


class EngineBackend(Protocol):
    """An engine behind our routes. Its methods run on the server's event loop and must not block it.

    Errors are :class:`LachesisError`; a caller's error is :class:`Refused`, after which the engine serves as before. A
    change of weights is complete when its call returns. If the call raises, the old weights are in place, or with
    :class:`StaleWeights` the engine serves nothing. The routes make one such call at a time, reset the prefix cache and
    record the version, which the engine does not know. Generation and changes may overlap: requests in flight continue
    with the new weights. Cancelling ``generate`` or closing ``stream`` aborts the request.
    """

    @property
    def kind(self) -> str:
        """Return the name and version of the engine, as in "vllm 0.32.0" or "embedded"."""
        ...

    @property
    def sampling_fields(self) -> frozenset[str]:
        """Return the names that :attr:`GenerateBody.sampling` may have."""
        ...

    @property
    def takes_images(self) -> bool:
        """Return True if prompts may have images, which makes their requests large."""
        return False

    def model_info(self) -> ModelInfo: ...

    def generated_tokens(self) -> int | None:
        """Return the tokens generated since its start, also of unfinished requests; ``None`` if not counted."""
        ...

    async def generate(self, request: GenerateBody) -> GenerateResult:
        """Return all ``n`` completions. While the engine is paused or asleep, requests wait."""
        ...

    def stream(self, request: GenerateBody) -> AsyncGenerator[GenerateChunk]:
        """Yield the completions of :meth:`generate` in pieces; pieces of the ``n`` completions are interleaved."""
        ...

    async def canary(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprobs of each token after the first, at temperature 1, with the adapter; works while paused."""
        ...

    async def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of a prompt made of ``token_ids`` are in the prefix cache; no user's prompt equals it.

        After an update it must be 0, because cached tokens had earlier weights. The call then caches the prompt.
        """
        ...

    async def digests(self, request: DigestRequest) -> dict[str, int]:
        """Return exact digests of the engine's tensors; works while paused. Raise Refused (404) for unknown names."""
        ...

    async def load_adapter(self, *, name: str, path: Path) -> None:
        """Replace the adapter by the one in ``path``, including for requests in flight."""
        ...

    async def unload_adapter(self, *, name: str) -> None:
        """Serve the base weights again. Refused (404) if ``name`` is not the active adapter."""
        ...

    def adapter(self) -> AdapterStatus | None: ...

    async def start_receiver(self, spec: ReceiverSpec) -> None:
        """Check the spec against the model and join the channel in the background. Refused (409) for a second."""
        ...

    def receiver(self) -> ReceiverStatus: ...

    async def receive(self) -> None:
        """Receive one update from the channel and load it. Refused (409) if no channel is connected."""
        ...

    async def stop_receiver(self) -> None:
        """Leave the channel. Idempotent."""
        ...

    async def export_shared(self, path: Path) -> None:
        """Write the bridge file that lets another process attach to the parameters."""
        ...

    async def state_dict_info(self) -> dict[str, TensorInfo]: ...

    async def reload(self, path: Path) -> None:
        """Load a checkpoint directory of the same architecture into the running engine; drop the adapter."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: ``keep`` freezes requests, ``drain`` finishes them, ``abort`` ends them. Idempotent."""
        ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def sleep(self, level: int) -> None:
        """Free memory (level 1: move weights to host memory; 2: drop them). Idempotent."""
        ...

    async def wake_up(self, tags: Sequence[MemoryPart]) -> None:
        """Reallocate these parts of memory; once none is missing, generation continues. Idempotent.

        With only the weights restored, they can be changed before the cache is reallocated.
        """
        ...

    async def is_sleeping(self) -> bool: ...

    async def reset_prefix_cache(self) -> None: ...

    async def label_weights(self, version: int) -> None:
        """Label each token sampled from now on with this version, if the engine supports it."""
        ...

    def check_alive(self) -> None:
        """Raise EngineUnreachable if the engine is dead although its server answers."""
        ...

    async def health(self) -> None:
        """Raise EngineError if nothing can be generated: the engine is dead, or its weights are unusable."""
        ...
