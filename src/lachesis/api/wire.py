"""The records of the protocol: from the bytes of a request to checked values, numbers parsed once.

The types coerce as the original's do ("3" is 3, 2.0 is 2, true is 1). Other than there, no number may be NaN or
infinite, a list reports its first fault instead of all of them, and faulty input is echoed in short only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from lachesis.api.checks import why_unusable
from lachesis.api.json_position import path_at
from lachesis.api.records import ScoredGroup
from lachesis.api.refusals import Refusal

Item = TypeVar("Item")
Record = TypeVar("Record", bound="WireRecord")
Parsed = TypeVar("Parsed")
# One bad number in a list is enough to know; a list of millions of them would otherwise give as many errors.
FirstFault = Annotated[list[Item], Field(fail_fast=True)]
Ints = FirstFault[int]
Floats = FirstFault[float]

# Ids of environments and batches, as the store can hold them.
Id = Annotated[int, Field(ge=-(2**63), lt=2**63)]

_ECHO = 100


class WireRecord(BaseModel):
    """Unknown keys are ignored, as the original does."""

    model_config = ConfigDict(allow_inf_nan=False, ser_json_inf_nan="constants")


class Registration(WireRecord):
    """A trainer's POST /register. ``acknowledge`` is Lachesis's own: batches are to be acknowledged."""

    wandb_group: str
    wandb_project: str
    batch_size: int = Field(ge=1)
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    acknowledge: bool = False


class EnvRegistration(WireRecord):
    """An environment's POST /register-env."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int = Field(ge=1)
    min_batch_allocation: float | None = None


class EnvIdentifier(WireRecord):
    """The body of GET /status-env and POST /disconnect-env."""

    env_id: Id


class Acknowledgement(WireRecord):
    """Lachesis's own POST /batch/ack: batches that the trainer has and will not ask for again."""

    uuid: int
    batch_ids: FirstFault[Id]


class ScoredData(WireRecord):
    """A group. The order of the fields is that of the original's replies."""

    tokens: FirstFault[Ints]
    masks: FirstFault[Ints]
    scores: Floats
    advantages: FirstFault[Floats] | None = None
    ref_logprobs: FirstFault[Floats] | None = None
    messages: FirstFault[FirstFault[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: FirstFault[Floats] | None = None
    overrides: FirstFault[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Id | None = None
    distill_token_ids: FirstFault[FirstFault[Ints]] | None = None
    distill_logprobs: FirstFault[FirstFault[Floats]] | None = None

    @field_validator("messages")
    @classmethod
    def _messages_are_complete(cls, messages: list[list[dict[str, Any]]] | None) -> list[list[dict[str, Any]]] | None:
        for sequence, turns in enumerate(messages or ()):
            for turn, message in enumerate(turns):
                if "role" not in message or "content" not in message:
                    raise ValueError(f"Message must have 'role' and 'content' fields: messages[{sequence}][{turn}]")
        return messages


_MANY = TypeAdapter(FirstFault[ScoredData])
_FREE_FIELDS = ("messages", "generation_params", "overrides", "group_overrides", "images")


def parse_group(body: bytes, *, check: bool) -> ScoredGroup:
    """The group of POST /scored_data; with ``check``, its ``problem`` says why no trainer could use it.

    Raises:
        Refusal: 422, naming the field and index of the fault.
    """
    return _compact(_validated(ScoredData.model_validate_json, body), check=check, loc=())


def parse_groups(body: bytes, *, check: bool) -> list[ScoredGroup]:
    """The groups of POST /scored_data_list: all of them, or none.

    Raises:
        Refusal: 422, naming the group, field and index of the fault.
    """
    return [
        _compact(data, check=check, loc=(index,)) for index, data in enumerate(_validated(_MANY.validate_json, body))
    ]


def parse_record(kind: type[Record], body: bytes) -> Record:
    """Any other record.

    Raises:
        Refusal: 422, naming the field.
    """
    return _validated(kind.model_validate_json, body)


def _validated(validate: Callable[[bytes], Parsed], body: bytes) -> Parsed:
    if not body:
        raise Refusal(422, [{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}])
    try:
        return validate(body)
    except ValidationError as error:
        raise Refusal(422, [_fault(fault, body) for fault in error.errors(include_url=False)]) from error


def _compact(data: ScoredData, *, check: bool, loc: tuple[int, ...]) -> ScoredGroup:
    json = data.__pydantic_serializer__.to_json(data)
    # Free-form values may hide what the typed fields cannot hold. Looking for the words is cheap; they may also
    # be part of a text, so only then the values are walked.
    free = [name for name in _FREE_FIELDS if getattr(data, name) is not None]
    if free and (b"NaN" in json or b"Infinity" in json):
        _refuse_non_finite(data, free, loc)
    return ScoredGroup(
        json=json,
        sequences=len(data.tokens),
        tokens=sum(map(len, data.tokens)),
        env_id=data.env_id,
        score=_mean(data.scores),
        problem=why_unusable(data) if check else "",
    )


def _mean(scores: Sequence[float]) -> float | None:
    mean = sum(scores) / len(scores) if scores else math.inf
    return mean if math.isfinite(mean) else None


def _refuse_non_finite(data: ScoredData, names: Sequence[str], loc: tuple[int, ...]) -> None:
    for name in names:
        for path, number in _numbers(getattr(data, name), (name,)):
            if not math.isfinite(number):
                fault = {
                    "type": "finite_number",
                    "loc": ["body", *loc, *path],
                    "msg": "Input should be a finite number",
                    "input": str(number),
                }
                raise Refusal(422, [fault])


def _numbers(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _numbers(part, (*path, index))


def _fault(fault: Any, body: bytes) -> dict[str, Any]:
    """A fault in the shape of the original's replies."""
    if fault["type"] == "json_invalid":
        reason = fault["ctx"]["error"]
        path = path_at(body, reason)
        return {
            "type": "json_invalid",
            "loc": ["body", *path],
            "msg": f"JSON decode error{_at(path)}: {reason}",
            "input": {},
            "ctx": {"error": reason},
        }
    return {
        "type": fault["type"],
        "loc": ["body", *fault["loc"]],
        "msg": fault["msg"],
        "input": _echo(fault["input"]),
    }


def _at(path: Sequence[str | int]) -> str:
    if not path:
        return ""
    head, *rest = path
    return f" at {head}" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)


def _echo(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= _ECHO else f"{value[:_ECHO]}..."
    return f"<{type(value).__name__}>"
