"""Messages between ranks as bytes: JSON, and beside it the tensors as safetensors. No pickle."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lachesis.common.errors import TrainingError
from lachesis.metrics.values import Max, Mean, Sum
from lachesis.train.batch import Batch, MicroBatch
from lachesis.train.distributed import commands

_LENGTH = struct.Struct("!Q")
# The records that travel, by name. A message can be made of these and of plain data alone.
_RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (*commands.MESSAGES, Batch, MicroBatch, Mean, Sum, Max)
}  # fmt: skip


def encode(message: object) -> bytes:
    """Records, tensors, mappings, sequences and scalars. A meta tensor is its dtype and shape alone."""
    tensors: dict[str, Tensor] = {}
    document = json.dumps(_document(message, tensors)).encode()
    return _LENGTH.pack(len(document)) + document + save(tensors)


def decode(data: bytes | bytearray) -> Any:
    """The reverse of :func:`encode`; tensors are on the CPU, or on the meta device where they were.

    Raises:
        TrainingError: it is none of our messages.
    """
    try:
        start = _LENGTH.size
        end = start + _LENGTH.unpack_from(data)[0]
        return _value(json.loads(data[start:end]), load(bytes(data[end:])))
    except (ValueError, KeyError, TypeError, struct.error, SafetensorError) as error:
        raise TrainingError(
            f"a message of another rank cannot be read: {type(error).__name__}: {error}",
            remedy="start all ranks with one version of lachesis",
        ) from error


def _document(value: Any, tensors: dict[str, Tensor]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.is_meta:
            return {"meta": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
        case Tensor():
            name = str(len(tensors))
            # One tensor may stand in several places, and safetensors wants storage of its own for each.
            tensors[name] = value.detach().cpu().contiguous().clone()
            return {"tensor": name}
        case Mapping():
            return {"mapping": [[_document(part, tensors) for part in item] for item in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [_document(part, tensors) for part in value]}
    name = type(value).__name__
    if _RECORDS.get(name) is not type(value):
        raise TypeError(f"a {name} does not travel between ranks")
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
    raise ValueError(f"{kind!r} is no kind of value")
