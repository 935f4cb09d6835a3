"""The JSON between the server's process and vLLM's workers: arguments, answers and errors. No pickle, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import lachesis.common.errors
from lachesis.common.errors import EngineError, LachesisError
from lachesis.engines.serving.bodies import Refused, error_document


def answer(call: Callable[[], Any]) -> str:
    """The result of a call as JSON, or the error it raised."""
    try:
        return json.dumps({"result": call()})
    except LachesisError as error:
        return json.dumps(error_document(error) | {"status": getattr(error, "status", None)})
    except Exception as error:
        wrapped = EngineError(f"{type(error).__name__}: {error}", remedy="look at the server's log")
        return json.dumps(error_document(wrapped))


def read_answer(text: str) -> Any:
    """The result in an answer.

    Raises:
        LachesisError: what the call raised, of its own class.
    """
    document = json.loads(text)
    error = document.get("error")
    if error is None:
        return document["result"]
    if document.get("status") is not None:
        raise Refused(error["message"], status=document["status"], remedy=error["remedy"])
    kind = getattr(lachesis.common.errors, error["type"], EngineError)
    raise kind(error["message"], remedy=error["remedy"])
