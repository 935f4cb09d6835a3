"""The bodies of the routes that change weights: from JSON to records. Pure; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lachesis.engines.serving.bodies import Body
from lachesis.engines.serving.served import AdapterStatus, LoraSpec, ReceiverSpec, ReceiverStatus, Refused, TensorInfo
from lachesis.transport.records import ReceivedTensor

DEFAULT_ADAPTER = "policy"
MAX_VERSION = (1 << 53) - 1
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_INIT_METHOD = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Which adapter to load, and the version that its weights are; ``None`` counts one up."""

    name: str
    path: str
    version: int | None


def parse_adapter_load(document: Mapping[str, Any]) -> AdapterLoad:
    """The body of any of the routes that load an adapter: ``adapter_*`` and ``lora_*`` mean the same."""
    known = {"adapter_path", "lora_path", "adapter_name", "lora_name", "lora_int_id", "load_inplace", "weight_version"}
    body = Body(document, known=known)
    named = [name for name in ("adapter_path", "lora_path") if body.get(name) is not None]
    if len(named) == 2:
        raise Refused("the body has both adapter_path and lora_path", remedy="send one of them")
    path = body.text(named[0] if named else "adapter_path")
    name = body.text("adapter_name", None) or body.text("lora_name", None) or DEFAULT_ADAPTER
    return AdapterLoad(name=name, path=path, version=parse_version(body, required=False))


def parse_version(body: Body, *, required: bool = True) -> int | None:
    """The field ``weight_version``."""
    return body.integer("weight_version", *([] if required else [None]), low=0, high=MAX_VERSION)


def parse_receiver(document: Mapping[str, Any]) -> ReceiverSpec:
    """The body of ``/nccl/start_receiver``.

    Raises:
        Refused: (400) a field is missing, unknown or of the wrong type, or the lists do not fit each other.
    """
    body = Body(
        document,
        known={
            "init_method", "world_size", "backend", "rank", "kind", "param_metadata", "param_mappings", "lora",
        },
    )  # fmt: skip
    init_method = body.text("init_method")
    match = _INIT_METHOD.fullmatch(init_method)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise Refused(f"init_method {init_method!r} names no address", remedy='send "tcp://HOST:PORT"')
    world_size = body.integer("world_size", low=2, high=1024)
    lora = body.mapping("lora", None)
    kind = body.choice("kind", ("lora", "full"), "full" if lora is None else "lora")
    if (kind == "lora") != (lora is not None):
        raise Refused(f"kind {kind!r} does not go with lora {'set' if lora else 'absent'}", remedy="send both or none")
    return ReceiverSpec(
        init_method=init_method,
        world_size=world_size,
        backend=body.choice("backend", ("nccl", "gloo", "ipc"), "nccl"),
        rank=body.integer("rank", 1, low=1, high=world_size - 1),
        kind=kind,
        tensors=_tensors(body.mapping("param_metadata")),
        lora=None if lora is None else _lora(lora),
        param_mappings=body.mapping("param_mappings", {}),
    )


def adapter_document(adapter: AdapterStatus | None) -> dict[str, Any] | None:
    """The adapter in force, in answers."""
    if adapter is None:
        return None
    return {
        "name": adapter.name,
        "path": None if adapter.path is None else str(adapter.path),
        "rank": adapter.rank,
        "alpha": adapter.alpha,
    }


def receiver_document(status: ReceiverStatus) -> dict[str, Any]:
    """The answer of ``/nccl/status``."""
    spec = status.spec
    return {
        "status": status.state,
        "detail": status.detail,
        "updates": status.updates,
        "init_method": spec.init_method if spec else None,
        "world_size": spec.world_size if spec else None,
        "rank": spec.rank if spec else None,
        "backend": spec.backend if spec else None,
        "kind": spec.kind if spec else None,
        "num_params": len(spec.tensors) if spec else 0,
    }


def state_dict_document(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The answer of ``/bridge/state_dict_info``."""
    return {"num_params": len(tensors), "param_mappings": {name: asdict(info) for name, info in tensors.items()}}


def _tensors(metadata: Mapping[str, Any]) -> tuple[ReceivedTensor, ...]:
    body = Body(metadata, known={"param_names", "param_shapes", "param_dtypes", "num_params"}, where="param_metadata")
    # Each is a list beside param_names; the documents have maps by name too.
    names = list(body.texts("param_names"))
    shapes, dtypes = (_aligned(body, field, names) for field in ("param_shapes", "param_dtypes"))
    if not names or len(set(names)) != len(names):
        raise Refused("param_names is empty or has a name twice", remedy="name every tensor once")
    if body.integer("num_params", len(names)) != len(names):
        raise Refused(f"num_params is {body.get('num_params')}, but there are {len(names)} names", remedy="correct it")
    return tuple(
        ReceivedTensor(name, _shape(name, shape), _dtype(name, dtype))
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    )


def _aligned(body: Body, field: str, names: list[str]) -> list[Any]:
    value = body.get(field)
    if isinstance(value, dict) and set(value) == set(names):
        return [value[name] for name in names]
    values = body.sequence(field)
    if len(values) != len(names):
        raise Refused(f"{field} has {len(values)} entries for {len(names)} names", remedy="send one for each name")
    return values


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(size) is not int or not 0 < size < 1 << 40 for size in shape):
        raise Refused(f"the shape of {name!r} is no list of sizes", remedy="send sizes of 1 and above")
    return tuple(shape)


def _dtype(name: str, dtype: Any) -> str:
    plain = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if plain not in _DTYPES:
        raise Refused(f"the dtype of {name!r} is {dtype!r}", remedy=f"send one of {', '.join(_DTYPES)}")
    return plain


def _lora(document: Mapping[str, Any]) -> LoraSpec:
    body = Body(document, known={"r", "alpha", "target_modules", "rslora", "name"}, where="lora")
    alpha = body.number("alpha")
    if not 0 < alpha < float("inf"):
        raise Refused(f"lora.alpha is {alpha}, not above 0", remedy="correct the field")
    return LoraSpec(
        r=body.integer("r", low=1, high=1 << 16),
        alpha=float(alpha),
        target_modules=body.texts("target_modules"),
        rslora=body.flag("rslora", False),
        name=body.text("name", DEFAULT_ADAPTER),
    )
