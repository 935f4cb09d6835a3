"""Messages between ranks, and their encoding as bytes: JSON, with the tensors beside it as safetensors.

Bytes are only ever decoded into these records and plain data, whoever sent them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lachesis.common.errors import TrainingError
from lachesis.metrics.values import Max, Mean, Sum
from lachesis.train.batch import Batch, MicroBatch

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn that all ranks take together now: a method of the policy.

    Attributes:
        number: counted from 0 by every rank.
        arguments: the same for all followers; with ``parts`` each is sent its own instead.
        answers: followers send the method's result back.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    parts: bool = False
    answers: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Report of a follower that has finished a turn."""

    number: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Report of a follower that failed and ends: the reason, and the remedy."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Alive:
    """Sign of life of the leader."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Announcement that the leader ends, which a follower returns."""


# The records that travel, by name.
_RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (Turn, Answer, Failed, Alive, Ended, Batch, MicroBatch, Mean, Sum, Max)
}  # fmt: skip


def encode(message: object) -> bytes:
    """Encode records, tensors, mappings, sequences and scalars.

    A meta tensor is its dtype and shape alone.
    """
    tensors: dict[str, Tensor] = {}
    document = json.dumps(_document(message, tensors)).encode()
    return len(document).to_bytes(_LENGTH_BYTES, "big") + document + (save(tensors) if tensors else b"")


def decode(data: bytes) -> Any:
    """Decode what :func:`encode` returned; tensors are on the CPU, or on the meta device if they were.

    Raises:
        TrainingError: the bytes are not one of our messages.
    """
    try:
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
        return _value(json.loads(data[_LENGTH_BYTES:end]), load(data[end:]) if data[end:] else {})
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TrainingError(
            f"a message from another rank cannot be read: {type(error).__name__}: {error}",
            remedy="start all ranks with the same version of lachesis",
        ) from error


def _document(value: Any, tensors: dict[str, Tensor]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.is_meta:
            return {"meta": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
        case Tensor():
            name = str(len(tensors))
            # One tensor may stand in several places, and safetensors requires separate storage for each.
            tensors[name] = value.detach().cpu().contiguous().clone()
            return {"tensor": name}
        case Mapping():
            return {"mapping": [[_document(part, tensors) for part in item] for item in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [_document(part, tensors) for part in value]}
    name = type(value).__name__
    if _RECORDS.get(name) is not type(value):
        raise TypeError(f"a {name} cannot be sent to other ranks")
    fields = {field.name: _document(getattr(value, field.name), tensors) for field in dataclasses.fields(value)}
    return {"record": [name, fields]}


def _value(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    match kind:
        case "meta":
            dtype, shape = content
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        case "tensor":
            return tensors[content]
        case "mapping":
            return {_value(key, tensors): _value(item, tensors) for key, item in content}
        case "list":
            return [_value(part, tensors) for part in content]
        case "tuple":
            return tuple(_value(part, tensors) for part in content)
        case "record":
            name, fields = content
            return _RECORDS[name](**{field: _value(item, tensors) for field, item in fields.items()})
    raise ValueError(f"{kind!r} is an unknown kind of value")
