"""The JSON between the server's process and vLLM's workers: arguments, answers and errors. No pickle, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import lachesis.common.errors
from lachesis.common.errors import EngineError, LachesisError
from lachesis.engines.serving.served import DigestSlice, LoraSpec, ReceiverSpec, Refused
from lachesis.transport.records import ReceivedTensor


def answer(call: Callable[[], Any]) -> str:
    """The result of a call as JSON, or the error it raised."""
    try:
        return json.dumps({"result": call()})
    except LachesisError as error:
        return json.dumps({"error": _error_document(error)})
    except Exception as error:
        wrapped = EngineError(f"{type(error).__name__}: {error}", remedy="look at the server's log")
        return json.dumps({"error": _error_document(wrapped)})


def read_answer(text: str) -> Any:
    """The result in an answer.

    Raises:
        LachesisError: what the call raised, of its own class.
    """
    document = json.loads(text)
    error = document.get("error")
    if error is None:
        return document["result"]
    if error["status"] is not None:
        raise Refused(error["message"], status=error["status"], remedy=error["remedy"])
    kind = getattr(lachesis.common.errors, error["type"], EngineError)
    raise kind(error["message"], remedy=error["remedy"])


def parse_slices(slices: Mapping[str, Any] | None) -> dict[str, DigestSlice] | None:
    """Slices as ``dataclasses.asdict`` makes them, back."""
    return None if slices is None else {name: DigestSlice(**part) for name, part in slices.items()}


def parse_receiver_spec(document: Mapping[str, Any]) -> ReceiverSpec:
    """A spec as ``dataclasses.asdict`` makes it, back from JSON."""
    lora = document["lora"]
    return ReceiverSpec(
        **{
            **document,
            "tensors": tuple(
                ReceivedTensor(tensor["name"], tuple(tensor["shape"]), tensor["dtype"])
                for tensor in document["tensors"]
            ),
            "lora": None if lora is None else LoraSpec(**{**lora, "target_modules": tuple(lora["target_modules"])}),
        }
    )


def _error_document(error: LachesisError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": error.message,
        "remedy": error.remedy,
        "status": error.status if isinstance(error, Refused) else None,
    }
